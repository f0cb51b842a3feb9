"""The time of a collective on GPUs: as measured inside a node, or by NCCL's formula if nothing was measured.

A table (`config/presets/collective_tables.py`) has times of some verbs between some numbers of ranks. The least
time of a curve is its latency, and the rest is its transfer.

    another number of ranks   the nearest measured number's time, at the payload for which a rank sends as many bytes
    another verb              all-gather's time in the same way, or reduce-scatter's, or all-reduce's
    latency                   scaled by the ratio of the two latencies in NCCL's formula
    transfer                  over links of another speed: scaled by the links' speeds
    a strided group           no faster than the measured rate of such groups, if the box has such a row. An
                              all-reduce sends half of its bytes as a reduce-scatter does, and half as an all-gather

Between nodes NCCL's formula holds. A call takes at least as long as its members on one node would take for the same
payload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.collective_tables import CollectiveTables
from zerosim.device.events import Launch
from zerosim.ledger.costs import Topology, is_by_pairs, link, sent_share
from zerosim.ledger.nccl import RINGS, nccl_seconds
from zerosim.verbs import MESSAGES, find_verb

LIKE = ("all_gather", "reduce_scatter", "all_reduce")
"""The verbs whose times an unmeasured verb takes: the first measured one."""


def collective_seconds(launch: Launch, place: Topology, cluster: Cluster) -> float:
    """Return the seconds of a collective or a message alone, from the moment when all members have arrived."""
    tables, verb = cluster.collectives, find_verb(launch.op)
    if launch.payload_bytes == 0 or place.members == 1:
        return 0.0
    if tables is None:
        return nccl_seconds(launch, place, cluster)
    if place.nodes == 1:
        return _inside(launch, launch.payload_bytes, place, tables, cluster)
    seconds = nccl_seconds(launch, place, cluster)
    if place.together == 1 or launch.op in MESSAGES:
        return seconds
    stays = launch.payload_bytes * (place.together / place.members if verb.pairwise else 1.0)
    return max(seconds, _inside(launch, stays, place._replace(members=place.together, nodes=1), tables, cluster))


def _inside(launch: Launch, payload: float, place: Topology, tables: CollectiveTables, cluster: Cluster) -> float:
    verb, n, like = find_verb(launch.op), place.members, launch.op
    sent, steps = payload * sent_share(launch, n), verb.rounds * (n - 1)
    if launch.op in MESSAGES:
        n, like, steps = 2, "send", 1
    elif is_by_pairs(launch):
        like, steps = "all_to_all", 1
    of = find_verb(next(known for known in (like, *LIKE) if known in tables.calls))
    ranks = nearest(tables.calls[of.name], n)
    curve = tables.calls[of.name][ranks]
    least = curve.points[0][1]
    latency = least * _latency(steps) / _latency(of.rounds * (ranks - 1))
    transfer = curve.seconds(sent / of.share(ranks)) - least
    if place.stride > 1 and tables.strided and like != "send":
        transfer = max(transfer, sent * _strided(tables, like, place.stride))
    return cluster.latency * latency + transfer * tables.link / link(place, cluster)


def nearest(measured: Iterable[int], wanted: int) -> int:
    """Return the measured number with the nearest logarithm; of two, the smaller."""
    return min(measured, key=lambda known: (abs(math.log(known / wanted)), known))


def _latency(steps: int) -> float:
    """Return the microseconds of that number of steps in NCCL's LL protocol."""
    return RINGS[0].base + steps * RINGS[0].intra


def _strided(tables: CollectiveTables, verb: str, stride: int) -> float:
    """Return the seconds per byte that a rank sends."""
    if verb == "all_reduce" and verb not in tables.strided:
        return (_strided(tables, "reduce_scatter", stride) + _strided(tables, "all_gather", stride)) / 2
    speeds = tables.strided.get(verb) or next(iter(tables.strided.values()))
    return 1 / speeds[nearest(speeds, stride)]
