"""A reader of a rank's record: the allocator's memory, and the requested bytes in it.

There are two ways to the same figures: a run whose devices have the allocator, and `replayed`, which repeats the
requests of a finished record on another allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zerosim.device.events import Alloc, Event, Free, Mark, Move, Refusal, Segment, on_device
from zerosim.device.memory import Allocator


class AllocatorPeaks(NamedTuple):
    """The highest value of each figure; the moments may differ.

    requested_bytes  the peak of live bytes
    allocated_bytes  in the blocks for requests, including rounding and remainders that were not split off
    reserved_bytes   taken from the device
    moved_bytes      copied in total, in `moves` moves, to merge holes
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    moved_bytes: int
    moves: int

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that the program never filled, 0 to 1."""
        return 1 - self.requested_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures that the peak's JSON entry lacks."""
        return {"fragmentation": self.fragmentation, "moves": self.moves, "moved_bytes": self.moved_bytes}


class AllocatorMark(NamedTuple):
    """An allocator's bytes at a mark of a step."""

    allocated_bytes: int
    reserved_bytes: int


class AllocatorLedger:
    """Bytes now, at the latest of each mark, and the peaks so far."""

    def __init__(self) -> None:
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.marks: dict[str, AllocatorMark] = {}
        self._most_requested = self._most_allocated = self._most_reserved = 0
        self._moved_bytes = self._moves = 0
        self._live: dict[int, tuple[int, int]] = {}

    @property
    def peaks(self) -> AllocatorPeaks:
        most = self._most_requested, self._most_allocated, self._most_reserved
        return AllocatorPeaks(*most, self._moved_bytes, self._moves)

    def read(self, events: Sequence[Event]) -> None:
        """Fold events in order."""
        for event in on_device(events):
            if isinstance(event, Alloc):
                self.open(event.id, event.nbytes, event.reserved_bytes)
            elif isinstance(event, Free):
                self.close(event.id)
            elif isinstance(event, (Segment, Move)):
                self.change(type(event), event.nbytes)
            elif isinstance(event, Mark):
                self.mark(event.name)

    def open(self, id: int, nbytes: int, allocated: int) -> None:
        """Count a granted request."""
        self._live[id] = nbytes, allocated
        self.requested_bytes += nbytes
        self.allocated_bytes += allocated
        if self.requested_bytes > self._most_requested:
            self._most_requested = self.requested_bytes
        if self.allocated_bytes > self._most_allocated:
            self._most_allocated = self.allocated_bytes

    def close(self, id: int) -> None:
        """Count the end of a granted request."""
        nbytes, allocated = self._live.pop(id)
        self.requested_bytes -= nbytes
        self.allocated_bytes -= allocated

    def change(self, kind: type[Segment] | type[Move], nbytes: int) -> None:
        """Count bytes taken from the device, given back (negative), or moved."""
        if kind is Move:
            self._moved_bytes, self._moves = self._moved_bytes + nbytes, self._moves + 1
        else:
            self.reserved_bytes += nbytes
            self._most_reserved = max(self._most_reserved, self.reserved_bytes)

    def mark(self, name: str) -> None:
        self.marks[name] = AllocatorMark(self.allocated_bytes, self.reserved_bytes)


def replayed(events: Sequence[Event], allocator: Allocator) -> Iterator[Event]:
    """Yield the record as it would be on a device with this new allocator. It ends with a Refusal if the allocator has
    no room.

    After each yielded event the allocator is in the state of that moment.
    """
    for event in on_device(events):
        if isinstance(event, Alloc):
            reserved = allocator.reserve(event.id, event.nbytes)
            for what, numbers in allocator.changes:
                yield what(event.scope, *numbers)
            allocator.forget()
            if reserved is None:
                yield Refusal(event.scope, event.nbytes, event.kind)
                return
            yield event._replace(reserved_bytes=reserved)
        elif not isinstance(event, (Segment, Move)):  # events of the original allocator
            if isinstance(event, Free):
                allocator.release(event.id)
            yield event
