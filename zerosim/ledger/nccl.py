"""How long a collective takes on GPUs: NCCL's own formulas and constants (NVIDIA/nccl 5067397, tuning.cc).

A collective takes a latency and its bytes over the slowest link of its ring, in the cheapest of three protocols; an
all-reduce as a ring or a tree. A node's NICs are shared by its GPUs, and a ring crosses them once: the members of
a group on one node have their share of them together. In an all-reduce by all pairs each member sends the whole buffer
to every other one in a single step: over the link within its node and, side by side, over its own NIC to the rest. An
all-to-all goes the same ways with a part for each member, one member after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Launch
from zerosim.ledger.costs import Topology, bandwidth
from zerosim.verbs import MESSAGES, find_verb

US = 1e-6


class Protocol(NamedTuple):
    """Microseconds of a call, of a step inside a node and of one between nodes, and the share of the bandwidth."""

    base: float
    intra: float
    inter: float
    share: float


RINGS = (Protocol(6.6, 0.6, 2.7, 0.5), Protocol(14.0, 1.9, 4.0, 0.92), Protocol(8.4, 3.4, 14.0, 1.0))
TREES = (Protocol(6.8, 0.6, 5.0, 0.92 / 3.8), Protocol(14.0, 1.25, 8.5, 0.92 * 0.92), Protocol(8.4, 4.0, 14.0, 0.92))
"""LL, LL128 and Simple, over NVLink and a network."""


def collective_seconds(launch: Launch, place: Topology, cluster: Cluster) -> float:
    """A collective or a message of its own, from the moment when all members are there."""
    if launch.payload_bytes == 0 or place.members == 1:
        return 0.0
    speed = bandwidth(place, cluster)
    if launch.op in MESSAGES:
        ways = [_seconds(ring, launch.payload_bytes, 1, place.nodes - 1, speed, cluster.latency) for ring in RINGS]
        return min(ways)
    n, verb = place.members, find_verb(launch.op)
    if _is_by_pairs(launch):
        return _pairs_seconds(launch.payload_bytes, 1, 1, place, cluster)
    if verb.pairwise:
        return _pairs_seconds(launch.payload_bytes / n, place.together - 1, n - place.together, place, cluster)
    steps, inter = verb.rounds * (n - 1), verb.rounds * (place.nodes - 1)
    nbytes = launch.payload_bytes * verb.share(n)
    ways = [_seconds(ring, nbytes, steps, inter, speed, cluster.latency) for ring in RINGS]
    if launch.op == "all_reduce":
        depth, local = (place.nodes - 1).bit_length(), n // place.nodes - 1
        ways += [_seconds(tree, nbytes, 2 * (local + depth), 2 * depth, speed, cluster.latency) for tree in TREES]
    return min(ways)


def _is_by_pairs(launch: Launch) -> bool:
    return launch.op == "all_reduce" and launch.algorithm == "pairs"


def _pairs_seconds(nbytes: float, inside: int, outside: int, place: Topology, cluster: Cluster) -> float:
    """Every member sends `nbytes` to each other one: over the link within its node, in `inside` steps, and side by side
    over its own NIC to the rest, in `outside` steps."""
    ways, away = [], place.members - place.together
    for ring in RINGS:
        within = _seconds(ring, (place.together - 1) * nbytes, inside, 0, cluster.link, cluster.latency)
        nic = cluster.nic / cluster.node_gpus
        across = _seconds(ring, away * nbytes, outside, outside, nic, cluster.latency) if away else 0.0
        ways.append(max(within, across))
    return min(ways)


def sent_share(launch: Launch, members: int) -> float:
    """What a member sends of a call's payload."""
    return members - 1 if _is_by_pairs(launch) else find_verb(launch.op).share(members)


def _seconds(protocol: Protocol, nbytes: float, steps: int, inter: int, speed: float, latency: float) -> float:
    latency *= protocol.base + (steps - inter) * protocol.intra + inter * protocol.inter
    return latency * US + nbytes / (speed * protocol.share)
