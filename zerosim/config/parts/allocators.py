"""Allocators: options of `memory.py`."""

from __future__ import annotations

from zerosim.config.allocator import arena_knobs, caching_knobs, pairs
from zerosim.config.parts.memory import MemoryConfig


def is_exact(memory: MemoryConfig) -> bool:
    """Return whether a device hands out exactly the requested bytes, which have no addresses."""
    return memory.allocator == "exact"


def feels_limit(memory: MemoryConfig) -> bool:
    """Return whether a device's bytes depend on its limit: another allocator then gives back what it keeps, and paged
    states move out."""
    return memory.paged_states or not is_exact(memory)


def shares_with_pages(memory: MemoryConfig) -> bool:
    """Return whether a device's bytes depend on its pages: they move out at a limit, and another allocator competes
    with them for the driver's memory."""
    return memory.paged_states and (memory.capacity is not None or not is_exact(memory))


def with_addresses(memory: MemoryConfig) -> tuple[str, str | None]:
    """Return an allocator that chooses addresses, and its settings: the caching one in place of an exact one."""
    return "caching" if is_exact(memory) else memory.allocator, memory.allocator_conf


def without_fragmentation(memory: MemoryConfig) -> str | None:
    """Return the same knobs with the one against fragmentation turned on; None if it already is, or there is none."""
    text = memory.allocator_conf
    if memory.allocator == "caching" and not caching_knobs(text).expandable_segments:
        key = "expandable_segments"
    elif memory.allocator == "arena" and not arena_knobs(text).defragment:
        key = "defragment"
    else:
        return None
    return ",".join([pair for pair in pairs(text or "") if not pair.startswith(key)] + [f"{key}:True"])
