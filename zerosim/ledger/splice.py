"""A rank's long step for the clock, out of two short ones.

Once a pipeline is full, each further period of microbatches adds the same entries again (`ledger/entries.py`): a cycle.
They differ only in their microbatch, in the ids of works and in the numbers of calls. So of two steps, the second of
which has one period more, the second is the first with a cycle inserted. `spliced` checks that, entry by entry, and
repeats the cycle. The clock then simulates all microbatches.

Under GPipe all forwards come first, so a period adds a cycle to the forwards and another one to the backwards. A step
is cut wherever no phase continues, and each part is spliced by itself.

    few    A a a B        more    A a a a B        spliced, twice more    A a a a a a B
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from zerosim.device.events import Copy, CpuEvent, Launch, Scope, Wait
from zerosim.ledger.entries import Busy, Entries, Entry
from zerosim.verbs import MESSAGES


class Like(NamedTuple):
    """An entry without what differs between microbatches.

    work    the kind of the work that it begins or waits for; None for other entries
    ago     of a wait: how many works of this kind have begun since that one
    ahead   of a call: its number in its group, less the number of the group's calls before it
    """

    entry: Hashable
    work: Hashable = None
    ago: int = 0
    ahead: int = 0


class Spliced:
    """The entries of a long step: those of a short one, `parts` of which come several times."""

    def __init__(self, entries: Sequence[Entry], likes: Sequence[Like], parts: Sequence[tuple[range, int]]) -> None:
        self.entries, self.likes = entries, likes
        pieces = list[tuple[range, int]]()
        for places, times in parts:
            if places and pieces and times == pieces[-1][1] == 1 and pieces[-1][0].stop == places.start:
                places = range(pieces.pop()[0].start, places.stop)
            pieces += [(places, times)] if places else []
        self.laps = [places for places, times in pieces for _ in range(times)]

    def __len__(self) -> int:
        return sum(map(len, self.laps))

    def __iter__(self) -> Iterator[Entry]:
        reading = Reading(self)
        for place in chain.from_iterable(reading.lap() for _ in self.laps):
            entry = self.entries[place]
            if isinstance(entry, Wait):
                entry = entry._replace(work=reading.awaited(place, entry))
            elif isinstance(entry, Launch):
                work, number = reading.call(place, entry)
                entry = entry._replace(work=work, sequence=number)
            elif isinstance(entry, (Copy, CpuEvent)) and entry.work is not None:
                entry = entry._replace(work=reading.work(place, entry.work))
            yield entry


class _Kind:
    """Works of one kind as they are read: so many of them as a later wait may be for, and the number of the next
    call."""

    def __init__(self) -> None:
        self.most, self.begun, self.next = 0, deque[int](), -1


class Reading:
    """One pass through a step, lap by lap: what comes before a cycle, each of its repeats, and what comes then. Laps
    may be left out: works and calls are numbered as they come. A step that is not spliced is one lap, and has its
    numbers.

    entries   what the laps repeat
    laps      those to come, after the `current` one
    """

    def __init__(self, step: Entries) -> None:
        if not isinstance(step, Spliced):
            step = Spliced(list(step), (), [(range(len(step)), 1)])
        self.entries, self._likes, self.laps = step.entries, step.likes, deque(step.laps)
        self.current, self._number, known = range(0), 0, defaultdict[Hashable, _Kind](_Kind)
        self._kinds = [known[like.work] for like in self._likes]
        for kind, like in zip(self._kinds, self._likes, strict=True):
            kind.most = max(kind.most, like.ago)
        self._known = known.values()
        for kind in self._known:
            kind.begun = deque(maxlen=kind.most)

    def lap(self) -> range:
        """Begin the next lap, and return the places of its entries."""
        self.current = self.laps.popleft()
        return self.current

    def pending(self) -> list[int]:
        """Return the works for which a later entry may wait."""
        return list(chain.from_iterable(kind.begun for kind in self._known))

    def work(self, place: int, work: int) -> int:
        """Return the number of the work that begins there."""
        if not self._kinds:
            return work
        self._number = number = self._number + 1
        self._kinds[place].begun.append(number)
        return number

    def call(self, place: int, call: Launch) -> tuple[int, int]:
        """Return the number of the call's work, and its own."""
        if not self._kinds:
            return call.work, call.sequence
        kind = self._kinds[place]
        count = call.sequence if kind.next < 0 else kind.next
        kind.next = count + 1
        return self.work(place, call.work), count + self._likes[place].ahead

    def follow(self, leader: Reading, stop: int) -> None:
        """Go on where another reading is, of a step that agrees with this one until the place `stop`, where its last
        lap begins."""
        self.laps = deque([*leader.laps][:-1])
        self.laps.append(range(stop, len(self.entries)))
        self.current, self._number = leader.current, leader._number
        for kind, its in self._pairs(leader, stop):
            kind.begun, kind.next = deque(its.begun, maxlen=kind.most), its.next

    def looks_back(self, leader: Reading, stop: int) -> bool:
        """Return whether a wait may be for an earlier work than that reading stores."""
        return any(kind.most > its.most for kind, its in self._pairs(leader, stop))

    def _pairs(self, leader: Reading, stop: int) -> Iterable[tuple[_Kind, _Kind]]:
        return dict(zip(self._kinds[:stop], leader._kinds, strict=False)).items()

    def awaited(self, place: int, wait: Wait) -> int:
        """Return the number of the work that is waited for there."""
        return self._kinds[place].begun[-self._likes[place].ago] if self._kinds else wait.work


