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
    """A paged buffer, while somebody holds it. As with a pointer to unified memory the handle stays, and its storage is
    another one after a move. `unit` and `padding` are recorded with each move."""

    handle: ref[Buffer]
    unit: str
    padding: int

    def is_in(self, memory: str) -> bool:
        buffer = self.handle()
        return buffer is not None and buffer.memory == memory

    @property
    def nbytes(self) -> int:
        buffer = self.handle()
        return 0 if buffer is None else buffer.nbytes

    def move(self, memory: str) -> None:
        """Copy the bytes to that memory. Raises: OutOfMemory, Aborted."""
        buffer = self.handle()
        assert buffer is not None
        device = buffer.device
        with device.scope(unit=self.unit):
            new = device.alloc(
                buffer.shape, buffer.dtype, Kind.OPTIM, padding=self.padding, memory=memory, paged=memory == DEVICE
            )
            launch_copy(buffer, new, purpose=PAGES).wait()
            buffer.storage, buffer.array = new.storage, new.array
            device.recorder.settle()


class Pages:
    """One device's paged buffers. Those in use stay on the device until `done`; views of others must not be held."""

    def __init__(self) -> None:
        self._all: list[_Paged] = []  # the least recently used first
        self._in_use = 0  # the last ones

    def add(self, buffer: Buffer, padding: int = 0) -> None:
        """Add a buffer of the device, which may move from now on."""
        device = buffer.device
        device.share(self)
        self._all.append(_Paged(ref(buffer), device.where.unit, padding))

    def use(self, buffers: Collection[Buffer]) -> None:
        """Bring the paged ones of these buffers to the device. Raises: OutOfMemory if there is no room."""
        used = [one for one in self._all if one.handle() in buffers]
        self._all = [one for one in self._all if one not in used] + used
        self._in_use = len(used)
        for one in used:
            if not one.is_in(DEVICE):
                one.move(DEVICE)

    def done(self) -> None:
        """Let the buffers in use move again."""
        self._in_use = 0

    def move_out(self) -> bool:
        """Move the least recently used buffer to the host. Return False if no buffer can move."""
        for one in self._all[: len(self._all) - self._in_use]:
            if one.is_in(DEVICE):
                one.move(HOST)
                return True
        return False

    def __str__(self) -> str:
        out = sum(one.nbytes for one in self._all if one.is_in(HOST))
        total = sum(one.nbytes for one in self._all)
        return f"{format_bytes(out)} of {format_bytes(total)} paged states are in host memory"
