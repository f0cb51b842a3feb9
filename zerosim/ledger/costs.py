"""The time of a single event: a kernel, its launch, a collective, a message, a copy.

The clock asks `Costs`. A GPU's costs come from tables of measured kernels (`gpu_costs.py`) and NCCL's formulas
(`nccl.py`). The costs of a machine that `zerosim calibrate` measured come from its file (`machine_costs.py`). A
duration depends on its event alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Phase
from zerosim.device.events import Copy, Kernel, Launch, Scope
from zerosim.placement.memories import NVME
from zerosim.placement.spec import is_in_block
from zerosim.verbs import find_verb


class Costs(Protocol):
    """The seconds of each event of a rank."""

    def kernel(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel on its device."""

    def launch(self, kernel: Kernel) -> float:
        """Return the host's seconds to put the kernel into its stream."""

    def collective(self, launch: Launch) -> float:
        """Return the seconds of a collective or a message, from the moment when all members have arrived."""

    def copy(self, copy: Copy) -> float:
        """Return the seconds of a copy between a device and its host."""

    def call(self, event: Launch | Copy) -> float:
        """Return the host's seconds to launch a collective, a message or a copy."""

    @property
    def graph(self) -> float:
        """Return the host's most seconds to launch a block's forward or backward as one CUDA graph; 0 without
        graphs."""

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a product and its tensor-parallel collective, for overlap; 1: no chunks."""

    @property
    def side_stream(self) -> bool:
        """Return whether ZeRO-3's reductions run beside compute until the next one."""

    @property
    def contention(self) -> float:
        """Return the share by which kernels slow down while a collective is in flight."""


def is_captured(scope: Scope) -> bool:
    """Return whether CUDA graphs are captured here: for a block's forward and backward, not for tables, head, loss or
    step."""
    return scope.phase in (Phase.FORWARD, Phase.BACKWARD) and is_in_block(scope.unit)


class Topology(NamedTuple):
    """The topology of a group: its size, its number of nodes, and the most members on one node.

    `stride`: the distance of two neighbours on a node. That many such groups share the node, side by side.
    `bridged`: the members are two GPUs with a bridge between them.
    """

    members: int
    nodes: int
    together: int
    stride: int = 1
    bridged: bool = False


def topology(group: Sequence[int], cluster: Cluster) -> Topology:
    """Return the topology of these ranks, which fill nodes in order."""
    on_node = defaultdict[int, list[int]](list)
    for rank in sorted(group):
        on_node[cluster.node_of(rank)].append(rank)
    gaps = [high - low for ranks in on_node.values() for low, high in pairwise(ranks)]
    first, *rest = sorted(group)
    bridged = cluster.pair > 0 and rest == [first + 1] and first % cluster.node_gpus % 2 == 0
    return Topology(len(group), len(on_node), max(map(len, on_node.values())), min(gaps, default=1), bridged)


def link(place: Topology, cluster: Cluster) -> float:
    """Return the bytes per second between members on one node."""
    return cluster.pair if place.bridged else cluster.link


def bandwidth(place: Topology, cluster: Cluster) -> float:
    """Return the bytes per second of a ring through such a group: those of its slowest link."""
    if place.nodes == 1:
        return link(place, cluster)
    share = cluster.nic * place.together / cluster.node_gpus
    return share if place.together == 1 else min(share, cluster.link)


def is_by_pairs(launch: Launch) -> bool:
    """Return whether each member sends its whole buffer to every other member."""
    return launch.op == "all_reduce" and launch.algorithm == "pairs"


def sent_share(launch: Launch, members: int) -> float:
    """Return the share of a call's payload that a member sends."""
    return members - 1 if is_by_pairs(launch) else find_verb(launch.op).share(members)


def network_seconds(launch: Launch, place: Topology, cluster: Cluster) -> float:
    """Return the seconds of a call's bytes over the NICs. A ring uses the NICs of its members on a node together.
    Messages between all pairs of members use each member's own NIC."""
    if place.nodes == 1:
        return 0.0
    sent = launch.payload_bytes * sent_share(launch, place.members)
    if is_by_pairs(launch) or find_verb(launch.op).pairwise:
        away = (place.members - place.together) / (place.members - 1)
        return sent * away / (cluster.nic / cluster.node_gpus)
    return sent / bandwidth(place, cluster)


def copy_seconds(copy: Copy, cluster: Cluster, sharers: int) -> float:
    """Return how long a copy between a rank's memories takes: over its PCIe link and its share of those between the
    node's switches and its host, or over its share of the node's drives. So many ranks share a node."""
    if NVME in (copy.source, copy.target):
        return copy.nbytes / (cluster.nvme_rate / sharers)
    return copy.nbytes / min(cluster.pcie, cluster.host_rate / sharers)


def cpu_seconds(kernel: Kernel, cluster: Cluster, sharers: int) -> float:
    """Return how long a kernel takes on the host's CPUs, which the ranks of a node share: what it moves at their
    rate."""
    return (kernel.bytes_read + kernel.bytes_written) / (cluster.cpu_rate / sharers)