def spliced(few: Entries, more: Entries, times: int) -> Spliced | None:
    """Return the entries of a step with `times` periods more than `more`, which has one more than `few`. None if that
    period adds no cycle."""
    long = _likes(more)
    phases = ([entry.scope.phase for entry in entries] for entries in (few, more))
    if (parts := inserted(_likes(few), long, *phases)) is None:
        return None
    repeated = ((before, cycle, cycle, after) for before, cycle, after in parts)
    times_of = 1, 1, times, 1
    return Spliced(list(more), long, [pair for part in repeated for pair in zip(part, times_of, strict=True)])


def inserted(
    short: Sequence[Hashable], long: Sequence[Hashable], phases: Sequence[Hashable], longer: Sequence[Hashable]
) -> list[tuple[range, range, range]] | None:
    """Return each part of a long sequence as what comes before its cycle, the cycle that a short one lacks, and what
    comes after it. None if there is no such cycle. A part ends where none of the `phases` continues; `longer` are those
    of the long one."""
    cuts, other_cuts = _cuts(phases), _cuts(longer)
    if len(cuts) != len(other_cuts):
        return None
    parts = list[tuple[range, range, range]]()
    for (start, stop), (first, last) in zip(cuts, other_cuts, strict=True):
        one, two = short[start:stop], long[first:last]
        length = len(two) - len(one)
        at = next((at for at, (old, new) in enumerate(zip(one, two, strict=False)) if old != new), len(one))
        if length < 0 or two[at + length :] != one[at:]:
            return None
        begin, end = first + at, first + at + length
        parts.append((range(first, begin), range(begin, end), range(end, last)))
    return parts


def _cuts(phases: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the parts of a sequence between which no phase continues."""
    lasts = {phase: at for at, phase in enumerate(phases)}
    cuts, start, stop = list[tuple[int, int]](), 0, 0
    for at, phase in enumerate(phases):
        if at > stop:
            cuts.append((start, at))
            start = at
        stop = max(stop, lasts[phase])
    return [*cuts, (start, len(phases))]


class _Count:
    """Works of one kind, as they are counted: how many have begun, and the number of the next call."""

    def __init__(self, kind: Hashable) -> None:
        self.kind, self.begun, self.next = kind, 0, -1


def _likes(entries: Entries) -> list[Like]:
    found, counts, begun = list[Like](), dict[Hashable, _Count](), dict[int, tuple[_Count, int]]()
    last, scope, new = Scope(), Scope()[:3], tuple.__new__
    for entry in entries:
        if entry.scope is not last:
            last = entry.scope
            scope = last[:3]  # without the microbatch
        if isinstance(entry, Busy):
            found.append(new(Like, ((scope, entry[1:]), None, 0, 0)))
            continue
        if isinstance(entry, Wait):
            count, number = begun[entry.work]
            found.append(new(Like, ((scope, entry.by), count.kind, count.begun - number, 0)))
            continue
        kind = _kind(entry)
        if (known := counts.get(kind)) is None:
            known = counts[kind] = _Count(kind)
        count = known
        if isinstance(entry, Launch):
            due = entry.sequence if count.next < 0 else count.next
            count.next = due + 1
            found.append(new(Like, ((scope, entry[2:7], entry[8:]), count.kind, 0, entry.sequence - due)))
        elif isinstance(entry, Copy):
            found.append(Like((scope, *entry[1:5], entry.after), None if entry.work is None else kind))
        else:
            found.append(Like(scope, kind) if isinstance(entry, CpuEvent) else Like((scope, *entry[1:])))
        if isinstance(entry, (Launch, Copy, CpuEvent)) and entry.work is not None:
            begun[entry.work] = count, count.begun
            count.begun += 1
    return found


def _kind(entry: Entry) -> Hashable:
    """Return what works of one kind share: calls of one group are numbered together, messages by their direction; a
    pipeline's by their phase too, for its forwards and backwards are sent apart."""
    if isinstance(entry, Launch):
        phase = entry.scope.phase if entry.axis == "pp" else ""
        return entry.axis, entry.group, entry.op in MESSAGES and (entry.op, phase)
    return entry[1:5] if isinstance(entry, Copy) else type(entry).__name__
