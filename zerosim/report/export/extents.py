"""Live and reserved addresses over time, from one rank's events: numbers only.

The record's requests go through an allocator again, which places each one. Time is the order of events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.events import Alloc, Event, Free, Move, Refusal, Retag, Segment
from zerosim.errors import Room, wrong
from zerosim.ledger.allocator import AllocatorLedger, AllocatorPeaks, replayed


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` from `address` on, from event `start` to `end`; reserved memory has no kind and unit."""

    address: int
    nbytes: int
    start: int
    end: int
    kind: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The shown extents, in `num_events` events and `num_bytes` addresses.

    `peaks` are those of the whole record. `refusal` is the request that ended it, `room` the free memory then.
    """

    live: tuple[Extent, ...]
    reserved: tuple[Extent, ...]
    num_events: int
    num_bytes: int
    peaks: AllocatorPeaks
    refusal: Refusal | None
    room: Room | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        refused = self.refusal and {"nbytes": self.refusal.nbytes, "kind": self.refusal.kind}
        return {
            "num_events": self.num_events,
            "num_bytes": self.num_bytes,
            "peaks": {**self.peaks._asdict(), "fragmentation": self.peaks.fragmentation},
            "refusal": refused and {**refused, **(self.room._asdict() if self.room else {})},
            "reserved": [[one.address, one.nbytes, one.start, one.end] for one in self.reserved],
            "live": [[one.kind, one.unit, one.address, one.nbytes, one.start, one.end] for one in self.live],
        }


def read_addresses(events: Sequence[Event], allocator: CachingAllocator | Arena, step: int | None = None) -> Addresses:
    """Read the addresses over one step, or over all events if `step` is None. Addresses that were never used are left
    out.

    `allocator` is new, `events` begin when the rank does. Raises: InputError for a step that is not in them.
    """
    ledger, log, count, inside = AllocatorLedger(), _Log(), 0, list[int]()
    refusal = None
    for event in replayed(events, allocator):
        ledger.read([event])
        if isinstance(event, Segment):
            log.segments.read(event, count + 1)
        elif isinstance(event, Move):
            log.moved(event, count + 1)
        else:
            count += 1
            if step is None or event.scope.step == step:
                inside.append(count)
            if isinstance(event, Alloc):
                address = allocator.address_of(event.id)
                log.open(event.id, Extent(address, event.nbytes, count, 0, event.kind, event.scope.unit))
            elif isinstance(event, Free):
                log.close(event.id, count)
            elif isinstance(event, Retag):
                log.open(event.id, replace(log.close(event.id, count), kind=event.kind, start=count))
            elif isinstance(event, Refusal):
                refusal = event
    if not inside and refusal is None:
        raise wrong("step", f" {step}: no events of it: expected one that was recorded with keep_events")
    ever_reserved = log.close_all(count + 1)
    if inside:
        first, last = inside[0] - 1, inside[-1] + 1
    else:  # it ended before this step: everything up to there
        first, last = 0, count + 1
    room = None if refusal is None else allocator.room(refusal.nbytes)
    reserved, num_bytes = _closed_up(ever_reserved, ever_reserved)
    live, _ = _closed_up(log.live, ever_reserved)
    return Addresses(
        live=_within(live, first, last),
        reserved=_within(reserved, first, last),
        num_events=last - first,
        num_bytes=num_bytes,
        peaks=ledger.peaks,
        refusal=refusal,
        room=room,
    )


class Segments:
    """An allocator's segments of the device: extents that it holds, and those that it has given back."""

    def __init__(self) -> None:
        self.held: list[Extent] = []
        self.gone: list[Extent] = []

    def read(self, segment: Segment, at: int) -> None:
        """Read one request: memory taken, or given back, which may cut a piece out of earlier memory, or several
        times."""
        first, end = segment.address, segment.address + abs(segment.nbytes)
        if segment.nbytes > 0:
            self.held.append(Extent(first, segment.nbytes, at, 0))
            return
        for held in [held for held in self.held if held.address < end and first < held.address + held.nbytes]:
            self.held.remove(held)
            self.gone.append(replace(held, end=at))
            before, behind = first - held.address, held.address + held.nbytes - end
            if before > 0:
                self.held.append(replace(held, nbytes=before, start=at))
            if behind > 0:
                self.held.append(replace(held, address=end, nbytes=behind, start=at))


class _Log:
    """Extents that have ended, and those that have not."""

    def __init__(self) -> None:
        self.live: list[Extent] = []
        self.segments = Segments()
        self._open: dict[int, Extent] = {}

    def open(self, id: int, extent: Extent) -> None:
        self._open[id] = extent

    def close(self, id: int, end: int) -> Extent:
        extent = self._open.pop(id)
        if extent.nbytes:
            self.live.append(replace(extent, end=end))
        return extent

    def moved(self, move: Move, at: int) -> None:
        self.open(move.id, replace(self.close(move.id, at), address=move.target, start=at))

    def close_all(self, end: int) -> list[Extent]:
        """End every extent, reserved ones too."""
        for id in list(self._open):
            self.close(id, end)
        return self.segments.gone + [replace(held, end=end) for held in self.segments.held]


def _closed_up(extents: Sequence[Extent], reserved: Sequence[Extent]) -> tuple[list[Extent], int]:
    """Return addresses without the gaps that were never reserved, and how many addresses are left."""
    ranges: list[list[int]] = []
    for one in sorted(reserved, key=lambda one: one.address):
        if ranges and one.address <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], one.address + one.nbytes)
        else:
            ranges.append([one.address, one.address + one.nbytes])
    starts, gaps, before = [start for start, _ in ranges], list[int](), 0
    for start, end in ranges:
        gaps.append(start - before)
        before += end - start
    moved = [replace(one, address=one.address - gaps[bisect_right(starts, one.address) - 1]) for one in extents]
    return moved, before


def _within(extents: Sequence[Extent], first: int, last: int) -> tuple[Extent, ...]:
    """Return the extents between two moments, which become 0 and their distance."""
    return tuple(
        replace(one, start=max(one.start, first) - first, end=min(one.end, last) - first)
        for one in extents
        if one.start < last and one.end > first
    )
