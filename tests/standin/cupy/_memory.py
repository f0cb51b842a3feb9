"""CuPy's memory pool: sizes round up to 512 bytes, an arena per stream, best fit, split and merge.

Source: cupy/cuda/memory.pyx (SingleDeviceMemoryPool).
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from cupy._clock import current_stream, wait_device
from cupy._segments import DROPPED, ENDED, FREED, UNIT, Chunk, Segment, add, device_used, put_back, remove
from cupy._state import LOCK, MACHINE, THREAD, refuse_in_capture


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""

    def __init__(self, size: int, total: int) -> None:
        self._size, self._total = size, total
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Memory:
    """One cudaMalloc, for a pool that asks its program for memory."""

    def __init__(self, size: int) -> None:
        refuse_in_capture("cudaMalloc")
        with LOCK:
            put_back()
            if device_used(THREAD.device) + size > MACHINE.device_bytes:
                raise OutOfMemoryError(size, device_used(THREAD.device))
            self.segment = Segment(THREAD.device, size, is_plain=True)
            add(self.segment)
        self.size, self.device_id, self.ptr = size, THREAD.device, self.segment.base
        self.is_pooled = False

    def __del__(self) -> None:
        if FREED is not None and hasattr(self, "is_pooled") and not self.is_pooled:
            FREED.append(self.segment)


class UnownedMemory:
    """Memory that somebody else keeps."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.device_id = ptr, size, THREAD.device if device_id == -1 else device_id


class PooledMemory:
    """Holds one chunk for as long as it lives."""

    def __init__(self, pool: MemoryPool, chunk: Chunk | None, device: int, size: int) -> None:
        self._pool, self._chunk = pool, chunk
        self.device_id, self.size = device, size
        self.ptr = 0 if chunk is None else chunk.segment.base + chunk.offset

    def __del__(self) -> None:
        if self._chunk is not None:
            DROPPED.append((self._pool, self._chunk))


class MemoryPointer:
    def __init__(self, mem: PooledMemory | Memory | UnownedMemory, offset: int) -> None:
        self.mem = mem
        self.device_id = mem.device_id
        self.ptr = mem.ptr + offset if mem.ptr else 0
        self._offset = offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self._offset + offset)


class MemoryPool:
    """As cupy.cuda.MemoryPool: sizes are those of the current device."""

    def __init__(self, allocator: Any = None) -> None:
        self._allocator = allocator
        self._free: dict[tuple[int, int], list[Chunk]] = {}
        self._used: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def __del__(self) -> None:
        """Free chunks and their arena hold one another in CuPy 14: a dropped pool's memory is never cudaFree'd."""
        if ENDED is not None:  # the interpreter is not going down
            ENDED.extend(chunk.segment for free in self._free.values() for chunk in free if chunk.offset == 0)

    def malloc(self, size: int) -> MemoryPointer:
        device = THREAD.device
        if size == 0:
            return MemoryPointer(PooledMemory(self, None, device, 0), 0)
        asked, size = size, -(-size // UNIT) * UNIT
        with LOCK:
            put_back()
            stream = current_stream().ptr
            free = self._free.setdefault((device, stream), [])
            fits = [chunk for chunk in free if chunk.size >= size]
            if fits:
                chunk = min(fits, key=lambda chunk: (chunk.size, chunk.segment.base, chunk.offset))
                free.remove(chunk)
                if chunk.size > size:
                    rest = Chunk(chunk.segment, chunk.offset + size, chunk.size - size, stream)
                    chunk.size = size
                    insort(chunk.segment.chunks, rest)
                    free.append(rest)
            else:
                chunk = self._grow(device, stream, size)
            chunk.held, chunk.asked = True, asked
            if not chunk.segment.is_plain:
                chunk.segment.bytes[chunk.offset + asked : chunk.offset + size] = 0xFF
            self._used[device] = self._used.get(device, 0) + size
            return MemoryPointer(PooledMemory(self, chunk, device, size), 0)

    def _grow(self, device: int, stream: int, size: int) -> Chunk:
        try:
            segment = self._new_segment(device, size)
        except OutOfMemoryError:
            self.free_all_blocks()
            segment = self._new_segment(device, size)
        chunk = Chunk(segment, 0, size, stream)
        segment.chunks.append(chunk)
        self._total[device] = self._total.get(device, 0) + size
        return chunk

    def _new_segment(self, device: int, size: int) -> Segment:
        if self._allocator is not None:
            memory: Memory = self._allocator(size).mem
            memory.is_pooled = True
            return memory.segment
        refuse_in_capture("cudaMalloc")
        if self._refused(device, size):
            raise OutOfMemoryError(size, self._total.get(device, 0))
        segment = Segment(device, size)
        add(segment)
        return segment

    def _refused(self, device: int, size: int) -> bool:
        return device_used(device) + size > MACHINE.device_bytes

    def _release(self, chunk: Chunk) -> None:
        segment = chunk.segment
        self._used[segment.device] -= chunk.size
        chunk.held = False
        free = self._free.setdefault((segment.device, chunk.stream), [])
        free.append(chunk)
        index = segment.chunks.index(chunk)
        for first, second in ((index, index + 1), (index - 1, index)):
            if first >= 0 and second < len(segment.chunks):
                a, b = segment.chunks[first], segment.chunks[second]
                if not a.held and not b.held:
                    a.size += b.size
                    segment.chunks.remove(b)
                    free.remove(b)

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give the current device's whole free segments back; cudaFree waits for it, and is counted as such."""
        with LOCK:
            put_back()
            for (device, ptr), free in self._free.items():
                if device != THREAD.device or (stream is not None and ptr != stream.ptr):
                    continue
                for chunk in [chunk for chunk in free if chunk.size == chunk.segment.size]:
                    wait_device(device, "cudaFree")
                    free.remove(chunk)
                    remove(chunk.segment)
                    self._total[device] -= chunk.size

    def used_bytes(self) -> int:
        with LOCK:
            put_back()
            return self._used.get(THREAD.device, 0)

    def total_bytes(self) -> int:
        with LOCK:
            put_back()
            return self._total.get(THREAD.device, 0)

    def free_bytes(self) -> int:
        return self.total_bytes() - self.used_bytes()


DEFAULT_POOL = MemoryPool()


def alloc(size: int) -> MemoryPointer:
    return (THREAD.allocators[-1] if THREAD.allocators else DEFAULT_POOL.malloc)(size)


class using_allocator:
    """`with using_allocator(pool.malloc):`, for this thread."""

    def __init__(self, allocator: Any = None) -> None:
        self._allocator = allocator or DEFAULT_POOL.malloc

    def __enter__(self) -> None:
        THREAD.allocators.append(self._allocator)

    def __exit__(self, *_: Any) -> None:
        THREAD.allocators.pop()
