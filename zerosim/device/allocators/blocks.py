"""The books of a caching allocator: chains of address blocks, pools of free blocks, the device's memory.

A segment is a range of addresses taken from the device in one call. It begins as one block. A request may split
off the front of a free block, and free neighbours merge into one block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from zerosim.device.events import Segment
from zerosim.device.memory import Change, MovesOut

MIB = 2**20
UNLIMITED = 2**62


class Block:
    """`size` bytes from `address` on. `before` and `after` are its neighbours in the same segment.

    In an expandable segment, which begins at `base`, a block may be addresses without memory (`mapped` False).
    """

    __slots__ = ("address", "after", "allocated", "base", "before", "mapped", "pool", "since", "size", "stream", "uses")

    def __init__(self, pool: BlockPool, stream: str, address: int, size: int, base: int | None = None) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.base = base
        self.mapped = True
        self.allocated = False
        self.before: Block | None = None
        self.after: Block | None = None
        self.since = 0  # its pool's count of searches when it became free
        self.uses: set[int] = set()  # unfinished works on other streams

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether the program has freed it, and every other stream has finished with it."""
        return not self.allocated and not self.uses

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes, and return the rest as a new block."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size, self.base)
        rest.mapped, rest.before, rest.after = self.mapped, self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Merge with free neighbours, which leave their pool's lists."""
        for other in (self.before, self.after):
            if other is None or not other.is_free or other.mapped != self.mapped:
                continue
            self.pool.remove(other)
            if other is self.before:
                self.address, self.before = other.address, other.before
                if self.before is not None:
                    self.before.after = self
            else:
                self.after = other.after
                if self.after is not None:
                    self.after.before = self
            self.size += other.size


class BlockPool:
    """Free blocks for small requests, or for large ones, ordered by stream, size and address."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0
        self._free: list[tuple[str, int, int, Block]] = []  # no two have the same address, so blocks are never compared
        self._unmapped: list[tuple[str, int, Block]] = []

    def put(self, block: Block) -> None:
        if block.mapped:
            block.since = self.searches
            insort(self._free, (block.stream, block.size, block.address, block))
        else:
            insort(self._unmapped, (block.stream, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self._free[bisect_left(self._free, (block.stream, block.size, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.stream, block.address))]

    def free(self) -> list[Block]:
        """Return all free blocks, the smallest of each stream first."""
        return [entry[-1] for entry in self._free]

    def at_least(self, stream: str, size: int) -> Iterator[Block]:
        """Yield a stream's free blocks of at least that size, smallest first, then by address."""
        for at in range(bisect_left(self._free, (stream, size, 0)), len(self._free)):
            if self._free[at][0] != stream:
                return
            yield self._free[at][-1]

    def best(self, stream: str, size: int) -> Block | None:
        """Return a stream's smallest free block of at least that size, the lowest of these; None if there is none."""
        at = bisect_left(self._free, (stream, size, 0))
        return self._free[at][-1] if at < len(self._free) and self._free[at][0] == stream else None

    def unmapped(self, stream: str) -> list[Block]:
        """Yield a stream's addresses without memory, lowest first."""
        return [block for of, _, block in self._unmapped if of == stream]


class DeviceMemory:
    """The driver's memory: it grants any addresses as long as there are bytes (its memory is paged and does not
    fragment).

    `reserved_bytes` are granted now; `changes` lists each change.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved_bytes = 0
        self.changes: list[Change] = []
        self.pages: MovesOut | None = None  # they compete with segments
        self._ranges: list[tuple[int, int]] = []  # addresses in use: start, end

    def has(self, nbytes: int) -> bool:
        """Return whether there is room, after pages have moved out."""
        while self.capacity is not None and self.reserved_bytes + nbytes > self.capacity:
            if self.pages is None or not self.pages.move_out():
                return False
        return True

    def addresses(self, nbytes: int) -> int:
        """Return the lowest free range of that many addresses, without memory behind it."""
        start = 0
        for first, end in self._ranges:
            if first - start >= nbytes:
                break
            start = end
        insort(self._ranges, (start, start + nbytes))
        return start

    def forget(self, address: int) -> None:
        """Release the address range that begins there."""
        del self._ranges[bisect_left(self._ranges, (address, 0))]

    def take(self, address: int, nbytes: int) -> None:
        """Map memory behind addresses; a negative number gives it back."""
        self.reserved_bytes += nbytes
        self.changes.append((Segment, (address, nbytes)))
