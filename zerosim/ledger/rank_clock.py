"""One rank of the clock (`clock.py`): its progress through its record, and the calls that it shares with others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain, repeat
from math import inf
from operator import add

from zerosim.device.copies import CONTROL
from zerosim.device.events import COMPUTE, CPU, Copy, Launch, Scope, Wait
from zerosim.ledger.costs import Costs, is_captured
from zerosim.ledger.entries import Busy, Entries, Live
from zerosim.ledger.lines import Call, Copied, Line, Way, places_of, stream_of
from zerosim.ledger.splice import Reading
from zerosim.ledger.tracks import Span, Track
from zerosim.placement.memories import DEVICE
from zerosim.placement.mesh import Mesh

HOST = "host"


class Run:
    """One rank's progress through its record."""

    def __init__(self, rank: int, entries: Entries, mesh: Mesh, costs: Costs, keep: bool) -> None:
        self.track = Track(rank)
        self.reading = Reading(entries)
        self.laps = tuple(self.reading.laps)  # all of the step
        self.places: Sequence[int] = ()  # of the present lap, which are still to come
        self.may_begin = inf  # laps
        self.began = 0  # entries before the lap
        self.waits: tuple[Wait, Call] | None = None  # the wait that it stopped at
        self.at = 0  # entries that are over
        self.ended = False
        self.now = 0.0  # of compute
        self.host = 0.0  # the host's own time, at most compute's if the host waits
        self.held = 0.0  # when it last held the device back
        self.reads = False  # whether it waited for what it read from the device: then it never runs ahead for good
        # what the track's figures add up, and seconds exposed by axis
        self.added = defaultdict[str, list[float]](list)
        self.shared = 0.0  # the time up to which compute has paid for collectives in flight
        self.busy: list[tuple[float, float]] = []  # intervals of kernels since then
        self.mesh, self.costs, self.keep = mesh, costs, keep
        self.works: dict[int, Call | Copied] = {}
        self.queues = defaultdict[str, deque[Call]](deque)  # by stream: launched calls, with times still unknown
        self.free: dict[str, float] = {}  # the end of a stream's last work
        self.gates: dict[str, float] = {}  # the time until which a stream waits for another one
        self.lines: dict[tuple[object, ...], Line] = {}  # by streams and positions
        self.ways: dict[tuple[object, ...], Way] = {}  # of calls, by all that they depend on
        self.ways_at: dict[int, Way] = {}  # by place
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
            self.may_begin, self.began, self.places = self.may_begin - 1, self.at, self.reading.lap()

    def _ends_lap(self, calls: Calls) -> bool:
        if self.waits is not None:
            wait, call = self.waits
            if call.stop < 0 and not calls.place(self, call):
                return False
            self._end_wait(wait, call)
            self.waits, self.at = None, self.at + 1
        entries, reading, began = self.reading.entries, self.reading, self.began - self.reading.current.start
        for place in self.places:
            entry = entries[place]
            if isinstance(entry, Busy):  # the most frequent first
                self._compute(entry) if entry.place == DEVICE else self._on_cpu(entry)
            elif isinstance(entry, Launch):
                self._launch(place, entry)
            elif isinstance(entry, Wait):
                work = self.works[reading.awaited(place, entry)]
                if isinstance(work, Call) and work.stop < 0 and not calls.place(self, work):
                    self.waits, self.at = (entry, work), began + place
                    self.places = range(place + 1, reading.current.stop)
                    return False
                self._end_wait(entry, work)
            elif isinstance(entry, Copy):
                self._copy(place, entry)
            elif isinstance(entry, Live):
                self.track.live.append((self.now, entry.nbytes))
            else:
                self.works[reading.work(place, entry.work)] = Copied(CPU, self.cpu, self.cpu)
        self.at, self.places = began + reading.current.stop, ()
        return True

    def _end(self) -> None:
        self._wait_for_copy(max(self.cpu, self.copied), Scope(), "")
        track, entries, of_lap = self.track, self.reading.entries, dict[range, list[Busy]]()
        track.end, self.ended = self.now, True
        for name, each in self.added.items():
            if hasattr(track, name):
                setattr(track, name, reduce(add, each))
            else:
                track.exposed[name] = reduce(add, each)
        for lap in {*self.laps}:
            each_entry = map(entries.__getitem__, lap)
            of_lap[lap] = [one for one in each_entry if isinstance(one, Busy) and one.place == DEVICE]
        seconds = {lap: [one.seconds for one in kernels] for lap, kernels in of_lap.items()}
        track.compute = reduce(add, chain.from_iterable(seconds[lap] for lap in self.laps), 0.0)
        for lap, kernels in of_lap.items():
            times = self.laps.count(lap)
            track.kernels += times * sum(one.kernels for one in kernels)
            track.flops += times * sum(one.flops for one in kernels)
            track.model_flops += times * sum(one.model_flops for one in kernels)

    def repeat(self, since: Mapping[str, int], laps: int, times: int, host: float) -> None:
        """Add what so many laps added since then again, this number of times. `host` is the host's time till now."""
        for name, each in self.added.items():
            again = each[since.get(name, 0) :]
            each[:] = [reduce(add, chain(each, chain.from_iterable(repeat(again, times))))]
        if not self.reads:
            current, at = self.reading.current, self.reading.current.start + self.at - self.began
            launches = [self._launches(place) for place in chain(range(at, current.stop), range(current.start, at))]
            self.host = reduce(add, chain.from_iterable(repeat(launches, laps * times)), host)

    def _launches(self, place: int) -> float:
        """Return the host's seconds to launch what is there."""
        entry = self.reading.entries[place]
        if isinstance(entry, Busy):
            return entry.launch if entry.place == DEVICE else 0.0
        return self.costs.call(entry) if isinstance(entry, (Launch, Copy)) else 0.0

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

    def times(self) -> list[float]:
        """Return the times that `move` moves, in its order."""
        found = [self.now, self.held, self.shared, *chain.from_iterable(self.busy)]
        found += *self.free.values(), *self.gates.values()
        for call in self._known():
            found += [time for time in (call.launched, call.ready, call.start, call.stop) if time >= 0]
        return [*found, self.cpu, self.host]

    def shape(self) -> tuple[object, ...]:
        """Return the state without its times: the place in the lap, and what is in flight."""
        known = [(call.way.line, call.read, call.ready < 0, call.stop < 0) for call in self._known()]
        place = self.reading.current, self.at - self.began, self.waits is None
        return *place, len(self.busy), len(self.works), *self.free, *self.gates, *known

    def _known(self) -> Iterable[Call]:
        works = (call for call in self.works.values() if isinstance(call, Call))
        return dict.fromkeys(chain(*(line.calls.values() for line in self.lines.values()), works))

    def forget(self, readers: Mapping[Line, int]) -> None:
        """Forget calls that all readers have placed, works for which nothing waits any more, and kernels beside which
        ran no call that compute will wait for."""
        for line in self.lines.values():
            line.calls = {number: call for number, call in line.calls.items() if call.read < readers[line]}
        self.works = {work: self.works[work] for work in self.reading.pending()}
        calls = [call for call in self._known() if not call.way.is_message]
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
        scope, name, seconds, _, _, _, launch, lag, _ = busy
        late = self.host + lag - (self.now + seconds)
        if late > 0:
            self._span(COMPUTE, "wait", self.now, self.now + late, scope, HOST)
            self.added["host"].append(late)
            self.held = self.now
            self.now += late
        self.host += launch
        began, spans = self.now, self.busy
        self.now = ended = began + seconds
        if self.keep:
            self._span(COMPUTE, name, began, ended, scope)
        spans.append((spans.pop()[0] if spans and spans[-1][1] == began else began, ended))

    def _launch(self, place: int, event: Launch) -> None:
        way = self.ways_at.get(place)
        if way is None:
            way = self.ways_at[place] = self.way(event)
        work, number = self.reading.call(place, event)
        self.host += way.launch
        begins = self.now
        if self.host > begins:
            self.held, begins = begins, self.host
        line = way.line
        if (gate := self.gates.get(line.stream)) is not None:
            begins = max(begins, gate)
        line.calls[number] = self.works[work] = call = Call(way, number, event, begins)
        line.queue.append(call)

    def way(self, event: Launch) -> Way:
        """Return what such calls share."""
        scope, _, op, _, purpose, axis, group, _, payload, *_, algorithm = event
        like = op, purpose, axis, group, payload, algorithm, scope.phase, self.costs.graph and is_captured(scope)
        if (way := self.ways.get(like)) is None:
            way = self.ways[like] = Way(self._line(event), event, self.costs.call(event))
        return way

    def _line(self, event: Launch) -> Line:
        stream, places = stream_of(event, self.mesh), places_of(event, self.mesh)
        if (stream, places) not in self.lines:
            self.lines[stream, places] = Line(stream, self.queues[stream])
        return self.lines[stream, places]

    def _wait(self, call: Call, scope: Scope) -> None:
        if not call.way.is_message:
            self._share(call)
        if call.stop > self.now:
            late = max(0.0, call.start - max(self.now, call.ready))
            gap = call.stop - self.now
            self.added["bubble"].append(late)
            self.added[call.way.axis] += gap, -late
            if self.keep:
                absent = (call.start - late, call.start)
                self._span(COMPUTE, "wait", self.now, call.stop, scope, call.way.line.stream, bubble=absent)
            self.now = call.stop

    def _share(self, call: Call) -> None:
        """Add the slowdown of kernels that ran beside the call, while it was in flight. A message needs almost no
        multiprocessors, and slows nothing."""
        start, stop = max(self.shared, call.start), min(self.now, call.stop)
        if start < stop:
            beside = sum(max(0.0, min(stop, end) - max(start, began)) for began, end in self.busy)
            if beside > 0:
                share = self.costs.contention
                slowed = min(beside * share, (call.stop - start) * share / (1 + share))
                self.added["slowed"].append(slowed)
                self.now += slowed
        if stop > self.shared:
            self.shared = stop
            self.busy = [span for span in self.busy if span[1] > stop]

    def _copy(self, place: int, event: Copy) -> None:
        """Run a copy beside compute. Compute waits where the program waits: at once, if a copy to the device was not
        launched. The host waits for what it reads from the device, and launches nothing meanwhile."""
        self.host += self.costs.call(event)
        stream = f"{event.source} to {event.target}"
        begins = self.cpu if event.after == CPU else max(self.now, self.host)
        start = max(begins, self.free.get(stream, 0.0), self.gates.get(stream, 0.0))
        stop = start + self.costs.copy(event)
        self._span(stream, "copy", start, stop, event.scope)
        self.free[stream] = stop
        if event.work is not None:
            self.works[self.reading.work(place, event.work)] = Copied(stream, start, stop)
            self.copied = max(self.copied, stop)
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
        line, event = call.way.line, call.event
        line.queue.popleft()
        self.free[line.stream] = call.stop
        if self.keep:
            self._span(line.stream, event.op, call.start, call.stop, event.scope, number=call.number)


