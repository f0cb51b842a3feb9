"""How a device's capacity is handed out: what an allocator is, and the plainest one.

`Exact` grants every request that fits into what is left, byte for byte: no rounding, no
fragmentation. The others (`allocators/`) refuse, reserve more than was asked, or fragment, as real ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zerosim.device.events import Move, Segment
from zerosim.errors import Room

News = tuple[type[Segment], tuple[int, int]] | tuple[type[Move], tuple[int, int, int, int]]
"""An event without its scope: what an allocator did to grant a request."""


class Allocator(Protocol):
    """Grants and takes back bytes, each grant under its id. `capacity` is None for a device without a limit."""

    capacity: int | None

    @property
    def news(self) -> Sequence[News]:
        """What it did besides granting since it was last told to `forget`."""

    def forget(self) -> None:
        """The news are in the record."""

    def reserve(self, id: int, nbytes: int) -> int | None:
        """Bytes reserved for a request of `nbytes`, or None when it does not fit."""

    def release(self, id: int) -> None:
        """Take back what was reserved under that id."""

    def room(self, nbytes: int) -> Room | None:
        """Of a request that was refused; None where the capacity alone says why."""


class Exact:
    """Reserves exactly what is asked while it fits into the capacity."""

    news: Sequence[News] = ()

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._granted: dict[int, int] = {}

    def forget(self) -> None:
        """There are never any news."""

    def reserve(self, id: int, nbytes: int) -> int | None:
        if self.capacity is not None and self.used_bytes + nbytes > self.capacity:
            return None
        self.used_bytes += nbytes
        self._granted[id] = nbytes
        return nbytes

    def release(self, id: int) -> None:
        self.used_bytes -= self._granted.pop(id)

    def room(self, nbytes: int) -> Room | None:
        return None
