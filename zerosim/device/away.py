"""Where one buffer's bytes are: on the device, in another memory, or on their way.

    here       on the device, or handed over
    leaving    a copy out is in flight; the bytes here live until compute or the CPU has waited for it
    away       in the host's memory, or in a file on a drive
    arriving   a copy back is in flight

An `Away` knows buffers, memories and streams. A policy decides when bytes leave and come back: that of checkpointed
inputs (`nn/stash.py`) or of saved activations (`nn/saves_on_host.py`).
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from zerosim.device.copies import OFFLOAD, Copying, copy_inline, copy_to_host, launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.placement.memories import DEVICE, HOST


class At(StrEnum):
    HERE, LEAVING, AWAY, ARRIVING = "here", "leaving", "away", "arriving"


class Away:
    """One buffer, and its copies in flight. `buffer` is the newest place of its bytes, whether they have arrived or
    not. Copies that are `inline` run between kernels, so none is ever in flight."""

    __slots__ = ("_flight", "buffer", "inline", "memory", "purpose")

    def __init__(self, buffer: Buffer, *, purpose: str = OFFLOAD, inline: bool = False) -> None:
        self.buffer, self.memory = buffer, buffer.memory
        self.purpose, self.inline = purpose, inline
        self._flight: deque[Copying] = deque()

    @property
    def at(self) -> At:
        if self.memory == DEVICE:
            return At.ARRIVING if self._flight else At.HERE
        return At.LEAVING if self._flight else At.AWAY

    def leave(self, kind: Kind, memory: str = HOST) -> None:
        """Launch the copy out, into a new buffer of `kind`."""
        if self.inline:
            self.buffer, self.memory = copy_to_host(self.buffer, kind, self.purpose), HOST
        else:
            self.launch(self._room(kind, memory))

    def fetch(self, kind: Kind) -> None:
        """Launch the copy to the device, into a new buffer of `kind`."""
        self.launch(self._room(kind, DEVICE))

    def launch(self, into: Buffer) -> None:
        """Launch the copy into an existing buffer."""
        if self.inline:
            copy_inline(self.buffer, into, self.purpose)
        else:
            self._flight.append(launch_copy(self.buffer, into, purpose=self.purpose))
        self.buffer, self.memory = into, into.memory

    def settle(self) -> None:
        """Make compute wait for the copies in flight. Their sources are no longer held."""
        for copy in self._flight:
            copy.wait()
        self._flight.clear()

    def take(self) -> Buffer:
        """Make compute wait for the bytes, and hand over their buffer. Nothing is held here any more."""
        self.settle()
        buffer = self.buffer
        del self.buffer
        return buffer

    def _room(self, kind: Kind, memory: str) -> Buffer:
        return self.buffer.device.alloc(self.buffer.shape, self.buffer.dtype, kind, memory=memory)


class Window:
    """Buffers on their way out, at most `most` of them: one more makes compute wait for the oldest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._leaving: deque[Away] = deque()

    def push(self, one: Away) -> None:
        """Add a buffer whose copy out has been launched."""
        self._leaving.append(one)
        self._keep(self.most)

    def settle(self) -> None:
        """Make compute wait for all of them."""
        self._keep(0)

    def _keep(self, most: int) -> None:
        while len(self._leaving) > most:
            one = self._leaving.popleft()
            if one.at is At.LEAVING:  # it may be on its way back already
                one.settle()
