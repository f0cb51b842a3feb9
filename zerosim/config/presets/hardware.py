"""Accelerators by name: memory, peak arithmetic, memory and link bandwidth, each with its source.

The published figures of `gpus.toml`, and a user's own, read from a TOML file. A device does not reach them in practice.
The CUDA context's and libraries' share of its memory is in `outside.py`.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from zerosim.config.inputs import read_toml
from zerosim.config.parts.fp8 import Fp8Config, check_units
from zerosim.config.presets.collective_tables import CollectiveTables, read_collectives
from zerosim.config.presets.kernel_tables import FLASH_KERNELS, KernelTables, packaged_tables, read_tables
from zerosim.config.presets.machine_file import Machine, read_machine
from zerosim.config.presets.outside import HELD, Outside, OutsideMemory, communicators
from zerosim.errors import InputError, did_you_mean
from zerosim.placement.mesh import Mesh
from zerosim.units import parse_bytes

GB = 10**9
FORMATS = ("fp16", "bf16")
"""The 16-bit formats that tensor cores may have."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The source of each figure of a device, with its status."""

    memory: str
    peak: str
    hbm: str
    link: str


@dataclass(frozen=True, slots=True)
class Links:
    """The bandwidths of a node's links, in bytes per second and in one direction, and how many GPUs a node has.

    link   all of a device's links to the others of its node
    pcie   between a device and its host
    nic    all of a node's NICs together, which its GPUs share
    pair   a bridge from each even GPU to the next one; 0: none
    """

    link: float
    pcie: float
    node_gpus: int
    nic: float
    pair: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. `peak_flops` is dense 16-bit. MFU is a share of it, also of a run that multiplies in 8 bits.
    `fp8_flops` is dense 8-bit, 0 without 8-bit units; `has_mxfp8`: these take MXFP8's scales. `link_bytes_per_s` is one
    direction of all its links to peers, 0 if it has none, `pair_bytes_per_s` of a bridge to one neighbour.

    `formats`: the 16-bit formats of its tensor cores; `held`: what it holds outside of a program, None if unknown;
    `flash`: FlashAttention runs on it, None if unknown, and `flash_kernel` which, '' for a recipe's; `links`: the
    resulting bandwidths of a node's links; `tables`: whose packaged tables of kernels and of collectives it uses;
    `kernels` and `collectives`: its own tables; `machine`: measured by `zerosim calibrate`, None for other devices;
    `cpu_bytes_per_s`: bytes that its node's CPUs read and write in an optimizer step, 0 if unknown.
    """

    name: str
    memory_bytes: int
    peak_flops: int
    hbm_bytes_per_s: int
    link_bytes_per_s: int
    sources: Sources
    held: OutsideMemory | None = None
    flash: bool | None = None
    kernels: KernelTables | None = None
    collectives: CollectiveTables | None = None
    machine: Machine | None = None
    formats: tuple[str, ...] = FORMATS
    pair_bytes_per_s: int = 0
    links: Links | None = None
    tables: tuple[str, str] = ("a100", "")
    flash_kernel: str = ""
    cpu_bytes_per_s: int = 0
    fp8_flops: int = 0
    has_mxfp8: bool = False

    def outside(self, mesh: Mesh, *, is_tied: bool = False) -> tuple[Outside, ...]:
        """Return what a rank of this mesh holds beside its program; empty if unknown. `is_tied`: the model's table is
        its head."""
        return () if self.held is None else self.held.lines(communicators(mesh, is_tied=is_tied))

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16."""
        return "bf16" in self.formats

    @property
    def all_formats(self) -> tuple[str, ...]:
        """The formats in which its tensor cores multiply."""
        return (*self.formats, *["fp8"] * (self.fp8_flops > 0), *["mxfp8"] * self.has_mxfp8)

    @property
    def source(self) -> str:
        """All four in one line."""
        given = self.sources
        return f"memory: {given.memory}; peak: {given.peak}; HBM: {given.hbm}; link: {given.link}"


