"""Device memory as cudaMalloc gives it: segments at real addresses, the chunks that pools cut them into, and the one
way to touch them, which checks that memory is live, on its device, and ordered.

Fresh segments are filled with 0xFF bytes, which are NaNs in every floating type.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from typing import Any

import numpy as np

from cupy._clock import History, Work
from cupy._state import LOCK, StandinError

UNIT = 512
WHOLE = np.zeros(1, np.int64)


class Segment:
    """One cudaMalloc: `size` bytes at `base`, with a history of who touched them.

    `is_plain`: nothing but CUDA watches over it. Of a pool that asks its program for memory, chunks are the program's
    affair: a graph uses what the pool holds free.
    """

    def __init__(self, device: int, size: int, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        raw = np.full(size + 2 * UNIT, 0xFF, np.uint8)
        shift = -raw.ctypes.data % UNIT
        self.bytes = raw[shift : shift + size]
        self.guard = raw[shift + size :]  # belongs to nobody: whoever writes here ran over the end
        self.base = self.bytes.ctypes.data
        self.device = device
        self.size = size
        self.history = History()
        self.chunks: list[Chunk] = []


class Chunk:
    """A part of a segment, held by one allocation or free in its stream's arena."""

    __slots__ = ("asked", "held", "offset", "segment", "size", "stream")

    def __init__(self, segment: Segment, offset: int, size: int, stream: int) -> None:
        self.segment, self.offset, self.size, self.stream = segment, offset, size, stream
        self.held = False
        self.asked = size

    def __lt__(self, other: Chunk) -> bool:
        return self.offset < other.offset


_bases: list[int] = []
_segments: dict[int, Segment] = {}
DROPPED: deque[tuple[Any, Chunk]] = deque()  # freed by finalizers, put back at the next chance
ENDED: deque[Segment] = deque()  # of pools that are gone
FREED: deque[Segment] = deque()  # of no pool, and freed
LEAKED: dict[int, int] = {}  # bytes by device that such pools never gave back


def put_back() -> None:
    while DROPPED:
        pool, chunk = DROPPED.popleft()
        pool._release(chunk)
    while FREED:
        remove(FREED.popleft())
    while ENDED:
        segment = ENDED.popleft()
        remove(segment)  # as real memory; the device's stays taken
        LEAKED[segment.device] = LEAKED.get(segment.device, 0) + segment.size


def add(segment: Segment) -> None:
    insort(_bases, segment.base)
    _segments[segment.base] = segment


def remove(segment: Segment) -> None:
    _bases.remove(segment.base)
    del _segments[segment.base]


def device_used(device: int) -> int:
    put_back()
    return sum(segment.size for segment in _segments.values() if segment.device == device) + LEAKED.get(device, 0)


def find(ptr: int, nbytes: int, what: str) -> tuple[Segment, int]:
    """The segment and offset of live device memory. Raises: StandinError as CUDA's illegal address."""
    with LOCK:
        put_back()
        index = bisect_right(_bases, ptr) - 1
        if index >= 0:
            segment = _segments[_bases[index]]
            offset = ptr - segment.base
            if offset + max(nbytes, 1) <= segment.size:
                if segment.is_plain:
                    return segment, offset
                chunk = _chunk_at(segment, offset)
                if chunk.held and offset + nbytes <= chunk.offset + chunk.asked:
                    return segment, offset
                raise StandinError(f"illegal address: {what} touches freed memory, or more than one allocation")
        raise StandinError(f"illegal address: {what} touches {nbytes} bytes at {ptr:#x}, which is not device memory")


def _chunk_at(segment: Segment, offset: int) -> Chunk:
    return segment.chunks[bisect_right(segment.chunks, offset, key=lambda chunk: chunk.offset) - 1]


def reach(ptr: int, what: str) -> int:
    """Bytes from `ptr` to the end of its allocation."""
    segment, offset = find(ptr, 1, what)
    chunk = _chunk_at(segment, offset)
    return chunk.offset + chunk.asked - offset


def check_ends(ptr: int, what: str) -> None:
    """Raises: StandinError where somebody wrote behind the end of the allocation that holds `ptr`."""
    with LOCK:
        segment, offset = find(ptr, 0, what)
        if segment.is_plain:
            return
        chunk = _chunk_at(segment, offset)
        behind = segment.bytes[chunk.offset + chunk.asked : chunk.offset + chunk.size]
        if (behind != 0xFF).any() or (segment.guard != 0xFF).any():
            behind[...] = segment.guard[...] = 0xFF
            raise StandinError(f"{what} wrote behind the end of an allocation of {chunk.asked} bytes")


def is_device(ptr: int) -> bool:
    with LOCK:
        index = bisect_right(_bases, ptr) - 1
        return index >= 0 and ptr < _bases[index] + _segments[_bases[index]].size


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[np.ndarray, int]:
    """Where the contiguous runs of a strided array begin, and how long each is; one bounding run for very many."""
    if (
        strides
        and strides[-1] == itemsize
        and all(stride == shape[axis + 1] * strides[axis + 1] for axis, stride in enumerate(strides[:-1]))
    ):
        return WHOLE, math.prod(shape) * itemsize
    dims = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1 and stride)
    run = itemsize
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run = max(run, stride * (size - 1) + run)
    if math.prod(size for _, size in dims) > 512:
        return np.zeros(1, np.int64), run + sum(stride * (size - 1) for stride, size in dims)
    starts = np.zeros(1, np.int64)
    for stride, size in dims:
        starts = (np.arange(size)[:, None] * stride + starts).ravel()
    return np.sort(starts), run


def touch(
    work: Work, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, writes: bool
) -> np.ndarray | None:
    """Record that `work` reads or writes a strided array at `ptr`. Call under LOCK. None: no elements.

    Raises: RaceError; StandinError for memory that is not live or is another device's.
    """
    if 0 in shape:
        return None
    span = sum(max(stride * (size - 1), 0) for stride, size in zip(strides, shape, strict=True)) + itemsize
    segment, offset = find(ptr, span, work.name)
    if segment.device != work.stream.device:
        raise StandinError(
            f"{work.name} on device {work.stream.device} touches memory of device {segment.device} without peer access"
        )
    act = segment.history.write if writes else segment.history.read
    starts, run = _runs(shape, strides, itemsize)
    for start in starts.tolist():
        act(offset + start, offset + start + run, work)
    return segment.bytes[offset : offset + span]
