"""How long one thing takes by itself: a kernel, its launch, a collective, a message, a copy.

`Costs` is what the clock asks. A GPU's come from tables of measured kernels (`gpu_costs.py`) and NCCL's formulas
(`nccl.py`), those of a machine that `zerosim calibrate` measured from its file (`machine_costs.py`). A duration depends
on its event alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Phase
from zerosim.device.events import Copy, Kernel, Launch, Scope
from zerosim.placement.spec import is_in_block
from zerosim.verbs import find_verb


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

    def call(self, event: Launch | Copy) -> float:
        """Of the host, to launch a collective, a message or a copy."""

    @property
    def graph(self) -> float:
        """Of the host at most, to launch a block's forward or backward as one CUDA graph; 0 where there is none."""

    @property
    def chunks(self) -> int:
        """Into how many a product and its tensor-parallel collective are taken apart, to overlap; 1: they are not."""

    @property
    def side_stream(self) -> bool:
        """Whether ZeRO-3's reductions run beside compute until the next one."""

    @property
    def contention(self) -> float:
        """How much longer, as a share, kernels take while a collective is in flight."""


def is_captured(scope: Scope) -> bool:
    """Whether CUDA graphs are captured there: of a block's forward and backward, not of tables, head, loss or step."""
    return scope.phase in (Phase.FORWARD, Phase.BACKWARD) and is_in_block(scope.unit)


class Topology(NamedTuple):
    """Where a group's members are: how many there are, on how many nodes, and how many share a node at most.

    `stride`: how far apart two neighbours on a node are. That many groups like it share the node, side by side.
    `bridged`: the members are two GPUs with a bridge between them.
    """

    members: int
    nodes: int
    together: int
    stride: int = 1
    bridged: bool = False


def topology(group: Sequence[int], cluster: Cluster) -> Topology:
    """Of these ranks, which fill nodes in their order."""
    on_node = defaultdict[int, list[int]](list)
    for rank in sorted(group):
        on_node[cluster.node_of(rank)].append(rank)
    gaps = [high - low for ranks in on_node.values() for low, high in pairwise(ranks)]
    first, *rest = sorted(group)
    bridged = cluster.pair > 0 and rest == [first + 1] and first % cluster.node_gpus % 2 == 0
    return Topology(len(group), len(on_node), max(map(len, on_node.values())), min(gaps, default=1), bridged)


def link(place: Topology, cluster: Cluster) -> float:
    """Bytes per second between members on one node."""
    return cluster.pair if place.bridged else cluster.link


def bandwidth(place: Topology, cluster: Cluster) -> float:
    """Bytes per second of a ring through such a group: those of its slowest link."""
    if place.nodes == 1:
        return link(place, cluster)
    share = cluster.nic * place.together / cluster.node_gpus
    return share if place.together == 1 else min(share, cluster.link)


def is_by_pairs(launch: Launch) -> bool:
    """Whether each member sends its whole buffer to each other one."""
    return launch.op == "all_reduce" and launch.algorithm == "pairs"


def sent_share(launch: Launch, members: int) -> float:
    """What a member sends of a call's payload."""
    return members - 1 if is_by_pairs(launch) else find_verb(launch.op).share(members)


def network_seconds(launch: Launch, place: Topology, cluster: Cluster) -> float:
    """How long a call's bytes take over the NICs: a ring's pass those that its members on a node have together; what
    goes from each member to each other one passes its own."""
    if place.nodes == 1:
        return 0.0
    sent = launch.payload_bytes * sent_share(launch, place.members)
    if is_by_pairs(launch) or find_verb(launch.op).pairwise:
        away = (place.members - place.together) / (place.members - 1)
        return sent * away / (cluster.nic / cluster.node_gpus)
    return sent / bandwidth(place, cluster)
