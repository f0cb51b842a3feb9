"""Ranks whose steps begin alike: up to there one of them runs for all.

Ranks of one pipeline stage along the axes of the data compute the same, and often differ only in the optimizer step:
in the shares of their slices. So the clock simulates a long step's forwards and backwards of one rank of each kind, and
goes on with all ranks (`Run`) where the first of them differs. That is exact: while the entries of ranks agree, and
those of the members of their calls do so too, the ranks' times are the same floats.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from math import inf
from operator import add
from typing import NamedTuple

from zerosim.device.events import Launch, Wait
from zerosim.ledger.costs import Costs
from zerosim.ledger.entries import Busy, Entries
from zerosim.ledger.lines import Call
from zerosim.ledger.rank_clock import Calls, Run
from zerosim.ledger.splice import Spliced
from zerosim.placement.mesh import AXES, DATA, Mesh

KEPT = "now", "host", "held", "reads", "shared", "cpu", "copied", "began", "at", "places"
"""A rank's figures that are those of its leader."""


class Alike(NamedTuple):
    """`leaders` run until the place at which each stops. Every one of the `ranks` then follows one of them."""

    leaders: Mapping[int, Run]
    follows: Mapping[int, int]
    stops: Mapping[int, int]
    ranks: Mapping[int, Run]

    def follow(self) -> Mapping[int, Run]:
        """Return every rank where its leader has stopped."""
        for rank, run in self.ranks.items():
            _follow(self.leaders[self.follows[rank]], self.stops[self.follows[rank]], run)
        return self.ranks


def alike(paces: Mapping[int, Entries], stands_for: Sequence[int], mesh: Mesh, costs: Costs) -> Alike | None:
    """Find the ranks that begin alike. None if no rank can spare another one's run."""
    seen, steps = (
        dict[tuple[int, ...], int](),
        {rank: pace for rank, pace in paces.items() if isinstance(pace, Spliced)},
    )
    others = [axis for axis in AXES if axis not in DATA]
    follows = {
        rank: seen.setdefault(tuple(mesh.index(rank, axis) for axis in others), rank) for rank in sorted({*stands_for})
    }
    if len(seen) == len(follows) or len(steps) < len(paces):
        return None
    leaders = {rank: Run(rank, steps[rank], mesh, costs, keep=False) for rank in seen.values()}
    stops = {rank: len(steps[rank].entries) for rank in leaders}
    calls = Calls(leaders, [follows[rank] for rank in stands_for], costs)
    for rank, leader in follows.items():
        if rank != leader:
            stops[leader] = min(stops[leader], _agreed(leaders[leader], steps[leader], steps[rank], calls))
    for leader, run in leaders.items():
        last = run.reading.laps.pop()
        if stops[leader] <= last.start:
            return None
        run.reading.laps += range(last.start, stops[leader]), range(stops[leader], last.stop)
        run.may_begin = len(run.reading.laps) - 1
    ranks = {rank: Run(rank, steps[rank], mesh, costs, keep=False) for rank in follows}
    pairs = [(run.reading, leaders[follows[rank]].reading, stops[follows[rank]]) for rank, run in ranks.items()]
    return None if any(one.looks_back(its, stop) for one, its, stop in pairs) else Alike(leaders, follows, stops, ranks)


def _agreed(run: Run, step: Spliced, other: Spliced, calls: Calls) -> int:
    """Return the number of entries in which two steps agree."""
    if step.laps[:-1] != other.laps[:-1] or step.laps[-1].start != other.laps[-1].start:
        return 0
    known, kinds, place = dict[tuple[object, ...], bool](), dict[Hashable, Hashable](), 0
    for place, (one, its) in enumerate(zip(step.entries, other.entries, strict=False)):
        if isinstance(one, Busy):
            if one != its:
                break
            continue
        like, like_its = step.likes[place], other.likes[place]
        if like[2:] != like_its[2:] or kinds.setdefault(like.work, like_its.work) != like_its.work:
            break
        if isinstance(one, Launch) and isinstance(its, Launch):
            if one[:1] + one[2:6] + one[8:] != its[:1] + its[2:6] + its[8:]:
                break
            pair = one[2:7], its.group, one[8:], one.scope.phase, run.costs.graph and one.scope.unit
            if pair not in known:
                known[pair] = _same(run, one, its, calls)
            if not known[pair]:
                break
        elif not (isinstance(one, Wait) and isinstance(its, Wait) and one[::2] == its[::2]):
            break
    return place if len({*kinds.values()}) == len(kinds) else 0


def _same(run: Run, call: Launch, other: Launch, calls: Calls) -> bool:
    """Return whether calls of two ranks are numbered alike, between members alike, and take the same time."""
    ways = run.way(call), run.way(other)
    if ways[0].line is not ways[1].line or ways[0].launch != ways[1].launch:
        return False
    return calls.sides(ways[0], call) == calls.sides(ways[1], other) and calls.takes(call) == calls.takes(other)


def _follow(leader: Run, stop: int, run: Run) -> None:
    """Begin where the leader has stopped."""
    for name in KEPT:
        setattr(run, name, getattr(leader, name))
    run.busy, run.free, run.gates, run.on_cpu = [*leader.busy], {**leader.free}, {**leader.gates}, [*leader.on_cpu]
    for name, each in leader.added.items():
        run.added[name] = [reduce(add, each)] if each else []
    run.reading.follow(leader.reading, stop)
    entries = zip(leader.reading.entries[:stop], run.reading.entries, strict=False)
    calls = ((one, its) for one, its in entries if isinstance(one, Launch) and isinstance(its, Launch))
    groups = {(one.axis, one.group): its.group for one, its in calls}
    copies = dict[Call, Call]()
    for line in leader.lines.values():
        for number, call in line.calls.items():
            copies[call] = its = _copied(call, groups, run)
            its.way.line.calls[number] = its
    for work, one in leader.works.items():
        if isinstance(one, Call) and one not in copies:
            copies[one] = _copied(one, groups, run)
        run.works[work] = copies[one] if isinstance(one, Call) else one
    for stream, queue in leader.queues.items():
        run.queues[stream].extend(copies[call] for call in queue)
    run.waits = leader.waits and (leader.waits[0], copies[leader.waits[1]])
    run.may_begin = inf


def _copied(call: Call, groups: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]], run: Run) -> Call:
    """Return a leader's call as that of another rank."""
    event = call.event._replace(group=groups[call.event.axis, call.event.group])
    copy = Call(run.way(event), call.number, event, call.launched)
    copy.ready, copy.start, copy.stop, copy.read = call.ready, call.start, call.stop, call.read
    return copy
