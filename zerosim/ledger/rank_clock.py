"""One rank of the clock (`clock.py`): its progress through its record, and the calls that it shares with others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import chain, repeat
from math import inf
from operator import add
from typing import NamedTuple

from zerosim.device.copies import CONTROL
from zerosim.device.events import COMPUTE, CPU, Copy, Launch, Scope, Wait
from zerosim.ledger.costs import Costs
from zerosim.ledger.entries import Busy, Entries, Entry, Live
from zerosim.ledger.splice import Reading
from zerosim.ledger.tracks import Span, Track
from zerosim.placement.memories import DEVICE
from zerosim.placement.mesh import EXPERTS, FINEST, STATES, Mesh
from zerosim.verbs import MESSAGES

HOST = "host"
Line = tuple[str, tuple[tuple[int, ...], ...]]
"""A line of calls that are numbered together: their stream, and their members' positions along the axes that differ."""
Key = tuple[str, tuple[tuple[int, ...], ...], int]
"""The identity of a call: its line, and its number there."""


class Copied(NamedTuple):
    """A launched copy, or an event in the CPU's work. Its times are known at once."""

    stream: str
    start: float
    stop: float


class Call:
    """One collective on one rank: its earliest start there and, once known, its start and end."""

    __slots__ = ("key", "launch", "launched", "read", "ready", "start", "stop", "stream")

    def __init__(self, key: Key, launch: Launch, stream: str, launched: float) -> None:
        self.key, self.launch, self.stream, self.launched = key, launch, stream, launched
        self.ready = -1.0  # after the earlier work of its stream
        self.start = self.stop = -1.0
        self.read = 0  # members that have placed theirs beside it


