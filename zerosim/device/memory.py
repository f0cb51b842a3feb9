"""How a device's capacity is handed out.

`Exact` grants every request that fits into what is left, byte for byte: no rounding, no
fragmentation. The protocol lets a model of a caching or arena allocator refuse, reserve more than
was asked, or fragment.
"""

from __future__ import annotations

from typing import Protocol


class Allocator(Protocol):
    """Grants and takes back bytes, each grant under its id. `capacity` is None for a device without a limit."""

    capacity: int | None

    def reserve(self, id: int, nbytes: int) -> int | None:
        """Bytes reserved for a request of `nbytes`, or None when it does not fit."""

    def release(self, id: int) -> None:
        """Take back what was reserved under that id."""


class Exact:
    """Reserves exactly what is asked while it fits into the capacity."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._granted: dict[int, int] = {}

    def reserve(self, id: int, nbytes: int) -> int | None:
        if self.capacity is not None and self.used_bytes + nbytes > self.capacity:
            return None
        self.used_bytes += nbytes
        self._granted[id] = nbytes
        return nbytes

    def release(self, id: int) -> None:
        self.used_bytes -= self._granted.pop(id)
