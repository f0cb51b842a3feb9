"""Accelerators by name: memory, peak arithmetic, memory and link bandwidth, each with where it was read.

The published figures of a few devices, and a user's own, read from a TOML file. They are not what a device reaches in
practice.

Memory is what the driver gives to programs, as PyTorch's out-of-memory errors print it ("total capacity", two decimals
of a GiB): an "80 GB" A100 has 79.15 GiB, which is 85.0e9 bytes. The V100 is the exception: its 32 GB are 32e9 bytes, as
in the ZeRO paper's tables; a device reports 31.75 GiB (deepspeedai/DeepSpeed#3312). What the CUDA context and libraries
take of it is in `outside.py`.

Status of a figure: "paper" or "code" read in a primary source, "sheet" read in a copy or a summary of the
vendor's data sheet, "recalled" not verified.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.config.inputs import read_toml
from zerosim.config.presets.collective_tables import CollectiveTables, read_collectives
from zerosim.config.presets.kernel_tables import KernelTables, read_tables
from zerosim.config.presets.machine_file import Machine, read_machine
from zerosim.config.presets.outside import AMPERE, HOPPER, VOLTA, Held, Outside, communicators
from zerosim.errors import InputError, did_you_mean
from zerosim.placement.mesh import Mesh
from zerosim.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Sources:
    """Where each figure of a device comes from, with its status."""

    memory: str
    peak: str
    hbm: str
    link: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. `peak_flops` is dense 16-bit; `link_bytes_per_s` is one direction of all its links to peers, 0 where
    it has none.

    `held` is what it holds outside of a program, None where that is not known; `flash`: FlashAttention runs on it, None
    where that is not known; `kernels` and `collectives`: tables of its own, None for a preset's; `machine`: what
    `zerosim calibrate` measured, None for a device that was not.
    """

    name: str
    memory_bytes: int
    peak_flops: int
    hbm_bytes_per_s: int
    link_bytes_per_s: int
    sources: Sources
    held: Held | None = None
    flash: bool | None = None
    kernels: KernelTables | None = None
    collectives: CollectiveTables | None = None
    machine: Machine | None = None

    def outside(self, mesh: Mesh, *, is_tied: bool = False) -> tuple[Outside, ...]:
        """What a rank of this mesh holds beside its program; empty where it is not known. `is_tied`: the model's table
        is its head."""
        return () if self.held is None else self.held.lines(communicators(mesh, is_tied=is_tied))

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16: from compute capability 8.0 on, as FlashAttention."""
        return self.flash is not False

    @property
    def source(self) -> str:
        """All four in one line."""
        given = self.sources
        return f"memory: {given.memory}; peak: {given.peak}; HBM: {given.hbm}; link: {given.link}"


MOST = 10**18
_ALSO = MappingProxyType({"b200-180": "b200", "a100-80-pcie": "a100-pcie", "a100-pcie-80": "a100-pcie"})
_BY_FULL_NAME = ("a100-pcie", "h100-96")
"""Devices that nobody means by 'A100' or 'H100' alone."""
KEYS = ("name", "memory_bytes", "peak_flops", "hbm_bytes_per_s", "link_bytes_per_s")
"""The keys of a device's TOML file: sizes like "80GB" or whole bytes, bandwidths per second. All are required but the
last, without which a device has no links. Tables [kernels] (`kernel_tables.py`) and [collectives]
(`collective_tables.py`) or [machine] (`machine_file.py`) may follow."""


def presets() -> tuple[Hardware, ...]:
    """The devices known by name."""
    titan, shown = "code: torchtitan", "code: total capacity as PyTorch prints it,"
    return (
        _device(
            "v100-32", 32 * 10**9, 125, 900, 150, "paper: ZeRO (1910.02054), DGX-2",
            "recalled, consistent with the ZeRO paper: 38 TFLOPs is over 30% of it", "recalled",
            "paper: NVSwitch of DGX-2", VOLTA,
        ),
        _device(
            "dgx1-v100", 32 * 10**9, 125, 900, 150, "as of v100-32", "as of v100-32", "recalled",
            "recalled: six links to four of the seven others, no switch", VOLTA,
        ),
        _device("a100-40", _gib(3941), 312, 1555, 300, f"{shown} tatsu-lab/stanford_alpaca#308", titan, "sheet",
                "sheet", AMPERE),
        _device("a100-80", _gib(7915), 312, 2039, 300, f"{shown} huggingface/accelerate#1864", titan, "sheet",
                "sheet", AMPERE),
        Hardware(
            "a100-pcie", _gib(7915), 312 * 10**12, 1935 * 10**9, 32 * 10**9,
            Sources(f"{shown} of the SXM module, assumed", titan, "sheet",
                    "sheet: PCIe 4 of 16 lanes; no NVLink between the cards"), AMPERE, flash=True,
        ),
        _device("h100-80", _gib(7911), 989, 3350, 450, f"{shown} Lightning-AI/lightning-thunder#474", titan, "sheet",
                "sheet", HOPPER),
        Hardware(
            "h100-96", _gib(9500), 989 * 10**12, 2400 * 10**9, 450 * 10**9,
            Sources("recalled: 96 GB of HBM2e, of which a driver leaves about 95 GiB", f"{titan}; at 500 W, for 700",
                    "code: torchtitan b5bcd76, benchmarks", "assumed: those of h100-80"), HOPPER, flash=True,
        ),
        _device("h200-141", _gib(13983), 989, 4800, 450, f"{shown} pytorch/pytorch#150096", titan, "sheet",
                "code: MLPerf inference v4.1", HOPPER),
        # 192 GB is what Blackwell was announced with. What is sold on HGX and DGX boards is 180: NVIDIA submits it to
        # MLPerf as B200-SXM-180GB.
        _device(
            "b200", _gib(17835), 2250, 7700, 900, f"{shown} pytorch/ao#4002; sold as 180 GB, announced with 192",
            "sheet: HGX B200",
            "sheet: 7.7 TB/s (a device reports 7680 bits at 3996 MHz x 2, pytorch/ao#4002; announced with 8)", "sheet",
            HOPPER,
        ),
    )  # fmt: skip


def _gib(hundredths: int) -> int:
    """Bytes of a figure in GiB with two decimals."""
    return hundredths * 2**30 // 100


def _device(
    name: str, memory: int, teraflops: int, hbm: int, link: int, memory_source: str, peak: str, hbm_source: str,
    nvlink: str, held: Held,
) -> Hardware:  # fmt: skip
    """Bandwidths in GB/s, `link` in one direction, and where each figure was read; `nvlink` is both directions.

    FlashAttention wants Ampere or newer (the README of Dao-AILab/flash-attention).
    """
    both = f"half of NVLink's total of both directions, {2 * link} GB/s ({nvlink})"
    figures = memory, teraflops * 10**12, hbm * 10**9, link * 10**9
    sources = Sources(memory_source, peak, hbm_source, both)
    return Hardware(name, *figures, sources, held, flash=held is not VOLTA)


def find_hardware(name_or_path: str) -> Hardware:
    """A preset by name, or a user's own device from a TOML file (a name with '/' or ending in .toml).

    Names are taken as people write them: 'H100', 'nvidia h100-80', 'A100-SXM4-80GB', 'Tesla_V100'.
    Raises: InputError for an unknown name, with the nearest; for a name that two devices share; for a bad file.
    """
    if "/" in name_or_path or name_or_path.lower().endswith(".toml"):
        return read_hardware(name_or_path)
    wanted = _plain(name_or_path)
    devices = {device.name: device for device in presets()}
    wanted = _ALSO.get(wanted, wanted)
    found = [name for name in devices if wanted == name or (wanted == name.split("-")[0] and name not in _BY_FULL_NAME)]
    if len(found) > 1:
        raise InputError(f"hardware {name_or_path!r} is one of {' or '.join(found)}: name one")
    if not found:
        hint = did_you_mean(wanted, devices, f"known: {', '.join(devices)}, or a TOML file", quote=str)
        raise InputError(f"unknown hardware {name_or_path!r}: {hint}")
    return devices[found[0]]


def read_hardware(path: str) -> Hardware:
    """A device from a TOML file with the keys of `KEYS`.

    Raises: InputError for a file that cannot be read, an unknown or missing key, or a bad value, by name.
    """
    try:
        values = read_toml(path, "hardware")
    except InputError as error:
        raise InputError(f"{error}: give a TOML file with {', '.join(KEYS)}") from None
    where = f"hardware {path}"
    machine = read_machine(where, values.pop("machine")) if "machine" in values else None
    kernels = read_tables(f"{where}, kernels", values.pop("kernels")) if "kernels" in values else None
    collectives = values.pop("collectives", None)
    for key in values:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS, f"known keys: {', '.join(KEYS)}")
            raise InputError(f"hardware {path}: unknown key {key!r}: {hint}")
    if missing := [key for key in KEYS[:-1] if key not in values]:
        raise InputError(f"hardware {path}: missing {', '.join(missing)}: all of {', '.join(KEYS[:-1])} are needed")
    if not isinstance(values["name"], str) or not values["name"].strip():
        raise InputError(f"hardware {path}: name {values['name']!r}: expected text")
    given = f"given in {path}"
    memory, peak, hbm = (_positive(path, key, values) for key in KEYS[1:-1])
    link = _positive(path, KEYS[-1], values) if values.get(KEYS[-1], 0) != 0 else 0
    calls = None if collectives is None else read_collectives(f"{where}, collectives", collectives, link)
    sources = Sources(given, given, given, given)
    return Hardware(
        values["name"], memory, peak, hbm, link, sources, kernels=kernels, collectives=calls, machine=machine
    )


def _positive(path: str, key: str, values: Mapping[str, Any]) -> int:
    """A whole number more than 0: 80000000000, 9.89e14 or, for bytes, "80GB"."""
    value = values[key]
    is_bytes = key != "peak_flops"
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
    """'NVIDIA A100-SXM4-80GB' as 'a100-80'. What makes another device of it, such as PCIe, stays."""
    words = re.split(r"[\s_\-]+", name.strip().lower())
    words = [re.sub(r"^(\d+)gi?b?$", r"\1", word) for word in words]
    return "-".join(word for word in words if not re.fullmatch(r"nvidia|tesla|gpu|gb|sxm\d?|hbm\d?e?|", word))