MOST = 10**18
_ALSO = MappingProxyType(
    {
        "b200-180": "b200", "a100-80-pcie": "a100-pcie", "a100-pcie-80": "a100-pcie", "rtxa6000": "a6000",
        "gh200-480": "gh200", "gh200-96": "gh200", "h20-96": "h20",
    }
)  # fmt: skip
_BY_FULL_NAME = ("a100-pcie", "h100-96", "v100-16")
"""Devices that 'A100', 'H100' or 'V100' alone never means."""
NEEDED = ("name", "memory_bytes", "peak_flops", "hbm_bytes_per_s")
_SPEEDS = ("link_bytes_per_s", "pair_bytes_per_s", "pcie_bytes_per_s", "nic_bytes_per_s", "cpu_bytes_per_s")
KEYS = (*NEEDED, *_SPEEDS, "nic_share", "node_gpus", "formats", "fp8_flops", "mxfp8", "flash_kernel")
"""The keys of a device's TOML file: sizes like "80GB" or whole bytes, bandwidths per second, without `link_bytes_per_s`
no links. `nic_share` of the NICs' bandwidth is what collectives get. `cpu_bytes_per_s` is for all CPUs of a node, which
update offloaded states (`zerosim calibrate` measures it). `fp8_flops` is the dense peak of its 8-bit units, without
which it has none, and `mxfp8` whether they take a scale for 32 numbers. `flash_kernel` names the FlashAttention kernel
that it runs, or is "none". Tables [kernels] (`kernel_tables.py`; or kernels = "h100", whose shares of the peaks it
uses) and [collectives] (`collective_tables.py`) or [machine] (`machine_file.py`) may follow."""


def packaged(file: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads(files("zerosim.config.presets").joinpath(file).read_text(encoding="utf-8"))


@cache
def presets() -> tuple[Hardware, ...]:
    """Return the devices known by name."""
    return tuple(_preset(name, row) for name, row in packaged("gpus.toml").items())


def _preset(name: str, row: Mapping[str, Any]) -> Hardware:
    memory = row["memory_gb"] * GB if "memory_gb" in row else round(100 * row["memory_gib"]) * 2**30 // 100
    pcie = row["c2c"] * GB if "c2c" in row else 12 * GB * 2 ** (row["pcie"] - 3)
    link = row["nccl"] * GB if "nccl" in row else pcie
    return Hardware(
        name,
        memory,
        round(row["tflops"] * 1000) * GB,
        row["hbm"] * GB,
        row["link"] * GB,
        Sources(**row["sources"]),
        HELD[row["held"]] if "held" in row else None,
        flash=row.get("flash", True),
        formats=tuple(row.get("formats", FORMATS)),
        pair_bytes_per_s=round(row.get("pair", 0) * GB),
        links=Links(link, pcie, row["node"], nics_carry(row["nics"])),
        tables=(row["kernels"], row.get("collectives", "")),
        fp8_flops=round(row.get("fp8", 0) * 1000) * GB,
        has_mxfp8=row.get("mxfp8", False),
    )


def nics_carry(gigabits: int) -> float:
    """Return the bytes per second of this many Gb/s of NICs, as NCCL counts them."""
    return gigabits * 120_000_000


def check_formats(device: Hardware, fp8: Fp8Config) -> None:
    """Check that a device multiplies as --fp8 says; a measured machine always does. Raises: InputError."""
    if device.machine is None:
        hint = ", or give fp8_flops in its TOML file" if device.tables == ("", "") else ""
        check_units(fp8, device.name, device.fp8_flops, has_mxfp8=device.has_mxfp8, hint=hint)


def find_hardware(name_or_path: str) -> Hardware:
    """Return a preset by name, or a user's own device from a TOML file (a name with '/' or ending in .toml).

    Names are accepted as people write them: 'H100', 'nvidia h100-80', 'A100-SXM4-80GB', 'Tesla_V100'. Raises:
    InputError for an unknown name, with the nearest; for a name that two devices share; for a bad file.
    """
    if "/" in name_or_path or os.sep in name_or_path or name_or_path.lower().endswith(".toml"):
        return read_hardware(name_or_path)
    wanted = _plain(name_or_path)
    devices = {device.name: device for device in presets()}
    wanted = _ALSO.get(wanted, wanted)
    found = [name for name in devices if wanted == name or (wanted == name.split("-")[0] and name not in _BY_FULL_NAME)]
    if len(found) > 1:
        raise InputError(f"hardware {name_or_path!r} matches {' and '.join(found)}; choose one")
    if not found:
        hint = did_you_mean(wanted, devices, f"known: {', '.join(devices)}, or a TOML file", quote=str)
        raise InputError(f"unknown hardware {name_or_path!r}: {hint}")
    return devices[found[0]]


def read_hardware(path: str) -> Hardware:
    """Read a device from a TOML file with the keys of `KEYS`.

    Raises: InputError for a file that cannot be read, an unknown or missing key, or a bad value, by name.
    """
    try:
        values = read_toml(path, "hardware")
    except InputError as error:
        raise InputError(f"{error}: give a TOML file with {', '.join(NEEDED)}") from None
    where = f"hardware {path}"
    machine = read_machine(where, values.pop("machine")) if "machine" in values else None
    kernels = values.pop("kernels", None)
    if isinstance(kernels, str):
        kernels = packaged_tables(_one_of(where, "kernels", kernels, {device.tables[0] for device in presets()}))
    elif kernels is not None:
        kernels = read_tables(f"{where}, kernels", kernels)
    collectives = values.pop("collectives", None)
    for key in values:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS, f"known keys: {', '.join(KEYS)}")
            raise InputError(f"{where}: unknown key {key!r}: {hint}")
    if missing := [key for key in NEEDED if key not in values]:
        raise InputError(f"{where}: missing {', '.join(missing)}: all of {', '.join(NEEDED)} are needed")
    if not isinstance(values["name"], str) or not values["name"].strip():
        raise InputError(f"{where}: name {values['name']!r}: expected text")
    memory, peak, hbm = (_positive(path, key, values) for key in NEEDED[1:])
    link, pair, pcie, nic, cpu = (_positive(path, key, values) if values.get(key, 0) != 0 else 0 for key in _SPEEDS)
    calls = None if collectives is None else read_collectives(f"{where}, collectives", collectives, link)
    share, node = values.get("nic_share", 1), values.get("node_gpus", 8)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"{where}: nic_share {share!r}: expected a number more than 0, at most 1")
    if isinstance(node, bool) or not isinstance(node, int) or node < 1:
        raise InputError(f"{where}: node_gpus {node!r}: expected a whole number, at least 1")
    formats = values.get("formats", list(FORMATS))
    if not isinstance(formats, list) or not formats:
        raise InputError(f"{where}: formats {formats!r}: expected a list of {' and '.join(FORMATS)}")
    fp8, mxfp8 = _positive(path, "fp8_flops", values) if "fp8_flops" in values else 0, values.get("mxfp8", False)
    if not isinstance(mxfp8, bool):
        raise InputError(f"{where}: mxfp8 {mxfp8!r}: expected true or false")
    if mxfp8 and not fp8:
        raise InputError(f"{where}: mxfp8 = true needs the peak of its 8-bit units; give fp8_flops too, like 4.5e15")
    flash = _one_of(where, "flash_kernel", values.get("flash_kernel", ""), ("none", *FLASH_KERNELS), but="")
    a100 = next(device.links for device in presets() if device.name == "a100-80")
    assert a100 is not None
    return Hardware(
        values["name"], memory, peak, hbm, link, Sources(*[f"given in {path}"] * 4),
        flash=flash != "none" if flash else None,
        kernels=kernels, collectives=calls, machine=machine,
        formats=tuple(_one_of(where, "formats", one, FORMATS) for one in formats),
        pair_bytes_per_s=pair,
        links=Links(link, pcie or a100.pcie, node, (nic or a100.nic) * share, pair),
        tables=("", ""),
        flash_kernel=flash if flash != "none" else "",
        cpu_bytes_per_s=cpu,
        fp8_flops=fp8,
        has_mxfp8=mxfp8,
    )  # fmt: skip


