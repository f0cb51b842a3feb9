"""The time of a collective on GPUs by NCCL's own formulas and constants (NVIDIA/nccl, src/graph/tuning.cc).

A collective takes a latency and its bytes over the slowest link of its ring, in the cheapest of three protocols; an
all-reduce as a ring or a tree. A node's NICs are shared by its GPUs, and a ring crosses them once: the members of
a group on one node have their share of them together. In an all-reduce by all pairs each member sends the whole buffer
to every other one in a single step: over the link within its node and, side by side, over its own NIC to the rest. An
all-to-all takes the same paths with a piece for each member, one member after the other.

Two things differ from tuning.cc. A broadcast and a reduce take the latency of every step of their chain, where NCCL
counts one. Between two sizes of its table of trees the share is interpolated, so that more bytes never end sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Launch
from zerosim.ledger.costs import Topology, bandwidth, is_by_pairs, link
from zerosim.verbs import MESSAGES, find_verb

US = 1e-6


class Protocol(NamedTuple):
    """Microseconds of a call, of a step inside a node and of one between nodes, and the share of the bandwidth."""

    base: float
    intra: float
    inter: float
    share: float


RINGS = (Protocol(6.6, 0.6, 2.7, 0.5), Protocol(14.0, 1.9, 4.0, 0.92), Protocol(8.4, 3.4, 14.0, 1.0))
TREES = (Protocol(6.8, 0.6, 5.0, 0.92 / 3.8), Protocol(14.0, 1.25, 8.5, 0.92), Protocol(8.4, 4.0, 14.0, 0.92))
"""LL, LL128 and Simple, over NVLink and a network."""
_LL, _LL128, _SIMPLE = range(3)
_POST = 1.0
"""The least microseconds of each step of a ring across nodes, to post the step to the network."""
_PLATEAU = 1.4
"""The factor of the latency of an all-reduce's Simple ring across nodes."""
_LL_BETWEEN = (39e9, 20.4e9)
"""The most bytes per second of LL between two nodes, and between more."""
_TREE_LL128 = (7 / 9, 120 / 128)
"""LL128's share of a tree's bandwidth inside a node, and between nodes."""
_TREE_SHARES = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
"""The share left of a tree's bandwidth by powers of 2 of its payload, from 64 bytes on ("trees are not perfectly
sticking to the model for medium sizes")."""


def nccl_seconds(launch: Launch, place: Topology, cluster: Cluster) -> float:
    """Return the seconds of a collective or a message alone, from the moment when all members have arrived."""
    if launch.payload_bytes == 0 or place.members == 1:
        return 0.0
    n, verb, payload = place.members, find_verb(launch.op), launch.payload_bytes
    if is_by_pairs(launch):
        return _pairs_seconds(payload, 1, 1, place, cluster)
    if verb.pairwise:
        return _pairs_seconds(payload / n, place.together - 1, n - place.together, place, cluster)
    steps, crossings = verb.rounds * (n - 1), verb.rounds * (place.nodes - 1)
    if launch.op in MESSAGES:
        steps, crossings = 1, place.nodes - 1
    ways = _rings(payload * verb.share(n), steps, crossings, place, cluster, is_sum=launch.op == "all_reduce")
    if launch.op == "all_reduce":
        ways += _trees(payload, place, cluster)
    return min(ways)


def _rings(
    nbytes: float, steps: int, crossings: int, place: Topology, cluster: Cluster, *, is_sum: bool = False
) -> list[float]:
    """Return the times of a ring in each protocol, where a member sends `nbytes` in `steps`, some of which cross
    nodes."""
    ways, speed = list[float](), bandwidth(place, cluster)
    for protocol, ring in enumerate(RINGS):
        intra, inter, reached, longer = ring.intra, ring.inter, speed * ring.share, 1.0
        if crossings:
            intra = max(intra, _POST)
            inter = TREES[protocol].inter if place.together == 1 else inter  # nothing hides it
            reached = min(reached, _slowest_ll(place)) if protocol == _LL else reached
            longer = _PLATEAU if is_sum and protocol == _SIMPLE else 1.0
        latency = longer * (ring.base + (steps - crossings) * intra + crossings * inter)
        ways.append(cluster.latency * latency * US + nbytes / reached)
    return ways


def _trees(payload: int, place: Topology, cluster: Cluster) -> list[float]:
    """Return the times of a tree over the nodes with a chain inside each, up and down, in each protocol."""
    ways, speed = list[float](), bandwidth(place, cluster)
    depth, local = place.nodes.bit_length() - 1, place.members // place.nodes - 1
    for protocol, tree in enumerate(TREES):
        reached = speed * tree.share
        if protocol == _LL128:
            reached *= _TREE_LL128[place.nodes > 1]
        if protocol == _LL and place.nodes > 1:
            reached = min(reached, _slowest_ll(place))
        latency = tree.base + 2 * (local * tree.intra + depth * tree.inter)
        nbytes = 2 * payload / _at_power(_TREE_SHARES[protocol], payload / 64)
        ways.append(cluster.latency * latency * US + nbytes / reached)
    return ways


def _slowest_ll(place: Topology) -> float:
    return _LL_BETWEEN[place.nodes > 2]


def _at_power(shares: Sequence[float], size: float) -> float:
    power = math.log2(max(1.0, size))
    below = min(int(power), len(shares) - 2)
    return shares[below] + (shares[below + 1] - shares[below]) * min(1.0, power - below)


def _pairs_seconds(nbytes: float, inside: int, outside: int, place: Topology, cluster: Cluster) -> float:
    """Return the seconds in which every member sends `nbytes` to each other member: over the link within its node, in
    `inside` steps, and at the same time over its own NIC to the rest, in `outside` steps."""
    ways, away = list[float](), place.members - place.together
    for protocol in RINGS:
        within = across = 0.0
        if place.together > 1:
            within = cluster.latency * (protocol.base + inside * protocol.intra) * US
            within += (place.together - 1) * nbytes / (link(place, cluster) * protocol.share)
        if away:
            across = cluster.latency * (protocol.base + outside * protocol.inter) * US
            across += away * nbytes / (cluster.nic / cluster.node_gpus * protocol.share)
        ways.append(max(within, across))
    return min(ways)
