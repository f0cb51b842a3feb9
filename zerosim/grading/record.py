"""Readings of a rank's record: live buffers at an event, its collectives, and where they differ from another rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zerosim.device.events import Alloc, Event, Free, Kernel, Launch, Mark, Retag
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import TrafficRow
from zerosim.stepper.match import describe


class LiveBytes(NamedTuple):
    """One buffer that was live: its purpose, unit and bytes, and the event that made it."""

    name: str
    unit: str
    kind: str
    nbytes: int
    born: int


class Where(NamedTuple):
    """A rank's event, in words, and the rank's live buffers after it."""

    rank: int
    number: int
    text: str
    live: tuple[LiveBytes, ...]

    def only(self, *kinds: str) -> Where:
        """Keep only these kinds of the live buffers: a failure shows those that it is about."""
        return self._replace(live=tuple(held for held in self.live if held.kind in kinds))

    def __str__(self) -> str:
        return f"rank {self.rank}, event {self.number}: {self.text}"


class Finding(NamedTuple):
    """A finding in words, a hint, and where."""

    words: str
    hint: str
    where: Where | None


def where(rank: int, record: Sequence[Event], number: int) -> Where:
    """Return event `number` of a rank, and the live buffers after it. For an empty record: before its first event."""
    if not record:
        return Where(rank, 0, "before its first event", ())
    number = min(number, len(record) - 1)
    before, event, ledger = list(record[:number]), record[number], MemoryLedger()
    ledger.read(before)
    text = describe(event, ledger.live, before)
    ledger.read([event])
    born = {alloc.id: index for index, alloc in enumerate(record[: number + 1]) if isinstance(alloc, Alloc)}
    live = (
        LiveBytes(
            f"{alloc.scope.unit} {alloc.kind}".strip(), alloc.scope.unit, alloc.kind, alloc.nbytes, born[alloc.id]
        )
        for alloc in ledger.live.values()
    )
    return Where(rank, number, text, tuple(live))


def mark_number(record: Sequence[Event], name: str, step: int) -> int:
    """Return the number of a mark in a step. Raises: StopIteration if it did not come."""
    marks = (n for n, event in enumerate(record) if isinstance(event, Mark) and event.name == name)
    return next(number for number in marks if record[number].scope.step == step)


# -- peaks ------------------------------------------------------------------------------------------
class Peak(NamedTuple):
    """The most live bytes at once, and the first event with this many."""

    amount: int
    number: int


def peak(record: Sequence[Event], size: Callable[[Alloc], int] = lambda alloc: alloc.nbytes) -> Peak:
    """Return the most live bytes at once, or the most of what `size` makes of a buffer."""
    live, total, most = dict[int, Alloc](), 0, Peak(0, 0)
    for number, event in enumerate(record):
        if isinstance(event, Alloc):
            live[event.id] = event
            total += size(event)
        elif isinstance(event, Free):
            total -= size(live.pop(event.id))
        elif isinstance(event, Retag):
            before = live[event.id]
            live[event.id] = after = before._replace(kind=event.kind)
            total += size(after) - size(before)
        if total > most.amount:
            most = Peak(total, number)
    return most


# -- collectives ------------------------------------------------------------------------------------
class Call(NamedTuple):
    """A collective as one rank called it: the event's number, and what must agree."""

    number: int
    what: tuple[int, str, str, int, str, int]  # step, phase, unit, slot, op, payload bytes

    @property
    def op(self) -> str:
        return self.what[4]

    def __str__(self) -> str:
        step, phase, unit, slot, op, payload = self.what
        batch = f", microbatch {slot}" if slot else ""
        return f"{op} of {payload:,} B in step {step}, {phase}{f' of {unit}' if unit else ''}{batch}"


def carries_states(call: Launch | TrafficRow) -> bool:
    """Return whether a call carries model states, whatever purpose it names: norms and flags are fp64, and a barrier
    has no dtype."""
    return call.purpose == "states" or call.dtype not in ("fp64", "")


def calls(record: Sequence[Event], *, control: bool = False) -> list[Call]:
    """Return the collectives of model states, in order; with `control` those of norms and flags too."""
    return [
        Call(number, (*event.scope, event.op, event.payload_bytes))
        for number, event in enumerate(record)
        if isinstance(event, Launch) and (control or carries_states(event))
    ]


# -- kernels ----------------------------------------------------------------------------------------
def other_kernels(
    mine: Sequence[Event], other: Sequence[Event], step: int, unit: str
) -> tuple[str, int, int, int] | None:
    """Return the first kernel that one unit's backward runs more or fewer times than the reference's does: its name,
    both counts, and the number of the last extra one or, if some are missing, of the event that went without."""
    ours, theirs = _kernels(mine, step, unit), _kernels(other, step, unit)
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name, []), theirs.get(name, [])
        if len(a) > len(b):
            return name, len(a), len(b), a[-1]
        if len(a) < len(b):  # the collective that follows the unit's last kernel went without it
            last = max((number for numbers in ours.values() for number in numbers), default=0)
            launches = (n for n, e in enumerate(mine) if n > last and isinstance(e, Launch) and e.scope.unit == unit)
            return name, len(a), len(b), next(launches, last)
    return None


def _kernels(record: Sequence[Event], step: int, unit: str) -> dict[str, list[int]]:
    """Return the numbers of a unit's kernels in backward, by name; sums of collectives may be postponed and are left
    out."""
    found: dict[str, list[int]] = {}
    for number, event in enumerate(record):
        is_there = event.scope[:3] == (step, "backward", unit)
        if is_there and isinstance(event, Kernel) and event.name != "reduce":
            found.setdefault(event.name, []).append(number)
    return found