class Run:
    """One rank's progress through its record."""

    def __init__(self, rank: int, entries: Entries, mesh: Mesh, costs: Costs, keep: bool) -> None:
        self.track = Track(rank)
        self.reading = Reading(entries)
        self.lap: Iterator[Entry] = iter(())
        self.may_begin = inf  # laps
        self.began = 0  # entries before the lap
        self.waits: Wait | None = None  # the wait that it stopped at
        self.at = 0  # entries that are over
        self.ended = False
        self.now = 0.0  # of compute
        self.host = 0.0  # the host's own time, at most compute's if the host waits
        self.held = 0.0  # when it last held the device back
        self.reads = False  # whether it waited for what it read from the device: then it never runs ahead for good
        # what the track's figures add up, seconds exposed by axis, and what the host's launches take
        self.added = defaultdict[str, list[float]](list)
        self.shared = 0.0  # the time up to which compute has paid for collectives in flight
        self.busy: list[tuple[float, float]] = []  # intervals of kernels since then
        self.mesh, self.costs, self.keep = mesh, costs, keep
        self.calls: dict[Key, Call] = {}
        self.works: dict[int, Call | Copied] = {}
        self.streams: dict[str, deque[Call]] = {}  # launched, with times still unknown
        self.free: dict[str, float] = {}  # the end of a stream's last work
        self.gates: dict[str, float] = {}  # the time until which a stream waits for another one
        self.lines: dict[tuple[object, ...], Line] = {}  # of calls, by the fields that it depends on
        self.cpu = 0.0  # the host's CPU
        self.copied = 0.0  # the end of the last launched copy
        self.on_cpu: list[tuple[float, float]] = []  # intervals of kernels that compute has not waited for

    def go_on(self, calls: Calls) -> None:
        """Continue to the end of the last lap that may begin (`laps.py`), or to a wait for a call that other ranks have
        not launched."""
        while self._ends_lap(calls):
            if not self.reading.laps:
                self._end()
            if self.ended or not self.may_begin:
                return
            self.may_begin, self.began, self.lap = self.may_begin - 1, self.at, self.reading.lap()

    def _ends_lap(self, calls: Calls) -> bool:
        entry: Entry
        for entry in chain(() if self.waits is None else (self.waits,), self.lap):  # the most frequent first
            if isinstance(entry, Busy):
                self._compute(entry) if entry.place == DEVICE else self._on_cpu(entry)
            elif isinstance(entry, Launch):
                self._launch(entry)
            elif isinstance(entry, Wait):
                call = self.works[entry.work]
                if isinstance(call, Call) and call.stop < 0 and not calls.place(self, call):
                    self.waits = entry
                    return False
                self._end_wait(entry, call)
            elif isinstance(entry, Copy):
                self._copy(entry)
            elif isinstance(entry, Live):
                self.track.live.append((self.now, entry.nbytes))
            else:
                self.works[entry.work] = Copied(CPU, self.cpu, self.cpu)
            self.at += 1
        self.waits = None
        return True

    def _end(self) -> None:
        self._wait_for_copy(max(self.cpu, self.copied), Scope(), "")
        self.track.end, self.ended = self.now, True
        self.added.pop("launch", None)
        for name, each in self.added.items():
            if hasattr(self.track, name):
                setattr(self.track, name, reduce(add, each))
            else:
                self.track.exposed[name] = reduce(add, each)

    def repeat(self, since: Mapping[str, int], times: int) -> None:
        """Add what was added since then again, this number of times."""
        for name, each in self.added.items():
            again = each[since.get(name, 0) :]
            each[:] = [reduce(add, chain(each, chain.from_iterable(repeat(again, times))))]
        if not self.reads:
            self.host = sum(self.added["launch"])  # which is one number

    def move(self, to: Callable[[float], float]) -> None:
        """Move each time to another one, always in the same order."""
        self.now, self.held, self.shared = to(self.now), to(self.held), to(self.shared)
        self.busy = [(to(began), to(ended)) for began, ended in self.busy]
        for times in (self.free, self.gates):
            times.update({stream: to(time) for stream, time in times.items()})
        for call in self._known():
            for name in ("launched", "ready", "start", "stop"):
                if (time := getattr(call, name)) >= 0:
                    setattr(call, name, to(time))
        self.cpu, self.host = to(self.cpu), to(self.host)

    def shape(self) -> tuple[object, ...]:
        """Return the state without its times: the place in the lap, and what is in flight."""
        known = [(call.key[:2], call.read, call.ready < 0, call.stop < 0) for call in self._known()]
        place = self.reading.current, self.at - self.began, self.waits is None
        return *place, len(self.busy), len(self.works), *self.free, *self.gates, *known

    def _known(self) -> Iterable[Call]:
        return dict.fromkeys(call for call in chain(self.calls.values(), self.works.values()) if isinstance(call, Call))

    def forget(self, readers: Mapping[Line, int]) -> None:
        """Forget calls that all readers have placed, works for which nothing waits any more, and kernels beside which
        ran no call that compute will wait for."""
        self.calls = {key: call for key, call in self.calls.items() if call.read < readers[key[:2]]}
        self.works = {work: self.works[work] for work in self.reading.pending()}
        calls = [call for call in self._known() if call.launch.op not in MESSAGES]
        first = min([self.now, *(call.launched for call in calls if not 0 <= call.stop <= self.shared)])
        self.busy = [*(span for span in self.busy[:-1] if span[1] > first), *self.busy[-1:]]

    def _end_wait(self, wait: Wait, call: Call | Copied) -> None:
        if wait.by == CPU:
            self.cpu = max(self.cpu, call.stop)
        elif wait.by != COMPUTE:
            self.gates[wait.by] = max(self.gates.get(wait.by, 0.0), call.stop)
        elif isinstance(call, Call):
            self._wait(call, wait.scope)
        else:
            self._wait_for_copy(call.stop, wait.scope, call.stream)

    def _wait_for_copy(self, stop: float, scope: Scope, stream: str) -> None:
        """Let compute wait until `stop`: for kernels on the CPU while there are any, else for copies."""
        if stop <= self.now:
            return
        cpu = sum((max(0.0, min(stop, end) - max(self.now, began)) for began, end in self.on_cpu), 0.0)
        self.added["cpu"].append(cpu)
        self.added["copies"].append(stop - self.now - cpu)
        self._span(COMPUTE, "wait", self.now, stop, scope, stream or CPU)
        self.now = stop
        self.on_cpu = [span for span in self.on_cpu if span[1] > stop]

    def _on_cpu(self, busy: Busy) -> None:
        start = max(self.cpu, self.host)
        self.cpu = start + busy.seconds
        self._span(CPU, busy.name, start, self.cpu, busy.scope)
        joins = bool(self.on_cpu) and self.on_cpu[-1][1] == start
        began = self.on_cpu.pop()[0] if joins else start
        self.on_cpu.append((began, self.cpu))

    def _compute(self, busy: Busy) -> None:
        late = self.host + busy.lag - (self.now + busy.seconds)
        if late > 0:
            self._span(COMPUTE, "wait", self.now, self.now + late, busy.scope, HOST)
            self.added["host"].append(late)
            self.held = self.now
            self.now += late
        self._launches(busy.launch)
        self._span(COMPUTE, busy.name, self.now, self.now + busy.seconds, busy.scope)
        began = self.busy.pop()[0] if self.busy and self.busy[-1][1] == self.now else self.now
        self.now += busy.seconds
        self.busy.append((began, self.now))
        self.added["compute"].append(busy.seconds)
        self.added["kernels"].append(busy.kernels)
        self.added["flops"].append(busy.flops)
        self.added["model_flops"].append(busy.model_flops)

    def _launches(self, seconds: float) -> None:
        self.host += seconds
        self.added["launch"].append(seconds)

    def _launch(self, event: Launch) -> None:
        stream, places = self.line(event)
        key = stream, places, event.sequence
        self._launches(self.costs.call(event))
        if self.host > self.now:
            self.held = self.now
        call = Call(key, event, stream, max(self.now, self.host, self.gates.get(stream, 0.0)))
        self.calls[key] = self.works[event.work] = call
        self.streams.setdefault(stream, deque()).append(call)

    def line(self, event: Launch) -> Line:
        like = event.op, event.purpose, event.axis, event.group, event.scope.phase
        if like not in self.lines:
            self.lines[like] = self._line(event)
        return self.lines[like]

    def _line(self, event: Launch) -> Line:
        stream = _axis(event)
        if event.op in MESSAGES:  # numbered by ordered pair and direction, which is forward's or backward's
            ends = [self.mesh.index(rank, event.axis) for rank in event.group]
            stream = f"{event.axis} {ends[0]} to {ends[1]}, {event.scope.phase}"
        folded = not {*EXPERTS}.isdisjoint(event.axis.split("+"))
        return stream, _places(self.mesh, event.group, EXPERTS if folded else FINEST[: -len(EXPERTS)])

    def _wait(self, call: Call, scope: Scope) -> None:
        self._share(call)
        if call.stop > self.now:
            late = max(0.0, call.start - max(self.now, call.ready))
            gap = call.stop - self.now
            self.added["bubble"].append(late)
            self.added[_axis(call.launch)] += gap, -late
            absent = (call.start - late, call.start)
            self._span(COMPUTE, "wait", self.now, call.stop, scope, call.stream, bubble=absent)
            self.now = call.stop

    def _share(self, call: Call) -> None:
        """Add the slowdown of kernels that ran beside the call, while it was in flight. A message
        needs almost no multiprocessors."""
        if call.launch.op in MESSAGES:
            return
        start, stop = max(self.shared, call.start), min(self.now, call.stop)
        beside = sum(max(0.0, min(stop, end) - max(start, began)) for began, end in self.busy)
        if beside > 0:
            share = self.costs.contention
            slowed = min(beside * share, (call.stop - start) * share / (1 + share))
            self.added["slowed"].append(slowed)
            self.now += slowed
        self.shared = max(self.shared, stop)
        self.busy = [span for span in self.busy if span[1] > self.shared]

    def _copy(self, event: Copy) -> None:
        """Run a copy beside compute. Compute waits where the program waits: at once, if a copy to the device was not
        launched. The host waits for what it reads from the device, and launches nothing meanwhile."""
        self._launches(self.costs.call(event))
        stream = f"{event.source} to {event.target}"
        begins = self.cpu if event.after == CPU else max(self.now, self.host)
        start = max(begins, self.free.get(stream, 0.0), self.gates.get(stream, 0.0))
        stop = start + self.costs.copy(event)
        self._span(stream, "copy", start, stop, event.scope)
        self.free[stream] = stop
        if event.work is not None:
            self.works[event.work], self.copied = Copied(stream, start, stop), max(self.copied, stop)
        elif event.target == DEVICE:
            self.added["copies"].append(stop - self.now)
            self._span(COMPUTE, "wait", self.now, stop, event.scope, stream)
            self.now = stop
        elif event.purpose == CONTROL:
            self.host, self.reads = stop, True

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

    def end_call(self, call: Call) -> None:
        """Record a call's end, now that it is known."""
        self.streams[call.stream].popleft()
        self.free[call.stream] = call.stop
        launch = call.launch
        self._span(call.stream, launch.op, call.start, call.stop, launch.scope, number=launch.sequence)


