"""cupy.cuda.memory of the stand-in."""

from cupy._memory import (
    Memory,
    MemoryPointer,
    MemoryPool,
    OutOfMemoryError,
    PooledMemory,
    UnownedMemory,
    alloc,
    using_allocator,
)

__all__ = [
    "Memory", "MemoryPointer", "MemoryPool", "OutOfMemoryError", "PooledMemory", "UnownedMemory", "alloc",
    "using_allocator",
]  # fmt: skip
