"""A stretch: events that always come one after the other, as one event.

On shapes every block's pass records the same events again, except for their ids, step, microbatch and block. So one
pass is rehearsed (`train/repeated.py`), and its record is cut into stretches wherever something depends on the rank.
Each time a rank repeats the pass, it records one `Repeat` of each stretch.

    a pass numbers its buffers and works 0, 1, 2 ... in the order in which they begin. A stretch's events have
    these numbers as ids; all repeats of a pass share one table of the rank's own ids by these numbers
    in a stretch, a scope names a module of the block, a launch has the number of a line of calls in place of its group
    and counts the stretch's calls on it, and a message's peer is counted from this rank (0: several)

A reader finds out once what a stretch does to its figures (`Stretch.once`), or gets each event (`Recorder.feed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from zerosim.device.events import Alloc, Event, Free, Kernel, Launch, Message, Retag, Save, Scope, Wait
from zerosim.placement.memories import DEVICE

T = TypeVar("T")
SEVERAL = -1
"""The peer of a message to several members."""


class Stretch:
    """A slice of a rehearsed pass's record. Stretches are compared by identity.

    before   the allocations of earlier buffers that it frees or retags, by number, as they were before it
    calls    the number of its collectives on each line
    on_device   whether it changes no other memory's bytes
    begins   the number of buffers and works that begin in it
    """

    def __init__(self, events: Sequence[Event], before: Mapping[int, Alloc]) -> None:
        self.events, self.before = events, before
        self.calls = Counter(event.group[0] for event in events if isinstance(event, Launch))
        self.begins = self.calls.total() + sum(isinstance(event, Alloc) for event in events)
        self.on_device = all(getattr(event, "memory", DEVICE) == DEVICE for event in events)
        self.nbytes = self.highest = 0  # more bytes at its end, and at most
        for _, total in self.totals():
            self.nbytes, self.highest = total, max(self.highest, total)
        self._found: dict[tuple[object, ...], Any] = {}

    def totals(self) -> Iterator[tuple[int, int]]:
        """Yield the place of each allocation and free, and how many more bytes are live after it."""
        sizes, total = {number: alloc.nbytes for number, alloc in self.before.items()}, 0
        for at, event in enumerate(self.events):
            if isinstance(event, Alloc):
                sizes[event.id] = event.nbytes
                total += event.nbytes
                yield at, total
            elif isinstance(event, Free):
                total -= sizes[event.id]
                yield at, total

    def until(self, at: int) -> Stretch:
        """Return the events before that place."""
        return Stretch(self.events[:at], self.before)

    def once(self, find: Callable[..., T], *how: object) -> T:
        """Return find(self, *how), found at the first call."""
        key = find, *how
        if key not in self._found:
            self._found[key] = find(self, *how)
        return self._found[key]  # type: ignore[no-any-return]


class Repeat(NamedTuple):
    """A stretch again, in a rank's block `scope.unit`: `ids` are the rank's by the numbers of the pass, `calls` the
    group of each line of calls and the number of its first call here."""

    scope: Scope
    stretch: Stretch
    ids: Sequence[int]
    rank: int = 0
    calls: Sequence[tuple[tuple[int, ...], int]] = ()

    def events(self) -> Iterator[Event]:
        """Return its events, one by one."""
        return map(self.placed, self.stretch.events)

    def placed(self, event: Event) -> Event:
        """Return one event of the stretch as it is here."""
        step, phase, block, slot = self.scope
        scope, ids = Scope(step, phase, block + event.scope.unit, slot), self.ids
        if isinstance(event, (Alloc, Free, Retag)):
            return type(event)._make((scope, ids[event.id], *event[2:]))
        if isinstance(event, Save):
            return Save(scope, event.op, event.what, ids[event.id], event.nbytes)
        if isinstance(event, Launch):
            group, first = self.calls[event.group[0]]
            return Launch._make((scope, ids[event.work], *event[2:6], group, first + event.sequence, *event[8:]))
        if isinstance(event, Message):
            peer = self.rank + event.peer if event.peer else SEVERAL
            return Message(scope, ids[event.work], peer, event.nbytes, event.count)
        if isinstance(event, Wait):
            return Wait(scope, ids[event.work], event.by)
        if isinstance(event, Kernel) and event.work is not None:
            return event._replace(scope=scope, work=ids[event.work])
        return type(event)._make((scope, *event[1:]))


def one_by_one(events: Iterable[Event | Repeat]) -> Iterator[Event]:
    """Return the events, those of each stretch one by one."""
    for event in events:
        if isinstance(event, Repeat):
            yield from event.events()
        else:
            yield event
