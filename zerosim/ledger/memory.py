"""A reader of a rank's record: live bytes by kind and unit, at marks and at the peak, in each of the rank's memories.

Figures are exact integers in bytes. A ledger folds events as the recorder passes them on and stores
no history. It returns frozen snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Mark, Refusal, Retag, Save, Scope, Wait
from zerosim.device.stretches import Repeat, Stretch
from zerosim.placement.memories import DEVICE, HOST

Key = TypeVar("Key")
MARKS = ("after_init", "end_of_forward", "end_of_backward", "gradients_upcast", "after_step")

UNREAD = (Kernel, Wait, Copy, Save)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Live bytes at one moment. `by_unit` is keyed by (unit, kind); `padding` is part of `by_kind`."""

    scope: Scope
    by_kind: Mapping[str, int]
    by_unit: Mapping[tuple[str, str], int]
    padding: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())


class Moment(NamedTuple):
    """A part of a step in one phase and microbatch: a forward, a backward, the reductions after the last backward.
    `nth` counts the parts with the same step, phase and microbatch."""

    step: int
    phase: str
    slot: int
    nth: int = 0


class Change(NamedTuple):
    """A stretch's change of live bytes by (module, kind): at its end and, of that, after its highest point. There
    `high` more bytes than before it are live, in the module `where`; None without an allocation. `keys`: all, in the
    order of their first bytes."""

    keys: Sequence[tuple[str, str]]
    whole: Mapping[tuple[str, str], int]
    after: Mapping[tuple[str, str], int]
    high: int | None
    where: str


def change_of(stretch: Stretch) -> Change:
    """Fold a stretch's events one by one."""
    ledger, high, where = MemoryLedger(), None, ""
    ledger._live |= stretch.before
    for event in stretch.events:
        ledger.read([event])
        if isinstance(event, Alloc):
            assert not event.name, "a block makes no states"
            assert not event.padding_bytes, "a block pads nothing"
            if high is None or ledger._total > high:
                high, where = ledger._total, event.scope.unit
                ledger._by_unit_since.clear()
    return Change(tuple(ledger._by_unit), _positive(ledger._by_unit), ledger._by_unit_since, high, where)


