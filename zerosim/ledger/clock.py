"""The clock: when each thing of a step would run, on given hardware. A pure reader of ranks' records.

A device runs its kernels in their order, on its compute stream. A collective waits in the stream of its mesh axis, a
message in that of its pair of ranks and a copy in that of its direction, each behind what came before it there. A
collective starts when its last member has launched it; a Wait holds compute until the work has ended. A collective's
own sums are part of it. What shares a NIC has its fixed share (`costs.py`).

A rank's host launches one kernel or call after the other, and does not wait for the device: it runs ahead where
kernels are long, and the device waits for it where they are short. When the step ends it has read the loss.

Kernels that run while a collective is in flight share the device with it, and take longer by a share. The clock adds
that time where compute waits for the collective, not to each kernel.

Ranks that are alike are simulated once (`train/plan.py`): a member of a group stands where the one that represents it
does, at the call of the same number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from zerosim.device.events import Copy, Launch, Scope
from zerosim.errors import InputError
from zerosim.ledger.costs import Costs
from zerosim.ledger.entries import Busy, Entry, Live
from zerosim.placement.mesh import AXES, Mesh
from zerosim.verbs import MESSAGES

COMPUTE, HOST = "compute", "host"
Key = tuple[str, tuple[tuple[int, ...], ...], int]
"""What members of a call agree on: stream, where each of them stands along the axes that differ, and number."""


class Span(NamedTuple):
    """Something that a stream does from `start` to `stop`, in seconds from the beginning of the step.

    `waits_for` is the stream that compute waits for, where `name` is 'wait'; `number` that of a call in its stream.
    `bubble` is the part of a wait, from and to, in which another rank is not there yet.
    """

    stream: str
    name: str
    start: float
    stop: float
    scope: Scope
    waits_for: str = ""
    number: int = -1
    bubble: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Track:
    """One rank's step in time.

    exposed  seconds that compute waited for a collective's own time, by mesh axis
    bubble   seconds that it waited because another rank was not there yet
    host     seconds that it waited for its host to launch the next kernel
    slowed   seconds that kernels took longer because collectives were in flight
    """

    rank: int
    end: float = 0.0
    compute: float = 0.0
    copies: float = 0.0
    bubble: float = 0.0
    host: float = 0.0
    slowed: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    flops: int = 0
    forward_flops: int = 0
    spans: list[Span] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)  # seconds, and bytes that are live from then on


@dataclass(frozen=True, slots=True)
class Timeline:
    """The ranks that were simulated; `last` is the one that ends last, which is when the step is over."""

    tracks: Mapping[int, Track]

    @property
    def last(self) -> Track:
        return max(self.tracks.values(), key=lambda track: (track.end, -track.rank))

    @property
    def seconds(self) -> float:
        return self.last.end


def simulate(
    paces: Mapping[int, Sequence[Entry]],
    stands_for: Sequence[int],
    mesh: Mesh,
    costs: Costs,
    *,
    keep_spans: bool = False,
) -> Timeline:
    """One step of these ranks (`entries.py`); `stands_for` says which of them each rank of the mesh is like.

    Raises: InputError for ranks of which one waits for a call that another never makes.
    """
    runs = {rank: _Run(rank, paces[rank], mesh, costs, keep_spans) for rank in sorted(set(stands_for))}
    calls = _Calls(runs, stands_for, costs)
    waiting = deque(runs.values())
    stuck = 0
    while waiting:
        run = waiting.popleft()
        before = run.at
        run.go_on(calls)
        if run.at < len(run.entries):
            waiting.append(run)
            stuck = 0 if run.at > before else stuck + 1
            if stuck > len(waiting):
                raise InputError(f"rank {run.track.rank} waits for a call that another rank never makes")
        else:
            stuck = 0
    return Timeline({rank: run.track for rank, run in runs.items()})


class StepTime(NamedTuple):
    """How long a step takes and what its time is made of, on the rank that ends last; in seconds.

    compute, slowed, bubble, host, copies and all of `exposed` (by mesh axis) add up to `seconds`: see `Track`.
    `kernels` is how many compute has; `hardware_flops` are those of all products on all ranks; `model_flops` count each
    forward product and the two of its backward, and none that is computed again.
    """

    rank: int
    seconds: float
    compute: float
    slowed: float
    exposed: Mapping[str, float]
    bubble: float
    host: float
    copies: float
    kernels: int
    hardware_flops: int
    model_flops: int


def step_time(timeline: Timeline, stands_for: Sequence[int]) -> StepTime:
    """The time of a step whose ranks are like those that were simulated."""
    last, tracks = timeline.last, [timeline.tracks[rank] for rank in stands_for]
    return StepTime(
        last.rank,
        last.end,
        last.compute,
        last.slowed,
        dict(last.exposed),
        last.bubble,
        last.host,
        last.copies,
        last.kernels,
        sum(track.flops for track in tracks),
        3 * sum(track.forward_flops for track in tracks),
    )


class _Call:
    """One collective as one rank sees it: when it could start here, and, once that is known, its start and end."""

    __slots__ = ("key", "launch", "launched", "ready", "start", "stop", "stream")

    def __init__(self, key: Key, launch: Launch, stream: str, launched: float) -> None:
        self.key, self.launch, self.stream, self.launched = key, launch, stream, launched
        self.ready = -1.0  # after what is before it in its stream
        self.start = self.stop = -1.0


class _Run:
    """One rank on its way through its record."""

    def __init__(self, rank: int, entries: Sequence[Entry], mesh: Mesh, costs: Costs, keep: bool) -> None:
        self.track = Track(rank)
        self.entries = entries
        self.at = 0
        self.now = 0.0  # of compute
        self.host = 0.0  # the host's own time, at most compute's where the host waits
        self.shared = 0.0  # until when compute has paid for collectives in flight
        self.busy: list[tuple[float, float]] = []  # when kernels ran since then, from and to
        self.mesh, self.costs, self.keep = mesh, costs, keep
        self.calls: dict[Key, _Call] = {}
        self.works: dict[int, _Call] = {}
        self.streams: dict[str, deque[_Call]] = {}  # launched, and not placed in time yet
        self.free: dict[str, float] = {}  # when a stream's last work ends

    def go_on(self, calls: _Calls) -> None:
        """To the end of the record, or to a wait for what other ranks have not launched."""
        while self.at < len(self.entries):
            entry = self.entries[self.at]
            if isinstance(entry, Busy):
                self._compute(entry)
            elif isinstance(entry, Launch):
                self._launch(entry)
            elif isinstance(entry, Copy):
                self._copy(entry)
            elif isinstance(entry, Live):
                self.track.live.append((self.now, entry.nbytes))
            else:
                call = self.works[entry.work]
                if call.stop < 0 and not calls.place(self, call):
                    return
                self._wait(call, entry.scope)
            self.at += 1
        self.track.end = self.now

    def _compute(self, busy: Busy) -> None:
        late = max(0.0, self.host + busy.lag - (self.now + busy.seconds))
        if late:
            self._span(COMPUTE, "wait", self.now, self.now + late, busy.scope, HOST)
        self.track.host += late
        self.now += late
        self.host += busy.launch
        self._span(COMPUTE, busy.name, self.now, self.now + busy.seconds, busy.scope)
        began = self.busy.pop()[0] if self.busy and self.busy[-1][1] == self.now else self.now
        self.now += busy.seconds
        self.busy.append((began, self.now))
        self.track.compute += busy.seconds
        self.track.kernels += busy.kernels
        self.track.flops += busy.flops
        self.track.forward_flops += busy.forward_flops

    def _launch(self, event: Launch) -> None:
        stream = event.axis
        if event.op in MESSAGES:  # numbered by ordered pair and direction, which is forward's or backward's
            ends = [self.mesh.index(rank, event.axis) for rank in event.group]
            stream = f"{event.axis} {ends[0]} to {ends[1]}, {event.scope.phase}"
        key = stream, _places(self.mesh, event.group), event.sequence
        self.host += self.costs.call(event)
        call = _Call(key, event, stream, max(self.now, self.host))
        self.calls[key] = self.works[event.work] = call
        self.streams.setdefault(stream, deque()).append(call)

    def _wait(self, call: _Call, scope: Scope) -> None:
        self._share(call)
        if call.stop > self.now:
            late = max(0.0, call.start - max(self.now, call.ready))
            gap = call.stop - self.now
            self.track.bubble += late
            axis = call.launch.axis
            self.track.exposed[axis] = self.track.exposed.get(axis, 0.0) + gap - late
            absent = (call.start - late, call.start)
            self._span(COMPUTE, "wait", self.now, call.stop, scope, call.stream, bubble=absent)
            self.now = call.stop

    def _share(self, call: _Call) -> None:
        """Kernels ran beside the call: they took longer, and what they lose they lose while it is in flight. A message
        takes no multiprocessors to speak of."""
        if call.launch.op in MESSAGES:
            return
        start, stop = max(self.shared, call.start), min(self.now, call.stop)
        beside = sum(max(0.0, min(stop, end) - max(start, began)) for began, end in self.busy)
        if beside > 0:
            share = self.costs.contention
            slowed = min(beside * share, (call.stop - start) * share / (1 + share))
            self.track.slowed += slowed
            self.now += slowed
        self.shared = max(self.shared, stop)
        self.busy = [span for span in self.busy if span[1] > self.shared]

    def _copy(self, event: Copy) -> None:
        """To the host beside compute; from it compute waits, for the copy is what it goes on with."""
        self.host += self.costs.call(event)
        stream = f"{event.source} to {event.target}"
        start = max(self.now, self.host, self.free.get(stream, 0.0))
        stop = start + self.costs.copy(event)
        self._span(stream, "copy", start, stop, event.scope)
        self.free[stream] = stop
        if event.target == "device":
            self.track.copies += stop - self.now
            self._span(COMPUTE, "wait", self.now, stop, event.scope, stream)
            self.now = stop

    def _span(
        self,
        stream: str,
        name: str,
        start: float,
        stop: float,
        scope: Scope,
        waits_for: str = "",
        number: int = -1,
        bubble: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        if self.keep:
            self.track.spans.append(Span(stream, name, start, stop, scope, waits_for, number, bubble))

    def end_call(self, call: _Call) -> None:
        """Its time is known."""
        self.streams[call.stream].popleft()
        self.free[call.stream] = call.stop
        launch = call.launch
        self._span(call.stream, launch.op, call.start, call.stop, launch.scope, number=launch.sequence)


class _Calls:
    """What ranks do together: a call is placed in time when all of its members have launched it."""

    def __init__(self, runs: Mapping[int, _Run], stands_for: Sequence[int], costs: Costs) -> None:
        self.runs, self.stands_for, self.costs = runs, stands_for, costs
        self._members: dict[tuple[int, ...], tuple[_Run, ...]] = {}

    def members(self, group: tuple[int, ...]) -> tuple[_Run, ...]:
        if group not in self._members:
            ranks = dict.fromkeys(self.stands_for[rank] for rank in group)
            self._members[group] = tuple(self.runs[rank] for rank in ranks)
        return self._members[group]

    def place(self, run: _Run, call: _Call) -> bool:
        """Place a call, and those before it in its stream; False where a member has not launched it yet."""
        while call.stop < 0:
            first = run.streams[call.stream][0]
            if not self._place_first(run, first):
                return False
        return True

    def _place_first(self, run: _Run, call: _Call) -> bool:
        start = 0.0
        for member in self.members(call.launch.group):
            ready = self._ready(member, call.key)
            if ready is None:
                return False
            start = max(start, ready)
        call.start, call.stop = start, start + self.costs.collective(call.launch)
        run.end_call(call)
        return True

    def _ready(self, run: _Run, key: Key) -> float | None:
        """When a member could start: launched, and what is before it in its stream is over; None before its launch."""
        call = run.calls.get(key)
        if call is None:
            return None
        if call.ready < 0:
            while (first := run.streams[call.stream][0]) is not call:
                if not self._place_first(run, first):
                    return None
            call.ready = max(call.launched, run.free.get(call.stream, 0.0))
        return call.ready


@lru_cache(maxsize=4096)
def _places(mesh: Mesh, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Where the members stand along the axes in which they differ: the same for groups that are alike."""
    columns = [[mesh.index(rank, axis) for rank in group] for axis in AXES]
    return tuple(tuple(column) for column in columns if len(set(column)) > 1)