def _one_of(where: str, key: str, value: Any, known: Iterable[str], but: str | None = None) -> str:
    """Return a known word. Raises: InputError with the nearest."""
    if value != but and (not isinstance(value, str) or value not in known):
        hint = did_you_mean(value, known, f"expected one of {', '.join(sorted(known))}")
        raise InputError(f"{where}: {key} {value!r}: {hint}")
    return str(value)


def _positive(path: str, key: str, values: Mapping[str, Any]) -> int:
    """Return a whole number more than 0: 80000000000, 9.89e14 or, for bytes, "80GB"."""
    value = values[key]
    is_bytes = key not in ("peak_flops", "fp8_flops")
    if isinstance(value, str) and is_bytes:
        try:
            value = parse_bytes(value)
        except InputError as error:
            raise InputError(f"hardware {path}: {key} {error}") from None
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        example = '"80GB"' if is_bytes else "312e12"
        raise InputError(
            f"hardware {path}: {key} {values[key]!r}: expected a whole number from 1 to 1e18, like {example}"
        )
    return value


def _plain(name: str) -> str:
    """Return 'NVIDIA A100-SXM4-80GB' as 'a100-80'. Words that make it a different device, such as PCIe, stay."""
    words = re.split(r"[\s_\-]+", name.strip().lower())
    words = [re.sub(r"^(\d+)gi?b?$", r"\1", word) for word in words]
    maker = r"nvidia|tesla|geforce|amd|instinct|gpu|gb|sxm\d?|hbm\d?e?|"
    return re.sub(r"^rtx-", "rtx", "-".join(word for word in words if not re.fullmatch(maker, word)))
