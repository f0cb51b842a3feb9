"""cupy.cuda of the stand-in."""

from __future__ import annotations

from typing import Any

from cupy._memory import Memory, MemoryPointer, MemoryPool, UnownedMemory, alloc, using_allocator
from cupy._pinned import alloc_pinned_memory
from cupy._state import absent
from cupy.cuda import device, memory, nccl, runtime, stream
from cupy.cuda.device import Device
from cupy.cuda.graph import Graph
from cupy.cuda.stream import Event, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device",
    "Event",
    "Graph",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_current_stream",
    "get_elapsed_time",
    "is_available",
    "memory",
    "nccl",
    "runtime",
    "stream",
    "using_allocator",
]


def is_available() -> bool:
    return runtime.getDeviceCount() > 0


def __getattr__(name: str) -> Any:
    raise absent("cupy.cuda", name)
