"""Checkpointed inputs on the host, copied in streams of their own: torchtune's activation offloading. Without a window
they are copied inline, as DeepSpeed copies them.

An input leaves for the host when its block's forward begins. Its bytes on the device live until the copy is waited for:
the stash window says how many inputs may be in flight, and one more makes compute wait for the oldest. In backward an
input is copied back while the block above it runs, one block ahead.

torchtune (training/_activation_offloading.py, OffloadActivations: max_fwd_stash_size, 5 by default) has no such list of
what comes next: its copies run beside compute because the host launches ahead of the device.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.device.away import Away, Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import Save


class Stashed(Away):
    """One input on the host. `part` returns the rank's part of a whole input, the part that is copied."""

    __slots__ = ("part", "shape", "whole")

    def __init__(self, x: Buffer, part: Callable[[Buffer], Buffer], *, inline: bool) -> None:
        super().__init__(part(x), inline=inline)
        self.shape, self.part = x.shape, part
        self.whole: Buffer | None = None
        device = x.device
        if not inline:
            device.retag(x, Kind.KEPT)
        self.leave(Kind.KEPT)
        if device.recorder.enabled:  # it takes no bytes of the device for long
            device.recorder.add(Save(device.where, "recompute", "input, on the host", self.buffer.storage.id, 0))

    def prefetch(self) -> None:
        """Launch the copy back into a new whole buffer, unless it is in flight."""
        if self.whole is None:
            self.settle()
            self.whole = self.buffer.device.alloc(self.shape, self.buffer.dtype, Kind.ACTIVATION)
            self.launch(self.part(self.whole))

    def bring_back(self) -> Buffer:
        """Wait for the copy back, and free the bytes on the host. Return the whole buffer."""
        self.prefetch()
        self.take()
        whole, self.whole = self.whole, None
        assert whole is not None
        return whole


class Stash:
    """The stashed inputs of one rank's blocks. At most `window` of them are on their way to the host. Without a window
    copies run inline."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._leaving = Window(window)
        self._by_slot: dict[int, list[Stashed]] = {}  # by microbatch, in the order of forward

    def put(self, x: Buffer, part: Callable[[Buffer], Buffer]) -> Callable[[], Buffer]:
        """Start to copy a part of x to the host. Return the function that brings it back, into a new whole buffer."""
        slot, stashed = x.device.where.slot, Stashed(x, part, inline=not self.window)
        self._by_slot.setdefault(slot, []).append(stashed)
        self._leaving.push(stashed)

        def bring_back() -> Buffer:
            whole = stashed.bring_back()
            below = self._by_slot[slot]
            below.remove(stashed)
            if below and self.window:
                below[-1].prefetch()
            return whole

        return bring_back

    def forget(self) -> None:
        """Drop inputs that no backward will use."""
        self._leaving.settle()
        self._by_slot.clear()
