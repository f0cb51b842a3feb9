"""Make the allocator that a configuration names."""

from __future__ import annotations

from zerosim.config.allocator import NAMES, arena_knobs, caching_knobs
from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.memory import Exact
from zerosim.errors import wrong


def make_allocator(name: str, capacity: int | None, conf: str | None = None) -> Exact | CachingAllocator | Arena:
    """Make the allocator 'exact', 'caching' or 'arena', with the settings of `conf` (`config/allocator.py`).

    Raises: InputError for an unknown name or knob, and for an arena without a capacity.
    """
    if name == "exact":
        return Exact(capacity)
    if name == "caching":
        return CachingAllocator(capacity, caching_knobs(conf))
    if name != "arena":
        raise wrong("allocator", f" {name!r}: expected one of {', '.join(NAMES)}")
    if capacity is None:
        raise wrong("allocator", " 'arena': needs the size of its one region; pass --capacity, such as 32GB")
    return Arena(capacity, arena_knobs(conf))
