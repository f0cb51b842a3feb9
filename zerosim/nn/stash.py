"""Checkpointed inputs on the host, copied in streams of their own: torchtune's activation offloading.

An input leaves for the host when its block's forward begins. Its bytes on the device live until the copy is waited for:
the stash window says how many inputs may be in flight, and one more makes compute wait for the oldest. In backward an
input is copied back while the block above it runs, one block ahead.

torchtune (training/_activation_offloading.py, OffloadActivations: max_fwd_stash_size, 5 by default) has no such list of
what comes next: its copies run beside compute because the host launches ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zerosim.device.copies import Copying, launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import Save
from zerosim.placement.memories import HOST


class Stashed:
    """One input on the host. `part` returns the rank's part of a whole input, the part that was copied."""

    def __init__(self, x: Buffer, part: Callable[[Buffer], Buffer]) -> None:
        own, device = part(x), x.device
        self.shape, self.dtype, self.part = x.shape, x.dtype, part
        device.retag(x, Kind.KEPT)
        self.host: Buffer | None = device.alloc(own.shape, own.dtype, Kind.KEPT, memory=HOST)
        self.leaving: Copying | None = launch_copy(own, self.host)
        self.arriving: tuple[Buffer, Copying] | None = None
        if device.recorder.enabled:  # it takes no bytes of the device for long
            device.recorder.add(Save(device.where, "recompute", "input, on the host", self.host.storage.id, 0))

    def settle(self) -> None:
        """Wait for the copy to the host, and free the bytes on the device."""
        if self.leaving is not None:
            self.leaving.wait()
            self.leaving = None

    def fetch(self) -> None:
        """Launch the copy back into a new buffer, unless it is in flight."""
        if self.arriving is None and self.host is not None:
            self.settle()
            whole = self.host.device.alloc(self.shape, self.dtype, Kind.ACTIVATION)
            self.arriving = whole, launch_copy(self.host, self.part(whole))

    def take(self) -> Buffer:
        """Wait for the copy back, and free the bytes on the host."""
        self.fetch()
        assert self.arriving is not None
        whole, copying = self.arriving
        copying.wait()
        self.arriving = self.host = None
        return whole


class Stash:
    """The stashed inputs of one rank's blocks; at most `window` of them are on their way to the host."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._leaving: deque[Stashed] = deque()
        self._by_slot: dict[int, list[Stashed]] = {}  # by microbatch, in the order of forward

    def put(self, x: Buffer, part: Callable[[Buffer], Buffer]) -> Callable[[], Buffer]:
        """Start to copy a part of x to the host. Return the function that brings it back, into a new whole buffer."""
        slot, stashed = x.device.where.slot, Stashed(x, part)
        self._by_slot.setdefault(slot, []).append(stashed)
        self._leaving.append(stashed)
        while len(self._leaving) > self.window:
            self._leaving.popleft().settle()

        def take() -> Buffer:
            whole = stashed.take()
            below = self._by_slot[slot]
            below.remove(stashed)
            if below:
                below[-1].fetch()
            return whole

        return take

    def forget(self) -> None:
        """Drop inputs that no backward will use."""
        for stashed in self._leaving:
            stashed.settle()
        self._leaving.clear()
        self._by_slot.clear()
