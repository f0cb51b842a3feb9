"""Where one buffer's bytes are: on the device, in another memory, or on their way.

    here       on the device, or handed over
    leaving    a copy out is in flight; the bytes here live until compute or the CPU has waited for it
    away       in the host's memory, or in a file on a drive
    arriving   a copy back is in flight

An `Away` knows buffers, memories and streams. A policy decides when bytes leave and come back: that of checkpointed
inputs (`nn/stash.py`), of saved activations (`nn/saves_on_host.py`) or of model states (`parallel/offload.py`).
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from zerosim.device.copies import OFFLOAD, Copying, copy_inline, copy_to_host, launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import COMPUTE
from zerosim.placement.memories import DEVICE, HOST, MEMORIES


class At(StrEnum):
    HERE, LEAVING, AWAY, ARRIVING = "here", "leaving", "away", "arriving"


class Away:
    """One buffer, and its copies in flight. `buffer` is the newest place of its bytes, whether they have arrived or
    not; `padding` of its elements belong to no parameter. Copies that are `inline` run between kernels, so none is ever
    in flight."""

    __slots__ = ("_flight", "buffer", "inline", "memory", "padding", "purpose")

    def __init__(self, buffer: Buffer, *, padding: int = 0, purpose: str = OFFLOAD, inline: bool = False) -> None:
        self.buffer, self.memory = buffer, buffer.memory
        self.padding, self.purpose, self.inline = padding, purpose, inline
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

    def fetch(self, kind: Kind, memory: str = DEVICE, *, after: str = COMPUTE) -> None:
        """Launch the copy to a nearer memory, into a new buffer of `kind`, unless the bytes are there or on their way
        there."""
        if MEMORIES.index(self.memory) > MEMORIES.index(memory):
            self._follow(memory)
            self._launch(self._room(kind, memory), after)

    def launch(self, into: Buffer, *, after: str = "") -> None:
        """Launch the copy into an existing buffer, after the earlier work of a stream or, without `after`, of compute
        and the copy in flight."""
        if not after:
            self._follow(into.memory)
        self._launch(into, after or COMPUTE)

    def wait(self, by: str = COMPUTE) -> Buffer:
        """Let compute, the host's CPU or a stream wait for the newest copy. Return its buffer, which is held here."""
        self._flight[-1].wait(by)
        return self.buffer

    def settle(self, by: str = COMPUTE) -> None:
        """Make compute or the host's CPU wait for the copies in flight. Their sources are no longer held."""
        for copy in self._flight:
            copy.wait(by)
        self._flight.clear()

    def release(self) -> None:
        """Let go of the sources of copies in flight. Whatever takes their bytes must follow the copy in its stream."""
        for copy in self._flight:
            copy.release()

    def take(self) -> Buffer:
        """Make compute wait for the bytes, and hand over their buffer. Nothing is held here any more."""
        self.settle()
        buffer = self.buffer
        del self.buffer
        return buffer

    def _follow(self, memory: str) -> None:
        """Let the stream to that memory wait for the copy in flight."""
        if self._flight:
            self._flight[-1].wait(f"{self.memory} to {memory}")

    def _launch(self, into: Buffer, after: str) -> None:
        if self.inline:
            copy_inline(self.buffer, into, self.purpose)
        else:
            self._flight.append(launch_copy(self.buffer, into, after=after, purpose=self.purpose))
        self.buffer, self.memory = into, into.memory

    def _room(self, kind: Kind, memory: str) -> Buffer:
        like = self.buffer
        return like.device.alloc(like.shape, like.dtype, kind, padding=self.padding, memory=memory)


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
