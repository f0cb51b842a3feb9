"""A block's saved buffers in the host's memory: torchtune's activation offloading without recompute.

A buffer leaves for the host when an op saves it, in a stream beside compute. Its bytes on the device live until the
copy is waited for and the block's forward is over: the stash window says how many copies may be in flight, and one more
makes compute wait for the oldest. In backward a block's buffers come back, while the block above it computes. So the
device has the saved buffers of one block, of the next one, and of the window.

    in forward     save: copy out ...  block's end: the device's bytes go, the handles point at the host's
    in backward    copy back ...  block's backward: the handles point at new bytes on the device

Small buffers stay (MIN_BYTES, torchtune's min_offload_size), and so do views of a part of a buffer, token ids, and what
tables, the last norm and the head save, which backward reads first.

Source: torchtune, training/_activation_offloading.py (OffloadActivations); PyTorch, torch.autograd.graph.save_on_cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from zerosim.device.away import At, Away, Window
from zerosim.device.copies import SAVES
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import COMPUTE
from zerosim.nn.unit import Unit
from zerosim.placement.memories import DEVICE
from zerosim.tensor.tensor import Tensor

MIN_BYTES = 1024


class OnHost(Away):
    """One storage that ops have saved, and the handles that they have of it."""

    __slots__ = ("handles", "is_block_over")

    def __init__(self, saved: Buffer) -> None:
        super().__init__(Buffer(saved.storage, saved.array, saved.dtype), purpose=SAVES)
        self.handles = [saved]
        self.is_block_over = False
        self.leave(Kind.ACTIVATION)

    def settle(self, by: str = COMPUTE) -> None:
        """Make compute wait for the copy in flight. After the copy out, the device's bytes go if the block is over."""
        super().settle(by)
        self._free()

    def end(self) -> None:
        """End the block's forward."""
        self.is_block_over = True
        self._free()

    def prefetch(self) -> None:
        """Launch the copy back, unless it is in flight."""
        if self.at is not At.ARRIVING:
            self.settle()
            self.fetch(Kind.ACTIVATION)

    def bring_back(self) -> None:
        """Wait for the copy back, and free the bytes on the host."""
        self.prefetch()
        self._point_at(self.take())
        self.handles.clear()  # the window may know this object for longer than ops need the buffer

    def _free(self) -> None:
        if self.is_block_over and self.at is At.AWAY:
            self._point_at(self.buffer)

    def _point_at(self, there: Buffer) -> None:
        for handle in self.handles:
            handle.storage, handle.array = there.storage, there.array.reshape(handle.shape)


class SavesOnHost:
    """The saved buffers of one rank's blocks; at most `window` of them are on their way to the host."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._leaving = Window(window)
        self._blocks: dict[int, list[dict[int, OnHost]]] = {}  # by microbatch in the order of forward, by storage

    def begin(self, slot: int) -> Callable[[Iterable[object]], None]:
        """Begin a block's forward. Return the function that takes what its ops save."""
        block: dict[int, OnHost] = {}
        self._blocks.setdefault(slot, []).append(block)

        def save(values: Iterable[object]) -> None:
            for value in values:
                buffer = value.buffer if isinstance(value, Tensor) else value
                if isinstance(buffer, Buffer) and _may_leave(buffer):
                    self._put(block, buffer)

        return save

    def _put(self, block: dict[int, OnHost], saved: Buffer) -> None:
        there = block.get(saved.storage.id)
        if there is not None:
            if all(saved is not handle for handle in there.handles):
                there.handles.append(saved)
            return
        block[saved.storage.id] = one = OnHost(saved)
        self._leaving.push(one)

    def end(self, slot: int) -> None:
        """End the block's forward."""
        for one in self._blocks[slot][-1].values():
            one.end()

    def bring_back(self, slot: int) -> None:
        """Begin a block's backward: bring its buffers to the device, and prefetch those of the block below."""
        blocks = self._blocks[slot]
        for one in blocks.pop().values():
            one.bring_back()
        if blocks and self.window:
            for one in blocks[-1].values():
                one.prefetch()

    def forget(self) -> None:
        """Drop buffers that no backward will use."""
        self._leaving.settle()
        self._blocks.clear()


def _may_leave(buffer: Buffer) -> bool:
    """Return whether it is all of a storage on the device, is large enough, and holds no token ids."""
    whole = buffer.storage.array.nbytes == buffer.nbytes and buffer.array.flags.c_contiguous
    return buffer.memory == DEVICE and whole and buffer.nbytes >= MIN_BYTES and buffer.dtype.name != "int64"


class OffloadsSaves(Unit):
    """A unit around a block, whose saved buffers wait on the host."""

    def __init__(self, unit: Unit, saves: SavesOnHost) -> None:
        super().__init__(unit.name, unit, unit.function, reduces=unit.reduces)
        self.unit = unit
        self.saves = saves

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        super().reach(sends_back, trained)
        self.unit.reach(sends_back, trained)

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        device = x.device
        if not device.grad_enabled or not self.goes_back:
            return self.unit.forward(x, slot, function)
        with device.saving(self.saves.begin(slot)):
            y = self.unit.forward(x, slot, function)
        self.saves.end(slot)
        return y

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        self.saves.bring_back(slot)
        self.unit.backward(grads, slot, defers=defers)

    def backward_weights(self, slot: int = 0) -> None:
        self.unit.backward_weights(slot)

    def forget(self) -> None:
        """Drop graphs, and buffers, that no backward will use."""
        self.unit.forget()
        self.saves.forget()
