"""Paged buffers: CUDA's unified memory, whose pages the driver moves between the device and the host on demand.

Nothing moves while the device has room. Where an allocation does not fit, the least recently used buffers move to the
host, until it fits. A buffer comes back before its next use, which may move others out. Compute waits for each copy.

The driver moves pages of 64 KiB to 2 MiB, here whole buffers move: a use needs room for all of its own.

Source: bitsandbytes 0.50, optim/optimizer.py (get_state_buffer, prefetch_state), functional.py (get_paged).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from weakref import ref

from zerosim.device.copies import PAGES, launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.placement.memories import DEVICE, HOST
from zerosim.units import format_bytes


class _Paged(NamedTuple):
    """A paged buffer, while somebody holds it. As with a pointer to unified memory the handle stays, and has another
    storage after a move. `unit` and `padding` are recorded with each move."""

    handle: ref[Buffer]
    unit: str
    padding: int

    def move(self, memory: str) -> bool:
        """Copy the bytes to that memory. Return False if they are there. Raises: OutOfMemory, Aborted."""
        buffer = self.handle()
        if buffer is None or buffer.memory == memory:
            return False
        device, paged = buffer.device, memory == DEVICE
        with device.scope(unit=self.unit):
            how = (buffer.shape, buffer.dtype, Kind.OPTIM)
            new = device.alloc(*how, padding=self.padding, memory=memory, paged=paged)
            launch_copy(buffer, new, purpose=PAGES).wait()
            buffer.storage, buffer.array = new.storage, new.array
            device.recorder.settle()
        return True


class Pages:
    """One device's paged buffers. Those in use stay on the device. Nobody may hold views of others."""

    def __init__(self) -> None:
        self._all: list[_Paged] = []  # the least recently used first
        self._in_use = 0  # the last ones

    def add(self, buffer: Buffer, padding: int = 0) -> None:
        """Add a buffer of the device, which may move from now on."""
        buffer.device.share(self)
        self._all.append(_Paged(ref(buffer), buffer.device.where.unit, padding))

    def use(self, buffers: Collection[Buffer]) -> None:
        """Bring the paged ones of these buffers to the device, where they stay until the next call.

        Raises: OutOfMemory if there is no room.
        """
        used = [one for one in self._all if one.handle() in buffers]
        self._all, self._in_use = [one for one in self._all if one not in used] + used, len(used)
        for one in used:
            one.move(DEVICE)

    def move_out(self) -> bool:
        """Move the least recently used buffer to the host. Return False if no buffer can move."""
        return any(one.move(HOST) for one in self._all[: len(self._all) - self._in_use])

    def __str__(self) -> str:
        held = [buffer for one in self._all if (buffer := one.handle()) is not None]
        out = sum(buffer.nbytes for buffer in held if buffer.memory == HOST)
        return f"{format_bytes(out)} of {format_bytes(sum(b.nbytes for b in held))} paged states are in host memory"
