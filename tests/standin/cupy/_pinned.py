"""Host memory: page-locked blocks, which asynchronous copies want, and bytes at a bare address."""

from __future__ import annotations

import ctypes
from weakref import WeakValueDictionary

import numpy as np

from cupy._segments import UNIT
from cupy._state import LOCK


class PinnedMemoryPointer(np.ndarray):
    """Page-locked host memory: np.frombuffer takes it, `.ptr` is its address."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


_pinned: WeakValueDictionary[int, PinnedMemoryPointer] = WeakValueDictionary()


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    memory = np.zeros(-(-size // UNIT) * UNIT, np.uint8).view(PinnedMemoryPointer)
    with LOCK:
        _pinned[memory.ptr] = memory
    return memory


def pinned(ptr: int, nbytes: int) -> np.ndarray | None:
    """The pinned bytes at ptr, or None where they are pageable."""
    with LOCK:
        for base, held in _pinned.items():
            if base <= ptr and ptr + nbytes <= base + held.nbytes:
                return held[ptr - base : ptr - base + nbytes]
    return None


def host_bytes(ptr: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(ptr, ctypes.POINTER(ctypes.c_uint8)), (max(nbytes, 1),))[:nbytes]
