"""How devices of one kind are linked, and what their kernels were measured to take: what the clock reads.

Peaks and bandwidths are the preset's (`hardware.py`). The share of them that a kernel reaches is in tables
(`kernel_tables.py`), and what collectives take inside a node too (`collective_tables.py`), or the whole machine was
measured (`machine_file.py`). Here is what links carry, none of it fitted to a measured step.

    links    NCCL's own constants (NVIDIA/nccl 5067397, topo.h): 20, 20 and 20.6 GB/s for each NVLink; B200: what its
             all-gathers and reduce-scatters reached (SimuMax's file: .6735 of 900 GB/s; NCCL's constant is 40.1)
    a NIC    12 GB/s for each 100 Gb/s (the same file), shared by a node's GPUs; how many a node has is recalled
    PCIe     12 GB/s of a V100's PCIe 3 (the same file); derived, double with each generation after it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from zerosim.config.presets.collective_tables import CollectiveTables, packaged_collectives
from zerosim.config.presets.hardware import Hardware
from zerosim.config.presets.kernel_tables import KernelTables, packaged_tables
from zerosim.config.presets.machine_file import Machine
from zerosim.errors import wrong

GB = 10**9


@dataclass(frozen=True, slots=True)
class Links:
    """What a node's links carry, in bytes per second and in one direction, and how many GPUs a node has.

    link   all of a device's links to the others of its node
    pcie   between a device and its host
    nic    all of a node's NICs together, which its GPUs share
    """

    link: float
    pcie: float
    node_gpus: int
    nic: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Links):
    """Devices of one kind, with their peaks, and how nodes of them are linked.

    `measured` is what kernels take: one GPU's tables, or a machine of its own. `borrowed`: they are another GPU's.
    `collectives`: what collectives take inside a node; None where NCCL's formula says it. Three factors, 0
    for what takes no time: `latency` of NCCL's latencies, `host` of the host's launches, `contention` of what kernels
    lose to collectives in flight.
    """

    name: str
    peak_flops: float
    hbm: float
    measured: KernelTables | Machine
    borrowed: bool = False
    collectives: CollectiveTables | None = None
    latency: float = 1.0
    host: float = 1.0
    contention: float = 1.0

    def node_of(self, rank: int) -> int:
        return rank // self.node_gpus

    @property
    def machine(self) -> Machine | None:
        """A machine that was measured; None for GPUs with tables."""
        return self.measured if isinstance(self.measured, Machine) else None

    @property
    def source(self) -> str:
        """Where the times of kernels come from."""
        if isinstance(self.measured, Machine):
            return self.measured.source
        return f"{'assumed, of ' if self.borrowed else ''}{self.measured.gpu}: {self.measured.sources['products']}"

    @property
    def collectives_source(self) -> str:
        """Where the times of collectives inside a node come from."""
        if isinstance(self.measured, Machine):
            return self.measured.source
        return "NCCL's formula" if self.collectives is None else f"{self.collectives.gpu}, {self.collectives.source}"


_LINKS: Mapping[str, tuple[Links, str, str]] = MappingProxyType(
    {
        "v100": (Links(120 * GB, 12 * GB, 16, 96 * GB), "v100", ""),
        "dgx1-v100": (Links(120 * GB, 12 * GB, 8, 48 * GB), "v100", "dgx1-v100"),
        "a100-pcie": (Links(24 * GB, 24 * GB, 8, 192 * GB), "a100-pcie", "a100-pcie"),
        "a100": (Links(240 * GB, 24 * GB, 8, 192 * GB), "a100", "a100"),
        "h100": (Links(370.8 * GB, 48 * GB, 8, 384 * GB), "h100", "h100"),
        "h200": (Links(370.8 * GB, 48 * GB, 8, 384 * GB), "h100", "h100"),
        "b200": (Links(606 * GB, 48 * GB, 8, 384 * GB), "b200", "b200"),
    }
)
"""By the beginning of a device's name: its links, whose tables of kernels and of collectives it takes ('': NCCL's
formula). Nodes: DGX-2 with eight 100 Gb/s NICs, DGX-1 with four, DGX A100 with eight of 200, DGX
H100 and later of 400."""


def cluster_of(device: Hardware, *, node_gpus: int | None = None, nic_bytes_per_s: float | None = None) -> Cluster:
    """A cluster of these devices. Without a preset for the device: an A100's shares, its own links, and the
    NICs of an A100's node.

    Raises: InputError for a node of less than one GPU, and for a NIC that carries nothing.
    """
    if node_gpus is not None and node_gpus < 1:
        raise wrong("node_gpus", f" {node_gpus}: expected at least 1")
    if nic_bytes_per_s is not None and not nic_bytes_per_s > 0:
        raise wrong("nic", f" {nic_bytes_per_s}: expected bytes per second, more than 0")
    links, measured, borrowed, collectives = _of(device)
    given = {"node_gpus": node_gpus, "nic": nic_bytes_per_s}
    values = {of.name: getattr(links, of.name) for of in fields(links)}
    values |= {name: value for name, value in given.items() if value is not None}
    return Cluster(
        name=device.name,
        peak_flops=device.peak_flops,
        hbm=device.hbm_bytes_per_s,
        measured=measured,
        borrowed=borrowed,
        collectives=collectives,
        **values,
    )


def _of(device: Hardware) -> tuple[Links, KernelTables | Machine, bool, CollectiveTables | None]:
    """Its links, what its kernels take, whether that is another GPU's, and what its collectives take.
    Of a machine that was measured: all ranks on it, or on several like it with NICs between them."""
    machine, link = device.machine, device.link_bytes_per_s
    if machine is not None:
        links = Links(link, device.hbm_bytes_per_s, max(machine.cores, machine.ranks), math.inf)
        return links, machine, False, None
    names = [name for name in _LINKS if device.name == name or device.name.startswith(f"{name}-")]
    if not names or device.kernels is not None or device.collectives is not None:
        own = Links(link, _LINKS["a100"][0].pcie, 8, _LINKS["a100"][0].nic)
        kernels = device.kernels or packaged_tables("a100")
        return own, kernels, device.kernels is None, device.collectives
    links, tables, calls = _LINKS[max(names, key=len)]
    collectives = packaged_collectives(calls, links.link) if calls else None
    return links, packaged_tables(tables), not names[0].startswith(tables), collectives
