"""How long one thing takes by itself: a kernel, its launch, a collective, a message, a copy.

`Costs` is what the clock asks. A GPU's come from tables of measured kernels (`gpu_costs.py`) and NCCL's formulas
(`nccl.py`), those of a machine that `zerosim calibrate` measured from its file (`machine_costs.py`). A duration depends
on its event alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Copy, Kernel, Launch


class Costs(Protocol):
    """Seconds of each thing that a rank does."""

    def kernel(self, kernel: Kernel) -> float:
        """Of a kernel on its device."""

    def launch(self, kernel: Kernel) -> float:
        """Of the host, until the kernel is in its stream."""

    def collective(self, launch: Launch) -> float:
        """Of a collective or a message, from the moment when all members are there."""

    def copy(self, copy: Copy) -> float:
        """Of a copy between a device and its host."""

    @property
    def call(self) -> float:
        """Of the host, to launch a collective, a message or a copy."""

    @property
    def contention(self) -> float:
        """How much longer, as a share, kernels take while a collective is in flight."""


class Topology(NamedTuple):
    """Where a group's members are: how many there are, on how many nodes, and how many share a node at most."""

    members: int
    nodes: int
    together: int


def topology(group: Sequence[int], cluster: Cluster) -> Topology:
    """Of these ranks, which fill nodes in their order."""
    on_node = Counter(map(cluster.node_of, group))
    return Topology(len(group), len(on_node), max(on_node.values()))


def bandwidth(place: Topology, cluster: Cluster) -> float:
    """Bytes per second of a ring through such a group: those of its slowest link."""
    if place.nodes == 1:
        return cluster.link
    share = cluster.nic * place.together / cluster.node_gpus
    return share if place.together == 1 else min(share, cluster.link)
