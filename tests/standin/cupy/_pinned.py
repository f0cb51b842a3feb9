"""Host memory: page-locked blocks, which asynchronous copies want, and bytes at a bare address.

As CuPy's pool does it, a block is of a power of two of bytes, and is handed out again as soon as the program has
dropped it, whether or not a copy from or to it is still under way.

Source: cupy/cuda/pinned_memory.pyx (PinnedMemoryPool).
"""

from __future__ import annotations

import ctypes
from weakref import finalize

import numpy as np

from cupy._segments import UNIT
from cupy._state import LOCK


class PinnedMemoryPointer(np.ndarray):
    """Page-locked host memory: np.frombuffer takes it, `.ptr` is its address."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


_pinned: dict[int, np.ndarray] = {}  # every block by its address, whoever holds it
_free: dict[int, list[np.ndarray]] = {}  # by size


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    nbytes = max(UNIT, 1 << (size - 1).bit_length())
    with LOCK:
        free = _free.setdefault(nbytes, [])
        block = free.pop() if free else np.zeros(nbytes, np.uint8)
        _pinned[block.ctypes.data] = block
    memory = block.view(PinnedMemoryPointer)
    finalize(memory, free.append, block).atexit = False
    return memory


def pinned(ptr: int, nbytes: int) -> np.ndarray | None:
    """The pinned bytes at ptr, or None where they are pageable."""
    with LOCK:
        for base, block in _pinned.items():
            if base <= ptr and ptr + nbytes <= base + block.nbytes:
                return block[ptr - base : ptr - base + nbytes]
    return None


def host_bytes(ptr: int, nbytes: int) -> np.ndarray:
    """A copy of the bytes at an address. A view owns no memory: printed later, in a test's report, it could crash."""
    return np.frombuffer(ctypes.string_at(ptr, nbytes), np.uint8)
