"""A memory's capacity: the allocator protocol, the simplest allocator, and a rank's memories.

`Exact` grants every request that fits into the free bytes, byte for byte: no rounding, no
fragmentation. The others (`allocators/`) refuse, reserve more than requested, or fragment, as real ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from zerosim.backends.kernels import Array, Backend
from zerosim.device.events import Move, Segment
from zerosim.dtypes import DType
from zerosim.errors import Room
from zerosim.placement.memories import DEVICE, MEMORIES

Change = tuple[type[Segment], tuple[int, int]] | tuple[type[Move], tuple[int, int, int, int]]
"""An event without its scope: an allocator's action for a request."""


class Allocator(Protocol):
    """An allocator grants and takes back bytes, each grant under its id. `capacity` is None for a device without a
    limit."""

    capacity: int | None

    @property
    def changes(self) -> Sequence[Change]:
        """Its actions besides granting since the last `forget`."""

    def forget(self) -> None:
        """Forget the changes, after they were recorded."""

    def reserve(self, id: int, nbytes: int) -> int | None:
        """Reserve bytes for a request of `nbytes`, and return their number; None if it does not fit."""

    def release(self, id: int) -> None:
        """Take back the bytes reserved under that id."""

    def room(self, nbytes: int) -> Room | None:
        """Return the free memory at a refused request; None if the capacity alone explains the refusal."""


class Exact:
    """Reserves exactly the requested bytes while they fit into the capacity."""

    changes: Sequence[Change] = ()

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._granted: dict[int, int] = {}

    def forget(self) -> None:
        """Do nothing: this allocator has no changes."""

    def reserve(self, id: int, nbytes: int) -> int | None:
        if not self.fits(nbytes):
            return None
        self.used_bytes += nbytes
        self._granted[id] = nbytes
        return nbytes

    def fits(self, nbytes: int) -> bool:
        return self.capacity is None or self.used_bytes + nbytes <= self.capacity

    def release(self, id: int) -> None:
        self.used_bytes -= self._granted.pop(id)

    def room(self, nbytes: int) -> Room | None:
        return None


@runtime_checkable
class HasArrays(Protocol):
    """An allocator whose memory has special arrays, such as files (`device/nvme.py`)."""

    def array(self, id: int, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return the array of a granted request."""
        ...


class MovesOut(Protocol):
    """What a full device may move out of its memory (`paging.py`)."""

    def move_out(self) -> bool:
        """Move some bytes out. Return False if there are none left that can move."""


@runtime_checkable
class BesidePages(Protocol):
    """An allocator that keeps freed memory, which the driver's pages cannot take."""

    def share(self, pages: MovesOut) -> None:
        """Let pages move out before the device has no memory for the allocator."""

    def reserve_pages(self, id: int, nbytes: int) -> int | None:
        """Reserve bytes of the driver for pages, as `reserve` does."""


class Memories:
    """A rank's memories by name: the device's, with its `allocator`, and its rights to its node's host memory and
    drives (`node.py`), `Exact` without a limit unless `others` says otherwise."""

    def __init__(self, allocator: Allocator, others: Mapping[str, Allocator]) -> None:
        plain = {name: Exact() for name in MEMORIES if name != DEVICE}
        self.allocators: Mapping[str, Allocator] = {DEVICE: allocator, **plain, **others}
        self._with_arrays = {name: one for name, one in self.allocators.items() if isinstance(one, HasArrays)}

    def release(self, id: int, memory: str) -> None:
        """Take back the bytes reserved in that memory under that id."""
        self.allocators[memory].release(id)

    def empty(self, memory: str, id: int, shape: tuple[int, ...], dtype: DType, backend: Backend) -> Array:
        """Return the array of a granted buffer. NumPy's arrays are in the host's memory; those of shapes are
        nowhere."""
        own = self._with_arrays.get(memory)
        return backend.empty(shape, dtype) if own is None else own.array(id, shape, dtype)
