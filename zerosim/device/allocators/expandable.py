"""Expandable segments: one long range of addresses for each pool and stream, mapped to memory page by page.

A request that fits no free block gets new pages behind the last block, so free bytes at a segment's end are
no longer lost. Out of memory, the allocator gives back pages without live bytes anywhere.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp, "Expandable Segments".
"""

from __future__ import annotations

from collections.abc import Iterable

from zerosim.device.allocators.blocks import MIB, UNLIMITED, Block, BlockPool, DeviceMemory

SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB


class ExpandableSegments:
    """Grows and shrinks the segments of an allocator's pools. Pages have 2 MiB in the small pool and 20 MiB in the
    large one."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def least_room(self, first: Block, larger: Iterable[Block]) -> Block:
        """Return the best fit. A block that could grow counts with its largest size."""
        best = first
        for block in larger:
            if _could_be(block) >= _could_be(best):
                break
            best = block
        return best

    def grow(self, pool: BlockPool, stream: str, size: int) -> Block | None:
        """Return a block of at least `size` bytes at the lowest addresses with room; None if pages run out."""
        block = self._candidate(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.after
            assert behind is not None  # or the candidate had no room
            if not self._map(behind, min(behind.size, size - block.size)):
                return None
            block = behind  # it has merged with its free neighbour before
        pool.remove(block)
        return block

    def missing(self, pool: BlockPool, stream: str, size: int) -> int:
        """Return the bytes of pages that `grow` still has to map for a block of `size` bytes."""
        block: Block | None = self._candidate(pool, stream, size)
        page, found, missing = _page(pool), 0, 0
        while found < size:
            assert block is not None  # or the candidate had no room
            if not block.mapped:
                missing += -(-min(block.size, size - found) // page) * page
            found, block = found + block.size, block.after
        return missing

    def shrink(self, block: Block) -> None:
        """Give back the whole pages of a free block, and keep the remainders at its ends."""
        assert block.base is not None
        page, pool = _page(block.pool), block.pool
        first = -(-(block.address - block.base) // page) * page + block.base
        end = (block.address + block.size - block.base) // page * page + block.base
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            inner = block.split(first - block.address)
            pool.put(block)
            block = inner
        if block.address + block.size > end:
            pool.put(block.split(end - block.address))
        self._memory.take(block.address, -block.size)
        block.mapped = False
        block.merge()
        if block.is_split:
            pool.put(block)
        else:  # nothing is left of the segment
            self._memory.forget(block.address)

    def _candidate(self, pool: BlockPool, stream: str, size: int) -> Block:
        """Return the lowest unmapped block with room for `size`, counting free bytes before and behind it."""
        for unmapped in pool.unmapped(stream):
            before = unmapped.before
            block = before if before is not None and before.is_free else unmapped
            if _free_from(block, size) >= size:
                return block
        page, capacity = _page(pool), self._memory.capacity
        most = UNLIMITED // 2**10 if capacity is None else capacity + capacity // 8
        length = -(-max(most, size) // page) * page
        start = self._memory.addresses(length)
        block = Block(pool, stream, start, length, base=start)
        block.mapped = False
        pool.put(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map memory behind the first `size` bytes of unmapped addresses, in whole pages."""
        page = _page(block.pool)
        nbytes = -(-size // page) * page
        if not self._memory.has(nbytes):
            return False
        pool = block.pool
        pool.remove(block)
        if nbytes < block.size:
            pool.put(block.split(nbytes))
        self._memory.take(block.address, nbytes)
        block.mapped = True
        block.merge()
        pool.put(block)
        return True


def _page(pool: BlockPool) -> int:
    return SMALL_PAGE if pool.is_small else LARGE_PAGE


def _could_be(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _free_from(block: Block | None, wanted: int) -> int:
    """Count free or unmapped bytes from a block on, until there are enough."""
    found = 0
    while block is not None and block.is_free and found < wanted:
        found, block = found + block.size, block.after
    return found
