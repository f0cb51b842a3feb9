"""Allocators: options of `memory.py`."""

from __future__ import annotations

from zerosim.config.parts.memory import MemoryConfig


def is_exact(memory: MemoryConfig) -> bool:
    """Return whether a device hands out exactly the requested bytes, which have no addresses."""
    return memory.allocator == "exact"
