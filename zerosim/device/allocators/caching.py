"""PyTorch's CUDA caching allocator, as rules.

The allocator keeps freed memory for the next request, because the driver's own malloc and free are slow. So it reserves
more than it has allocated. The difference depends on the sizes and the order of requests:

    rounding    to 512 bytes (`rounded`)
    pools       requests of at most 1 MiB are small: they share segments of 2 MiB. Larger ones take segments of
                20 MiB; from 10 MiB on, segments of their own size, rounded up to 2 MiB
    search      the smallest free block of the same pool and stream that is large enough (`_cached`)
    splitting   the remainder becomes a free block: from 512 bytes in the small pool, above 1 MiB in the large one;
                otherwise it belongs to the request, and counts as allocated (`_splits`)
    merging     a freed block and its free neighbours in the segment become one
    a miss      takes a new segment. If the device has no room, segments without live bytes are given back
                first; then it is out of memory (`reserve`)

A block that another stream uses is free when that stream's work has ended (`lend`, `passed`). In zerosim's own runs
a collective holds its buffers until the rank waits for it, so none is freed earlier.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp; knobs: `config/allocator.py`. Left out: CUDA graphs' private pools,
several devices, callbacks, allocations by other libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.config.allocator import INTERVALS, CachingKnobs
from zerosim.device.allocators.blocks import MIB, UNLIMITED, Block, BlockPool, DeviceMemory
from zerosim.device.allocators.expandable import ExpandableSegments
from zerosim.device.memory import Change, MovesOut
from zerosim.errors import Room

MIN_BLOCK = 512
SMALL_REQUEST = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # the smallest request with a segment of its own size
ROUND_LARGE = 2 * MIB
COMPUTE = "compute"


class CachingAllocator:
    """Grants blocks. `allocated_bytes` counts live blocks, `reserved_bytes` all segments."""

    def __init__(self, capacity: int | None = None, knobs: CachingKnobs = CachingKnobs()) -> None:  # noqa: B008  frozen
        self.capacity = capacity
        self.knobs = knobs
        self.memory = DeviceMemory(capacity)
        self.allocated_bytes = 0
        self.small, self.large = BlockPool(is_small=True), BlockPool(is_small=False)
        self._pages = BlockPool(is_small=False)  # no segments of this allocator, and never kept
        self._max_split = UNLIMITED if knobs.max_split_size_mb is None else knobs.max_split_size_mb * MIB
        self._expandable = ExpandableSegments(self.memory) if knobs.expandable_segments else None
        self._live: dict[int, Block | None] = {}  # None: a request of 0 bytes has no block
        self._pending: list[Block] = []  # freed, but still in use on another stream

    @property
    def reserved_bytes(self) -> int:
        return self.memory.reserved_bytes

    @property
    def changes(self) -> Sequence[Change]:
        return self.memory.changes

    def forget(self) -> None:
        self.memory.changes.clear()

    def reserve(self, id: int, nbytes: int, stream: str = COMPUTE) -> int | None:
        """Reserve a block for a request and return its size; None if out of memory."""
        if not nbytes:
            self._live[id] = None
            return 0
        size = self.rounded(nbytes)
        pool = self.small if size <= SMALL_REQUEST else self.large
        block = self._cached(pool, stream, size)
        if block is None:
            self._collect_garbage()
            block = self._new(pool, stream, size)
        if block is None and self._give_back_oversize(pool, stream, size):
            block = self._new(pool, stream, size)
        if block is None:
            self._give_back_all()
            block = self._new(pool, stream, size)
        if block is None:
            return None
        if self._splits(block, size):
            pool.put(block.split(size))
        return self._grant(id, block)

    def share(self, pages: MovesOut) -> None:
        """Let pages of unified memory move out for new segments: the driver has room while it can move some."""
        self.memory.pages = pages

    def reserve_pages(self, id: int, nbytes: int) -> int | None:
        """Reserve the driver's memory for pages. If other pages leave no room, segments without live bytes are given
        back."""
        if not self.memory.has(nbytes):
            self._give_back_all()
        if not self.memory.has(nbytes):
            return None
        block = Block(self._pages, COMPUTE, self.memory.addresses(nbytes), nbytes)
        self.memory.take(block.address, nbytes)
        return self._grant(id, block)

    def _grant(self, id: int, block: Block) -> int:
        block.allocated = True
        self._live[id] = block
        self.allocated_bytes += block.size
        return block.size

    def release(self, id: int) -> None:
        block = self._live.pop(id)
        if block is None:
            return
        block.allocated = False
        self.allocated_bytes -= block.size
        if block.pool is self._pages:
            self._return(block)
        elif block.uses:
            self._pending.append(block)
        else:
            self._free(block)

    def address_of(self, id: int) -> int:
        block = self._live[id]
        return 0 if block is None else block.address

    # -- other streams --------------------------------------------------------------------------
    def lend(self, id: int, work: int) -> None:
        """Note that a work on another stream uses the bytes of `id`: after a free they stay reserved until the work
        ends."""
        block = self._live[id]
        if block is not None:
            block.uses.add(work)

    def passed(self, work: int) -> None:
        """Note that the work has ended."""
        for block in [block for block in (*self._pending, *self._live.values()) if block and work in block.uses]:
            block.uses.remove(work)
            if block.is_free:
                self._pending.remove(block)
                self._free(block)

    # -- the rules ------------------------------------------------------------------------------
    def rounded(self, nbytes: int) -> int:
        """Round a size to 512 bytes or, with roundup_power2_divisions, to a fraction of the power of two below."""
        power = nbytes.bit_length() - 1
        divisions = self.knobs.roundup_power2_divisions[min(max(0, power - 20), INTERVALS - 1)]
        if divisions <= 1 or nbytes <= MIN_BLOCK * divisions:
            return -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        part = (1 << power) // divisions
        return -(-nbytes // part) * part

    def _cached(self, pool: BlockPool, stream: str, size: int) -> Block | None:
        """Return the best fit. A block of max_split_size or more serves only requests of about its size."""
        pool.searches += 1
        block = pool.best(stream, size)
        if block is not None and self._expandable is not None:
            _, *larger = pool.at_least(stream, size)
            block = self._expandable.least_room(block, larger)
        if block is None or size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + self.knobs.max_non_split_rounding_mb * MIB:
            return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.knobs.expandable_segments:
            return rest >= MIN_BLOCK
        return size < self._max_split and rest > SMALL_REQUEST

    def _new(self, pool: BlockPool, stream: str, size: int) -> Block | None:
        """Take a segment from the device, as a block; None if there is no room."""
        if self._expandable is not None:
            return self._expandable.grow(pool, stream, size)
        nbytes = segment_bytes(size)
        if not self.memory.has(nbytes):
            return None
        block = Block(pool, stream, self.memory.addresses(nbytes), nbytes)
        self.memory.take(block.address, nbytes)
        return block

    def _free(self, block: Block) -> None:
        block.merge()
        block.pool.put(block)

    # -- giving segments back -------------------------------------------------------------------
    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        self._return(block)

    def _return(self, block: Block) -> None:
        """Return a segment's memory to the driver."""
        self.memory.take(block.address, -block.size)
        self.memory.forget(block.address)

    def _collect_garbage(self) -> None:
        """Above the threshold, give back large segments whose idle time is above the mean."""
        if self.capacity is None or not self.knobs.garbage_collection_threshold:
            return
        target = self.reserved_bytes - int(self.knobs.garbage_collection_threshold * self.capacity)
        ages = {block: self.large.searches - block.since for block in self.large.free() if _is_whole(block)}
        while target > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                target -= block.size
                self._give_back(block)
                del ages[block]

    def _give_back_oversize(self, pool: BlockPool, stream: str, size: int) -> bool:
        """Give back oversize blocks (max_split_size and more): the smallest sufficient one, or as many as needed,
        largest first."""
        if self._max_split == UNLIMITED:
            return False
        enough = pool.best(stream, size)
        if enough is not None and _is_whole(enough):
            self._give_back(enough)
            return True
        given = 0
        for block in reversed(list(pool.at_least(stream, self._max_split))):
            if given < size and _is_whole(block):
                given += block.size
                self._give_back(block)
        return given >= size

    def _give_back_all(self) -> None:
        """Wait for the other streams, then give back every segment, or page of one, without a live byte."""
        for block in self._pending:
            block.uses.clear()
            self._free(block)
        self._pending.clear()
        for pool in (self.large, self.small):
            for block in pool.free():
                if _is_whole(block):
                    self._give_back(block)
                elif self._expandable is not None:
                    self._expandable.shrink(block)

    # -- out of memory --------------------------------------------------------------------------
    def room(self, nbytes: int, stream: str = COMPUTE) -> Room | None:
        assert self.capacity is not None
        size = self.rounded(nbytes)
        pool = self.small if size <= SMALL_REQUEST else self.large
        cached = [block.size for block in pool.free()]
        unreserved = self.capacity - self.reserved_bytes
        pages = None if self._expandable is None else self._expandable.missing(pool, stream, size)
        needed = self.reserved_bytes + (segment_bytes(size) if pages is None else pages)
        idle = self.reserved_bytes - self.allocated_bytes
        remedy = ""
        if pages is None and idle + unreserved >= size:
            remedy = "--allocator-conf expandable_segments:True, which makes segments one"
        hole = max([unreserved, *cached])
        return Room(self.capacity - self.allocated_bytes, hole, self.reserved_bytes, needed, remedy)


def segment_bytes(size: int) -> int:
    """Return the size of a new segment for a request of that rounded size."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE


def _is_whole(block: Block) -> bool:
    """Whether the block is a whole segment."""
    return not block.is_split and block.base is None