class Calls:
    """The calls between ranks. A call gets its times when all of its members have launched it."""

    def __init__(self, runs: Mapping[int, Run], stands_for: Sequence[int], costs: Costs) -> None:
        self.runs, self.stands_for, self.costs = runs, stands_for, costs
        self._seconds: dict[tuple[object, ...], float] = {}  # of a call, by all that its duration depends on

    def sides(self, way: Way, launch: Launch) -> list[tuple[Run, Line]]:
        """Return the ranks that represent the members of a call, and the line of each one's own call."""
        if way.sides is None:
            if way.is_message:
                found = [self._side(launch, member) for member in launch.group]
            else:  # a representative's call is the same for all whom it stands for
                alike = dict.fromkeys(self.stands_for[member] for member in launch.group)
                found = [(self.runs[rank], self.runs[rank].way(launch).line) for rank in alike]
            way.sides = list(dict.fromkeys(found))
        return way.sides

    def _side(self, launch: Launch, member: int) -> tuple[Run, Line]:
        """Return the representative of a message's member. Its messages go as far along the axis as the member's."""
        run = self.runs[self.stands_for[member]]
        mesh, axis = run.mesh, launch.axis
        ranks = mesh.group(run.track.rank, axis)
        moved = mesh.index(run.track.rank, axis) - mesh.index(member, axis)
        ends = tuple(ranks[(mesh.index(rank, axis) + moved) % len(ranks)] for rank in launch.group)
        return run, run.way(launch._replace(group=ends)).line

    def place(self, run: Run, call: Call) -> bool:
        """Set the times of a call and of those before it in its stream. Return False if a member has not launched it
        yet."""
        queue = call.way.line.queue
        while call.stop < 0:
            if not self._place_first(run, queue[0]):
                return False
        return True

    def _place_first(self, run: Run, call: Call) -> bool:
        start, number, way, together = 0.0, call.number, call.way, list[Call]()
        for member, line in way.sides or self.sides(way, call.event):
            one = line.calls.get(number)
            if one is None or (one.ready < 0 and not self._is_ready(member, one)):
                return False
            start = max(start, one.ready)
            together.append(one)
        for one in together:
            one.read += 1
        seconds = self.takes(call.event) if way.seconds is None else way.seconds
        way.seconds = seconds
        call.start, call.stop = start, start + seconds
        run.end_call(call)
        return True

    def takes(self, launch: Launch) -> float:
        """Return the seconds of a call, once all have arrived."""
        like = launch.op, launch.group, launch.payload_bytes, launch.algorithm
        if like not in self._seconds:
            self._seconds[like] = self.costs.collective(launch)
        return self._seconds[like]

    def _is_ready(self, run: Run, call: Call) -> bool:
        """Find a member's earliest start: after its launch and the earlier work of its stream. Return False while that
        work waits for another rank."""
        line = call.way.line
        while (first := line.queue[0]) is not call:
            if not self._place_first(run, first):
                return False
        call.ready = max(call.launched, run.free.get(line.stream, 0.0))
        return True
