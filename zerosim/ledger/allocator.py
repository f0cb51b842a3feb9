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
        self._peaks = AllocatorPeaks(0, 0, 0, 0, 0)
        self.marks: dict[str, AllocatorMark] = {}
        self._live: dict[int, tuple[int, int]] = {}

    @property
    def peaks(self) -> AllocatorPeaks:
        return self._peaks

    def read(self, events: Sequence[Event]) -> None:
        """Fold events in order."""
        for event in on_device(events):
            if isinstance(event, Alloc):
                self._live[event.id] = event.nbytes, event.reserved_bytes
                self._count(event.nbytes, event.reserved_bytes)
            elif isinstance(event, Free):
                nbytes, allocated = self._live.pop(event.id)
                self.requested_bytes -= nbytes
                self.allocated_bytes -= allocated
            elif isinstance(event, Segment):
                self.reserved_bytes += event.nbytes
                self._count(0, 0)
            elif isinstance(event, Mark):
                self.marks[event.name] = AllocatorMark(self.allocated_bytes, self.reserved_bytes)
            elif isinstance(event, Move):
                peaks = self._peaks
                self._peaks = peaks._replace(moved_bytes=peaks.moved_bytes + event.nbytes, moves=peaks.moves + 1)

    def _count(self, nbytes: int, allocated: int) -> None:
        self.requested_bytes += nbytes
        self.allocated_bytes += allocated
        before = self._peaks
        self._peaks = before._replace(
            requested_bytes=max(before.requested_bytes, self.requested_bytes),
            allocated_bytes=max(before.allocated_bytes, self.allocated_bytes),
            reserved_bytes=max(before.reserved_bytes, self.reserved_bytes),
        )


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