class Calls:
    """The calls between ranks. A call gets its times when all of its members have launched it."""

    def __init__(self, runs: Mapping[int, Run], stands_for: Sequence[int], costs: Costs) -> None:
        self.runs, self.stands_for, self.costs = runs, stands_for, costs
        self._sides: dict[tuple[object, ...], list[tuple[Run, Line]]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}  # of a call, by all that its duration depends on

    def sides(self, launch: Launch) -> list[tuple[Run, Line]]:
        """Return the ranks that represent the members of a call, and the line of each one's own call."""
        like = launch.op, launch.purpose, launch.axis, launch.group, launch.scope.phase
        if like not in self._sides:
            if launch.op in MESSAGES:
                found = list(map(self._side, repeat(launch), launch.group))
            else:  # a representative's call is the same for all whom it stands for
                alike = dict.fromkeys(self.stands_for[member] for member in launch.group)
                found = [(self.runs[rank], self.runs[rank].line(launch)) for rank in alike]
            self._sides[like] = list(dict.fromkeys(found))
        return self._sides[like]

    def _side(self, launch: Launch, member: int) -> tuple[Run, Line]:
        """Return the representative of a message's member. Its messages go as far along the axis as the member's."""
        run = self.runs[self.stands_for[member]]
        mesh, axis = run.mesh, launch.axis
        ranks = mesh.group(run.track.rank, axis)
        moved = mesh.index(run.track.rank, axis) - mesh.index(member, axis)
        ends = tuple(ranks[(mesh.index(rank, axis) + moved) % len(ranks)] for rank in launch.group)
        return run, run.line(launch._replace(group=ends))

    def place(self, run: Run, call: Call) -> bool:
        """Set the times of a call and of those before it in its stream. Return False if a member has not launched it
        yet."""
        while call.stop < 0:
            first = run.streams[call.stream][0]
            if not self._place_first(run, first):
                return False
        return True

    def _place_first(self, run: Run, call: Call) -> bool:
        start, number, together = 0.0, call.launch.sequence, list[Call]()
        for member, line in self.sides(call.launch):
            one = member.calls.get((*line, number))
            if one is None or not self._is_ready(member, one):
                return False
            start = max(start, one.ready)
            together.append(one)
        for one in together:
            one.read += 1
        call.start, call.stop = start, start + self._takes(call.launch)
        run.end_call(call)
        return True

    def _takes(self, launch: Launch) -> float:
        like = launch.op, launch.group, launch.payload_bytes, launch.algorithm
        if like not in self._seconds:
            self._seconds[like] = self.costs.collective(launch)
        return self._seconds[like]

    def _is_ready(self, run: Run, call: Call) -> bool:
        """Find a member's earliest start: after its launch and the earlier work of its stream. Return False while that
        work waits for another rank."""
        if call.ready < 0:
            while (first := run.streams[call.stream][0]) is not call:
                if not self._place_first(run, first):
                    return False
            call.ready = max(call.launched, run.free.get(call.stream, 0.0))
        return True


def _axis(event: Launch) -> str:
    """Return the name of the event's axis. Frameworks have a group of their own for model states, also where these are
    cut over cp alone."""
    return "+".join(STATES) if event.axis == "cp" and event.purpose != "activations" else event.axis


@lru_cache(maxsize=4096)
def _places(mesh: Mesh, group: tuple[int, ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the members' positions along those of these axes in which they differ; identical groups have equal
    positions."""
    columns = [[mesh.index(rank, axis) for rank in group] for axis in axes]
    return tuple(tuple(column) for column in columns if len(set(column)) > 1)
