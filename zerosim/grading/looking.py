"""What was live on a rank at an event, read from its record alone.

Owns moments (`Where`) and what is held at them. Reads events; touches no device and no strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.device.events import Alloc, Event, Free, Kernel, Launch, Mark, Retag
from zerosim.ledger.traffic import TrafficRow
from zerosim.stepper.match import describe


class Held(NamedTuple):
    """One buffer that was live: what for, of which unit, how many bytes, and the event that made it."""

    name: str
    unit: str
    kind: str
    nbytes: int
    born: int


class Where(NamedTuple):
    """A rank's event, in words, and what the rank held once it had happened."""

    rank: int
    number: int
    text: str
    live: tuple[Held, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, event {self.number}: {self.text}"

    def plain(self) -> list[Any]:
        """As JSON can hold it; `of` makes it a moment again."""
        return [self.rank, self.number, self.text, self.live]

    @classmethod
    def of(cls, plain: list[Any]) -> Where:
        rank, number, text, live = plain
        return cls(rank, number, text, tuple(Held(*held) for held in live))


class _Live:
    """Folds a record, event by event."""

    def __init__(self) -> None:
        self.allocs: dict[int, Alloc] = {}
        self.born: dict[int, int] = {}
        self.total = 0

    def add(self, number: int, event: Event) -> None:
        if isinstance(event, Alloc):
            self.allocs[event.id], self.born[event.id] = event, number
            self.total += event.nbytes
        elif isinstance(event, Free):
            self.total -= self.allocs.pop(event.id).nbytes
        elif isinstance(event, Retag):
            self.allocs[event.id] = self.allocs[event.id]._replace(kind=event.kind)

    def held(self) -> tuple[Held, ...]:
        rows = []
        for id, alloc in self.allocs.items():
            unit = alloc.scope.unit
            rows.append(Held(f"{unit} {alloc.kind}".strip(), unit, alloc.kind, alloc.nbytes, self.born[id]))
        return tuple(rows)

    def of_kind(self, kind: str) -> list[Alloc]:
        return [alloc for alloc in self.allocs.values() if alloc.kind == kind]


def where(rank: int, record: Sequence[Event], number: int) -> Where:
    """Event `number` of a rank, and what was live after it. Of an empty record: before its first event."""
    if not record:
        return Where(rank, 0, "before its first event", ())
    number = min(number, len(record) - 1)
    live = _Live()
    for index, event in enumerate(record[:number]):
        live.add(index, event)
    text = describe(record[number], live.allocs, record[:number])
    live.add(number, record[number])
    return Where(rank, number, text, live.held())


def mark_number(record: Sequence[Event], name: str, step: int) -> int:
    """The number of a mark in a step. Raises: StopIteration where it did not come."""
    return next(
        i for i, event in enumerate(record) if isinstance(event, Mark) and event.name == name and _in(event, step)
    )


def _in(event: Event, step: int) -> bool:
    return event.scope.step == step


class Peak(NamedTuple):
    """The most that was live at once, and the first event with so much."""

    amount: int
    number: int


def peak(record: Sequence[Event]) -> Peak:
    """The most bytes."""
    live, most = _Live(), Peak(0, 0)
    for number, event in enumerate(record):
        live.add(number, event)
        if live.total > most.amount:
            most = Peak(live.total, number)
    return most


def most_gathered(record: Sequence[Event]) -> Peak:
    """The most whole parameter buffers that were gathered at one time."""
    live, most = _Live(), Peak(0, 0)
    for number, event in enumerate(record):
        live.add(number, event)
        if isinstance(event, Alloc | Retag):
            count = len(live.of_kind("unsharded_param"))
            if count > most.amount:
                most = Peak(count, number)
    return most


class Call(NamedTuple):
    """A collective of model states as one rank called it: the event's number, and what must agree."""

    number: int
    what: tuple[int, str, str, int, str, int]  # step, phase, unit, slot, op, payload bytes

    @property
    def phase(self) -> str:
        return self.what[1]

    @property
    def op(self) -> str:
        return self.what[4]

    def __str__(self) -> str:
        step, phase, unit, slot, op, payload = self.what
        batch = f", micro-batch {slot}" if slot else ""
        return f"{op} of {payload:,} B in step {step}, {phase}{f' of {unit}' if unit else ''}{batch}"


def carries_states(call: Launch | TrafficRow) -> bool:
    """Whatever purpose it names: norms and flags are fp64, and a barrier has no dtype."""
    return call.purpose == "states" or call.dtype not in ("fp64", "")


def calls(record: Sequence[Event], *, control: bool = False) -> list[Call]:
    """The collectives of model states, in order; with `control` those of norms and flags too."""
    return [
        Call(number, (*event.scope, event.op, event.payload_bytes))
        for number, event in enumerate(record)
        if isinstance(event, Launch) and (control or carries_states(event))
    ]


class Difference(NamedTuple):
    """Where a rank's collectives leave those of another: either may have none there."""

    mine: Call | None
    other: Call | None

    def __str__(self) -> str:
        return f"called: {self.mine or 'nothing more'}; the reference: {self.other or 'nothing more'}"


def first_difference(mine: Sequence[Event], other: Sequence[Event], *, by_unit: bool) -> Difference | None:
    """The first collective that is not the other's, None where all are alike.

    Without `by_unit` the same call in another unit's turn is alike: a bucket may put it off.
    """
    ours, theirs = calls(mine), calls(other)
    for index in range(max(len(ours), len(theirs))):
        a = ours[index] if index < len(ours) else None
        b = theirs[index] if index < len(theirs) else None
        if a is None or b is None or (a.what != b.what if by_unit else a.what[4:] != b.what[4:]):
            return Difference(a, b)
    return None


class Kernels(NamedTuple):
    """A kernel that a rank ran more or fewer times in one unit's backward than the reference.

    `number`: the last of them or, where some are missing, what was done without.
    """

    name: str
    mine: int
    other: int
    number: int


def other_kernels(mine: Sequence[Event], other: Sequence[Event], step: int, unit: str) -> Kernels | None:
    """The first kernel that one unit's backward runs more or fewer times than the reference's does."""
    ours, theirs = _kernels(mine, step, unit), _kernels(other, step, unit)
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name, []), theirs.get(name, [])
        if len(a) != len(b):
            return Kernels(name, len(a), len(b), a[-1] if len(a) > len(b) else _without(mine, step, unit, ours))
    return None


def _without(record: Sequence[Event], step: int, unit: str, kernels: dict[str, list[int]]) -> int:
    """The collective that follows a unit's last kernel of backward; without one, that kernel."""
    last = max((number for numbers in kernels.values() for number in numbers), default=0)
    launches = (n for n, e in enumerate(record) if n > last and isinstance(e, Launch) and e.scope.unit == unit)
    return next(launches, last)


def _kernels(record: Sequence[Event], step: int, unit: str) -> dict[str, list[int]]:
    """The numbers of a unit's kernels in backward, by name; sums of collectives may be put off and are left out."""
    found: dict[str, list[int]] = {}
    for number, event in enumerate(record):
        scope = event.scope
        is_there = (scope.step, scope.phase, scope.unit) == (step, "backward", unit)
        if is_there and isinstance(event, Kernel) and event.name != "reduce":
            found.setdefault(event.name, []).append(number)
    return found
