"""A rank's requests to its allocator, served without a device that has it.

Nothing that a rank does depends on where an allocator puts its buffers, unless a request is refused. So a plan runs on
a device that only counts bytes, which takes a whole stretch at once (`device/stretches.py`), and a ledger serves the
requests of its record, one by one.

Of many microbatches the requests of two short plans are spliced (`splice.py`), and the allocator serves those of the
long step: its figures need not grow by a constant, but its requests repeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from zerosim.device.events import Alloc, Event, Free, Mark, Scope
from zerosim.device.memory import Allocator
from zerosim.device.stretches import Repeat, Stretch
from zerosim.ledger.allocator import AllocatorLedger
from zerosim.ledger.splice import inserted
from zerosim.placement.memories import DEVICE


class Refused(Exception):
    """An allocator refuses a request. Only a device that has it tells where."""


class RequestLedger(AllocatorLedger):
    """A reader that serves the requests of a record, up to the first one that its allocator refuses."""

    folds = True

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self.refuses = allocator, False

    def read(self, events: Sequence[Event | Repeat]) -> None:
        for _, id, event in _asked(events):
            if self.refuses:
                return
            if isinstance(event, Alloc):
                self.reserve(id, event.nbytes)
            elif isinstance(event, Free):
                self.release(id)
            else:
                self.mark(event.name)

    def reserve(self, id: int, nbytes: int) -> None:
        allocated = self.allocator.reserve(id, nbytes)
        if self.allocator.changes:
            for kind, numbers in self.allocator.changes:
                self.change(kind, numbers[-1])
            self.allocator.forget()
        if allocated is None:
            self.refuses = True
        else:
            self.open(id, nbytes, allocated)

    def release(self, id: int) -> None:
        self.allocator.release(id)
        self.close(id)


class Request(NamedTuple):
    """A request or a mark, without what differs between microbatches.

    moment    steps that have ended, and phase
    what      unit, kind and size of the buffer; a mark's name
    nth       of a free: the buffer's number among live ones of this kind, from the newest; else -1
    is_own    whether it counts those of this microbatch alone
    """

    moment: tuple[int, str]
    what: tuple[str, str, int] | str
    nth: int = -1
    is_own: bool = False

    @property
    def names_own(self) -> bool:
        """Whether its microbatch matters: it begins a buffer, or frees one of this microbatch."""
        return self.is_own or (self.nth < 0 and not isinstance(self.what, str))


class Names:
    """Live buffers by what they are and by microbatch, in the order of both."""

    def __init__(self) -> None:
        self._live = defaultdict[Hashable, dict[int, list[int]]](dict)

    def add(self, what: Hashable, slot: int, id: int) -> None:
        self._live[what].setdefault(slot, []).append(id)

    def take(self, request: Request, slot: int) -> int:
        """Forget the buffer that is freed, and return its id."""
        alike, nth = self._live[request.what], request.nth
        if not request.is_own:
            slot, nth = self._place(alike, nth)
        held = alike[slot]
        id = held.pop(-1 - nth)
        if not held:
            del alike[slot]
        return id

    @staticmethod
    def _place(alike: dict[int, list[int]], nth: int) -> tuple[int, int]:
        """Return the microbatch of a number among all, and the number there."""
        for slot, held in reversed(alike.items()):
            if nth < len(held):
                return slot, nth
            nth -= len(held)
        raise IndexError(nth)

    def nth(self, what: Hashable, slot: int | None, id: int) -> int:
        """Return a buffer's number, from the newest: of one microbatch, or of all (None)."""
        alike = self._live[what]
        ids = list(chain.from_iterable(alike.values())) if slot is None else alike[slot]
        return len(ids) - 1 - ids.index(id)


class Requests:
    """A reader of a short plan's requests: each with its microbatch."""

    folds = True

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.slots: list[int] = []
        self._names = Names()
        self._steps = 0  # that have ended: then the losses of all microbatches end
        self._begun: dict[int, tuple[tuple[str, str, int], int]] = {}

    def read(self, events: Sequence[Event | Repeat]) -> None:
        for (_, phase, unit, slot), id, event in _asked(events):
            moment = self._steps, phase
            if isinstance(event, Alloc):
                what = unit, event.kind, event.nbytes
                self._begun[id] = what, slot
                self._names.add(what, slot, id)
                request = Request(moment, what)
            elif isinstance(event, Free):
                what, began = self._begun.pop(id)
                is_own = began == slot
                request = Request(moment, what, self._names.nth(what, slot if is_own else None, id), is_own)
                self._names.take(request, slot)
            else:
                request = Request(moment, event.name)
                self._steps += event.name == "after_step"
            self.requests.append(request)
            self.slots.append(slot)


Lap = tuple[Sequence[Request], Sequence[int]]
"""Requests, and their microbatches."""


def laps_of(few: Requests, more: Requests, period: int, times: int) -> list[Lap] | None:
    """Return the requests of a step with `times` periods more than `more`, which has one more than `few`. None if that
    period, so many microbatches, adds no cycle that came before."""
    long, slots = more.requests, more.slots
    parts = inserted(few.requests, long, *([request.moment for request in one.requests] for one in (few, more)))
    laps, less = list[Lap](), 0
    for before, cycle, after in parts or ():
        length = len(cycle)
        less += length
        for at in cycle:
            request, earlier = long[at], at - length
            if earlier < before.start or long[earlier] != request:
                return None
            if request.names_own and slots[at] != slots[earlier] + period:
                return None
        laps.append((long[before.start : before.stop], slots[before.start : before.stop]))
        again = long[cycle.start : cycle.stop]
        for lap in range(1 + times) if again else ():
            laps.append((again, [slot + lap * period for slot in slots[cycle.start : cycle.stop]]))
        moved = [slots[at] + times * (slots[at] - few.slots[at - less]) for at in after]
        laps.append((long[after.start : after.stop], moved))
    return laps if parts else None


def serve(laps: Iterable[Lap], allocator: Allocator) -> RequestLedger:
    """Reserve and release what the laps request, up to the first refusal."""
    ledger, names, last = RequestLedger(allocator), Names(), 0
    for requests, slots in laps:
        for request, slot in zip(requests, slots, strict=True):
            what = request.what
            if isinstance(what, str):
                ledger.mark(what)
            elif request.nth < 0:
                last += 1
                ledger.reserve(last, what[2])
                names.add(what, slot, last)
            else:
                ledger.release(names.take(request, slot))
            if ledger.refuses:
                return ledger
    return ledger


def _asked(events: Iterable[Event | Repeat]) -> Iterator[tuple[Scope, int, Alloc | Free | Mark]]:
    """Yield each request to the device's memory and each mark, with its scope and the rank's own id."""
    for event in events:
        if type(event) is Repeat:
            ids, (step, phase, block, slot) = event.ids, event.scope
            for one in event.stretch.once(_requests_of):
                yield Scope(step, phase, block + one.scope.unit, slot), ids[one.id], one
        elif type(event) is Mark:
            yield event.scope, -1, event
        elif isinstance(event, (Alloc, Free)) and event.memory == DEVICE:
            yield event.scope, event.id, event


def _requests_of(stretch: Stretch) -> list[Alloc | Free]:
    return [event for event in stretch.events if isinstance(event, (Alloc, Free))]