class MemoryLedger:
    """Live bytes of one memory, the device's: now, at the latest of each mark, and at the highest point so far. The
    ledgers of the rank's other memories are in `others`.

    `after_init` is the moment after parameters and optimizer states were placed. The other marks are
    those of the last step read. `refusal` is the snapshot of a refused allocation. `states` are bytes of the
    optimizer's states by name, which live to the end. `live` leaves out buffers that begin in a stretch.

    With `by_moment` the ledger also stores the highest point of every moment, in `moments`. A long run has many.
    """

    folds = True

    def __init__(self, *, by_moment: bool = False) -> None:
        self.by_moment = by_moment
        self.marks: dict[str, Snapshot] = {}
        self.first_step_bytes = 0  # the peak of the first step and of everything before it
        self.refusal: Snapshot | None = None
        self.others: dict[str, MemoryLedger] = {}
        self.states: dict[str, int] = {}
        self._live: dict[int, Alloc] = {}
        self._by_unit: dict[tuple[str, str], int] = {}
        self._padding: dict[str, int] = {}
        self._total = 0
        self._past: dict[Moment, Snapshot] = {}  # the peaks of finished moments
        self._nth: Counter[tuple[int, str, int]] = (
            Counter()
        )  # and how many there are of each step, phase and microbatch
        self._moment = Moment(-1, "", 0)  # without `by_moment` one moment, the whole run
        self._peak_bytes = 0  # of the present moment
        self._peak_scope = Scope()
        # Changes since the peak: a snapshot of every new peak would cost the square of the number of units.
        self._by_unit_since: dict[tuple[str, str], int] = {}
        self._padding_since: dict[str, int] = {}
        # How often each stretch was repeated in each block, in all and since the peak: added up for a snapshot.
        self._times: dict[tuple[str, Stretch], int] = {}
        self._times_since: dict[tuple[str, Stretch], int] = {}
        self._changes: dict[tuple[str, Stretch], Sequence[tuple[tuple[str, str], int]]] = {}  # of known ones

    @property
    def live_bytes(self) -> int:
        return self._total

    @property
    def host_peak_bytes(self) -> int:
        """The peak of live bytes in the host's memory."""
        return self.others[HOST].peak.total_bytes if HOST in self.others else 0

    @property
    def live_everywhere(self) -> int:
        """Live bytes of all memories."""
        return self._total + sum(other.live_bytes for other in self.others.values())

    @property
    def live(self) -> Mapping[int, Alloc]:
        """The allocations of live buffers by id, oldest first (with their present kind)."""
        return self._live

    @property
    def peak(self) -> Snapshot:
        """The first point at which the most bytes were live."""
        return max((*self._past.values(), self._peak_of_moment()), key=lambda shot: shot.total_bytes)

    @property
    def moments(self) -> Mapping[Moment, Snapshot]:
        """The first highest point of each moment, in their order; empty without `by_moment`."""
        return {**self._past, self._moment: self._peak_of_moment()} if self.by_moment else {}

    def now(self, scope: Scope = Scope()) -> Snapshot:  # noqa: B008  a frozen tuple
        self._add_up()
        return _snapshot(scope, self._by_unit, {}, self._padding)

    def read(self, events: Sequence[Event | Repeat]) -> None:
        """Fold events in order; the peak stands where it first occurs."""
        latest = {event.name: event for event in events if type(event) is Mark}
        for event in events:
            if type(event) in UNREAD:  # the most frequent first: this loop is the cost of recording
                continue
            if type(event) is Repeat:
                self._repeat(event)
            elif type(event) is Alloc:
                self._of(event.memory)._open(event)
            elif type(event) is Free:
                of = self._of(event.memory)
                of._count(of._live.pop(event.id), -1)
            elif isinstance(event, Retag):
                before = self._live[event.id]
                after = self._live[event.id] = before._replace(kind=event.kind)
                self._count(before, -1)
                self._count(after, 1)
            elif isinstance(event, Refusal):
                self.refusal = self._of(event.memory).now(event.scope)
            elif isinstance(event, Mark):
                for of in (self, *self.others.values()) if event is latest[event.name] else ():
                    of.marks[event.name] = of.now(event.scope)
                if event.name == "after_step" and not self.first_step_bytes:
                    self.first_step_bytes = self.peak.total_bytes

    def _of(self, memory: str) -> MemoryLedger:
        if memory == DEVICE:
            return self
        if memory not in self.others:
            self.others[memory] = MemoryLedger(by_moment=self.by_moment)
        return self.others[memory]

    def _open(self, event: Alloc) -> None:
        if self.by_moment:
            self._enter(event.scope)
        self._live[event.id] = event
        self._count(event, 1)
        if event.name:
            self.states[event.name] = self.states.get(event.name, 0) + event.nbytes
        if self._total > self._peak_bytes:
            self._begin_peak(self._total, event.scope)

    def _begin_peak(self, nbytes: int, scope: Scope) -> None:
        self._peak_bytes, self._peak_scope = nbytes, scope
        self._by_unit_since.clear()
        self._padding_since.clear()
        self._times_since.clear()

    def _repeat(self, repeat: Repeat) -> None:
        """Fold a stretch at once."""
        (scope, stretch), block = repeat[:2], repeat.scope.unit
        change, key = stretch.once(change_of), (block, stretch)
        if key not in self._changes:
            whole = change.whole.items()
            self._changes[key] = [((block + module, kind), more) for (module, kind), more in whole]
            for module, kind in change.keys:  # a snapshot lists units in the order of their first bytes
                self._by_unit.setdefault((block + module, kind), 0)
        if change.high is not None and self.by_moment:
            self._enter(scope)
        self._times[key] = self._times.get(key, 0) + 1
        if change.high is not None and self._total + change.high > self._peak_bytes:
            self._begin_peak(self._total + change.high, scope._replace(unit=block + change.where))
            self._by_unit_since.update(((block + module, kind), more) for (module, kind), more in change.after.items())
        else:
            self._times_since[key] = self._times_since.get(key, 0) + 1
        self._total += stretch.nbytes

    def _add_up(self) -> None:
        """Add the changes of the stretches that were counted."""
        for times, by_unit in ((self._times, self._by_unit), (self._times_since, self._by_unit_since)):
            for repeated, number in times.items():
                for key, more in self._changes[repeated]:
                    by_unit[key] = by_unit.get(key, 0) + number * more
            times.clear()

    def _enter(self, scope: Scope) -> None:
        """Start a new peak where a moment begins."""
        where = (scope.step, scope.phase, scope.slot)
        if where != self._moment[:3]:
            if self._peak_bytes:
                self._past[self._moment] = self._peak_of_moment()
                self._nth[self._moment[:3]] += 1
            self._moment, self._peak_bytes = Moment(*where, self._nth[where]), 0

    def _peak_of_moment(self) -> Snapshot:
        self._add_up()
        padding = {kind: count - self._padding_since.get(kind, 0) for kind, count in self._padding.items()}
        return _snapshot(self._peak_scope, self._by_unit, self._by_unit_since, padding)

    def _count(self, live: Alloc, sign: int) -> None:
        nbytes, key = sign * live.nbytes, (live.scope.unit, live.kind)
        self._total += nbytes
        self._by_unit[key] = self._by_unit.get(key, 0) + nbytes
        self._by_unit_since[key] = self._by_unit_since.get(key, 0) + nbytes
        if live.padding_bytes:
            padding = sign * live.padding_bytes
            self._padding[live.kind] = self._padding.get(live.kind, 0) + padding
            self._padding_since[live.kind] = self._padding_since.get(live.kind, 0) + padding


def _snapshot(
    scope: Scope,
    by_unit: Mapping[tuple[str, str], int],
    since: Mapping[tuple[str, str], int],
    padding: Mapping[str, int],
) -> Snapshot:
    """Return what was live before the changes `since`. Kinds are listed in the order of their first bytes."""
    by_kind = dict.fromkeys([kind for _, kind in by_unit], 0)
    found = {key: nbytes for key, count in by_unit.items() if (nbytes := count - since.get(key, 0))}
    for (_, kind), nbytes in found.items():
        by_kind[kind] += nbytes
    return Snapshot(scope, _positive(by_kind), found, _positive(padding))


def _positive(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in counts.items() if count}
