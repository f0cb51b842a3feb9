"""How devices of one kind are linked, and their measured kernel times: the clock's inputs.

Peaks, bandwidths and the links' rates come from the preset (`hardware.py`, `gpus.toml`) or the node (`nodes.toml`). The
share of them that a kernel reaches comes from tables (`kernel_tables.py`), and so do the times of collectives inside a
node (`collective_tables.py`), or the whole machine was measured (`machine_file.py`). Nothing is fitted to a measured
step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from zerosim.config.presets.collective_tables import CollectiveTables, packaged_collectives
from zerosim.config.presets.hardware import GB, Hardware, Links, find_hardware, presets
from zerosim.config.presets.kernel_tables import KernelTables, packaged_tables
from zerosim.config.presets.machine_file import Machine
from zerosim.config.presets.nodes import Node
from zerosim.errors import wrong

CPU_RATE = 32 * 10e9 / 2.57
"""Bytes per second that a node's CPUs move in an optimizer step. ZeRO-Offload, 2101.06840, Table 4: 2.57 s for 10B
parameters on a DGX-2 (two Xeon 8168), at 26 bytes each that Adam reads and writes beside fp16 gradients, and 6 for
rounding to fp16. Its rows of 1B to 8B give 106 to 145 GB/s. Other nodes use this rate because theirs are unknown."""

_OF_A_LINE = 0.8
"""NCCL's rate of an NVLink line: 20 of 25 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Links):
    """Devices of one kind, with their peaks (`fp8_flops`: of 8-bit units, 0 if they have none), and the links between
    nodes of them.

    `measured`: kernel times, of one GPU's tables or of a measured machine. `borrowed`: they are another GPU's.
    `collectives`: times of collectives inside a node; None if NCCL's formula gives them. `flash_kernel`: the
    FlashAttention that runs on them; '' for a recipe's. Of a node's host, which all its ranks share: its memory and its
    drives' in bytes (None: unknown); in bytes per second the rate of its PCIe links to the host each way, of the drives
    each way, and of CPU-Adam (`cpu_known`: the device's file says it). Three factors, 0 for what takes no time:
    `latency` of NCCL's latencies, `host` of the host's launches, `contention` of the kernels' losses to collectives in
    flight.
    """

    name: str
    peak_flops: float
    hbm: float
    measured: KernelTables | Machine
    fp8_flops: float = 0.0
    borrowed: bool = False
    collectives: CollectiveTables | None = None
    flash_kernel: str = ""
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    host_rate: float = math.inf
    nvme_rate: float = math.inf
    cpu_rate: float = CPU_RATE
    cpu_known: bool = False
    latency: float = 1.0
    host: float = 1.0
    contention: float = 1.0

    def node_of(self, rank: int) -> int:
        return rank // self.node_gpus

    def without_limits(self) -> Cluster:
        """Return the same cluster with unlimited memory in its hosts and drives."""
        return replace(self, host_bytes=None, nvme_bytes=None)

    @property
    def machine(self) -> Machine | None:
        """A measured machine; None for GPUs with tables."""
        return self.measured if isinstance(self.measured, Machine) else None

    @property
    def source(self) -> str:
        """The source of the kernels' times."""
        if isinstance(self.measured, Machine):
            return self.measured.source
        return f"{'assumed, of ' if self.borrowed else ''}{self.measured.gpu}: {self.measured.sources['products']}"

    @property
    def cpu_source(self) -> str:
        """The source of the rate of a node's CPUs."""
        return f"of {self.name}'s file" if self.cpu_known else "of a DGX-2, ZeRO-Offload, Table 4"

    @property
    def collectives_source(self) -> str:
        """The source of the times of collectives inside a node."""
        if isinstance(self.measured, Machine):
            return self.measured.source
        if (tables := self.collectives) is None:
            return "NCCL's formula"
        scaled = f", in proportion to links of {self.link / GB:g} GB/s" if tables.link != self.link else ""
        return f"{tables.gpu}, {tables.source}{scaled}"


def cluster_of(
    device: Hardware,
    *,
    node: Node | None = None,
    node_gpus: int | None = None,
    nic_bytes_per_s: float | None = None,
    nvme_bytes_per_s: float | None = None,
) -> Cluster:
    """Return a cluster of these devices, in nodes as their preset's are, or as `node` is; the other arguments override
    both.

    Raises: InputError for a node of less than one GPU, and for a NIC without bandwidth.
    """
    if node_gpus is not None and node_gpus < 1:
        raise wrong("node_gpus", f" {node_gpus}: expected at least 1")
    if nic_bytes_per_s is not None and not nic_bytes_per_s > 0:
        raise wrong("nic", f" {nic_bytes_per_s}: expected bytes per second, more than 0")
    if nvme_bytes_per_s is not None and not nvme_bytes_per_s > 0:
        raise wrong("drive_rate", f" {nvme_bytes_per_s}: expected bytes per second, more than 0")
    links, drives = _links(device), nvme_bytes_per_s or (None if node is None else node.nvme_bytes_per_s)
    if node is not None:
        bridge = device.pair_bytes_per_s * _OF_A_LINE if node.bridged else 0.0
        links = replace(links, node_gpus=node.gpus, nic=node.nic, pair=bridge)
    given = {"node_gpus": node_gpus, "nic": nic_bytes_per_s}
    values = asdict(links) | {name: value for name, value in given.items() if value is not None}
    measured, borrowed = _kernels(device)
    return Cluster(
        name=device.name,
        peak_flops=device.peak_flops,
        hbm=device.hbm_bytes_per_s,
        fp8_flops=device.fp8_flops,
        measured=measured,
        borrowed=borrowed,
        collectives=_collectives(device),
        flash_kernel=device.flash_kernel,
        host_bytes=None if node is None else node.host_bytes,
        nvme_bytes=None if node is None else node.nvme_bytes,
        host_rate=math.inf if node is None or node.host_bytes_per_s is None else float(node.host_bytes_per_s),
        nvme_rate=math.inf if drives is None else float(drives),
        cpu_rate=float(device.cpu_bytes_per_s or CPU_RATE),
        cpu_known=device.cpu_bytes_per_s > 0,
        **values,
    )


def _links(device: Hardware) -> Links:
    """Return the links of a measured machine: all ranks on it, or on several like it with NICs between them."""
    if (machine := device.machine) is not None:
        return Links(device.link_bytes_per_s, device.hbm_bytes_per_s, max(machine.cores, machine.ranks), math.inf)
    if device.links is not None:
        return device.links
    a100 = find_hardware("a100-80").links
    assert a100 is not None
    return replace(a100, link=device.link_bytes_per_s)


def _kernels(device: Hardware) -> tuple[KernelTables | Machine, bool]:
    """Return a device's kernel times, and whether they are another GPU's: an A100's for a user's own device."""
    if (own := device.machine or device.kernels) is not None:
        return own, False
    tables = device.tables[0] or "a100"
    return packaged_tables(tables), not device.name.startswith(tables)


def _collectives(device: Hardware) -> CollectiveTables | None:
    """Return the times of collectives inside a node, scaled from the links on which they were measured."""
    tables = device.tables[1]
    if device.collectives is not None or device.machine is not None or not tables:
        return device.collectives
    of = next(known for known in presets() if known.name.startswith(tables))
    assert of.links is not None
    return packaged_collectives(tables, of.links.link)
