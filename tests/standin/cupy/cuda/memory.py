"""cupy.cuda.memory of the stand-in."""

from cupy._memory import MemoryPointer, MemoryPool, OutOfMemoryError, PooledMemory, alloc, using_allocator

__all__ = ["MemoryPointer", "MemoryPool", "OutOfMemoryError", "PooledMemory", "alloc", "using_allocator"]
