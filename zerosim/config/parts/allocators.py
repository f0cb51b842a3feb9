"""Allocators: options of `memory.py`."""

from __future__ import annotations

from zerosim.config.allocator import without_fragmentation
from zerosim.config.parts.memory import MemoryConfig


def is_exact(memory: MemoryConfig) -> bool:
    """Return whether a device hands out exactly the requested bytes, which have no addresses."""
    return memory.allocator == "exact"


def less_fragmented(memory: MemoryConfig) -> str | None:
    """Return the allocator's settings with the one against fragmentation turned on; None if that changes nothing."""
    return without_fragmentation(memory.allocator, memory.allocator_conf)
