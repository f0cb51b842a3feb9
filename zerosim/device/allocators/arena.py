"""One contiguous region, taken from the device at the start, and ZeRO-R's memory defragmentation (MD).

A step interleaves long-lived buffers (activation checkpoints, parameters' gradients) with short-lived ones.
So the free bytes end up in many holes, and a request may fail although there are enough bytes. With
`defragment` live bytes are then moved to the start of the region, which merges the holes.

Sizes are not rounded and addresses not aligned, so this is a lower bound for a contiguous region.

Source: ZeRO (arXiv 1910.02054), sections 3.2 and 6.3; DeepSpeed, runtime/zero/contiguous_memory_allocator.py, which
also takes the smallest hole that is large enough, and moves everything when it moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping

from zerosim.config.allocator import ArenaKnobs
from zerosim.device.events import Move, Segment
from zerosim.device.memory import Change
from zerosim.errors import Room

Moves = list[tuple[int, int, int]]
"""Source, target and size of each move, in order."""


def compacted(live: Mapping[int, int]) -> Moves:
    """Plan the moves of live bytes (size by address) to the start, in the order of addresses."""
    moves, end = [], 0
    for address, size in sorted(live.items()):
        if address != end:
            moves.append((address, end, size))
        end += size
    return moves


class Arena:
    """Grants ranges of `capacity` bytes. `compact` plans how live bytes are moved together."""

    def __init__(
        self,
        capacity: int,
        knobs: ArenaKnobs = ArenaKnobs(),  # noqa: B008  frozen
        compact: Callable[[Mapping[int, int]], Moves] = compacted,
    ) -> None:
        self.capacity: int | None = capacity
        self.knobs = knobs
        self.compact = compact
        self.free_bytes = capacity
        self.changes: list[Change] = [(Segment, (0, capacity))]
        self._live: dict[int, tuple[int, int]] = {}  # address and size by id
        self._starts: dict[int, int] = {}  # holes: size by address
        self._ends: dict[int, int] = {}  # holes: address by end
        self._holes: list[tuple[int, int]] = []  # size and address, smallest first
        self._open(0, capacity)

    def forget(self) -> None:
        self.changes.clear()

    def reserve(self, id: int, nbytes: int) -> int | None:
        """Reserve `nbytes`. Return None if there are not enough bytes, or no hole is large enough."""
        if nbytes > self.free_bytes:
            return None
        address = self._hole(nbytes)
        if address is None:
            if not self.knobs.defragment:
                return None
            self._defragment()
            address = self._hole(nbytes)
            assert address is not None  # all free bytes are contiguous now
        if nbytes:
            size = self._close(address)
            self._open(address + nbytes, size - nbytes)
        self.free_bytes -= nbytes
        self._live[id] = address, nbytes
        return nbytes

    def release(self, id: int) -> None:
        address, nbytes = self._live.pop(id)
        self.free_bytes += nbytes
        end = address + nbytes
        if not nbytes:
            return
        if end in self._starts:
            end += self._close(end)
        if address in self._ends:
            address = self._ends[address]
            self._close(address)
        self._open(address, end - address)

    def address_of(self, id: int) -> int:
        return self._live[id][0]

    def room(self, nbytes: int) -> Room:
        largest = max(self._starts.values(), default=0)
        assert self.capacity is not None
        if nbytes > self.free_bytes:
            return Room(self.free_bytes, largest, self.capacity, self.capacity + nbytes - self.free_bytes)
        remedy = "--allocator-conf defragment:True, which moves live bytes together"
        return Room(self.free_bytes, largest, self.capacity, self.capacity + nbytes - largest, remedy)

    def _hole(self, nbytes: int) -> int | None:
        """Return the address of a hole of at least `nbytes`: the smallest, or with first fit the lowest."""
        if not nbytes:
            return 0
        if self.knobs.fit == "best":
            at = bisect_left(self._holes, (nbytes, 0))
            return self._holes[at][1] if at < len(self._holes) else None
        return min((address for size, address in self._holes if size >= nbytes), default=None)

    def _open(self, address: int, size: int) -> None:
        if size:
            self._starts[address] = size
            self._ends[address + size] = address
            insort(self._holes, (size, address))

    def _close(self, address: int) -> int:
        """Remove the hole at an address, and return its size."""
        size = self._starts.pop(address)
        del self._ends[address + size]
        del self._holes[bisect_left(self._holes, (size, address))]
        return size

    def _defragment(self) -> None:
        ids = {address: id for id, (address, size) in self._live.items() if size}
        for source, target, size in self.compact({address: self._live[id][1] for address, id in ids.items()}):
            id = ids[source]
            self._live[id] = target, size
            self.changes.append((Move, (id, source, target, size)))
        self._starts.clear()
        self._ends.clear()
        self._holes.clear()
        self._open(sum(size for _, size in self._live.values()), self.free_bytes)
