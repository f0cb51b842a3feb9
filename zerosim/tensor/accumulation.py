"""One unit's gradients on one rank: collected weight by weight in a microbatch, then stored, whole or as a slice.

    grad_whole   gradients stored whole (DDP, ZeRO-1), summed over microbatches
    collector    the gradient of the current microbatch and, at ZeRO stages that store a slice, the sum of those that
                 are not reduced (ZeRO-2 and 3 without sync)
    grad_shard   the local slice of the reduced gradient (ZeRO-2 and 3: summed over microbatches)

Backward writes each gradient into its window of the collector's `grad`; a strategy takes the finished buffer at
`post_backward`, reduces it, and stores what its ZeRO stage stores. A `GradMemory` says where frameworks do otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.config.parts.grads import GradMemory
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.placement.memories import DEVICE
from zerosim.placement.partition import Slice, nothing
from zerosim.placement.rows import Held, Row
from zerosim.placement.spec import FlatSpec, WeightSpec, is_block
from zerosim.tensor.collector import Collector
from zerosim.tensor.dummy_grads import DummyGrads
from zerosim.tensor.sums import GradProbe, accumulate, added


class GradAccumulator:
    """The gradients of one flat buffer, in the layout of `spec`; `own` is the slice that this rank stores.

    They are stored and sent in `grad_dtype`, and computed in the collector's. `how`: other fields of its `FlatSpec`.
    """

    def __init__(self, name: str, device: Device, grad_dtype: DType, module: str = "", **how: Any) -> None:
        self.name = name
        self._fields: dict[str, Any] = {"name": name, "weights": list[WeightSpec](), "module": module, **how}
        self.device = device
        self.grad_dtype = grad_dtype
        self.held = Held(nothing(0), 0)  # it has no place in a layout yet
        self.collector = Collector(grad_dtype)
        self.grad_whole: Buffer | None = None
        self.grad_shard: Buffer | None = None

    @cached_property
    def spec(self) -> FlatSpec:
        """The weights declared so far, and where each one lies."""
        return FlatSpec(**self._fields | {"weights": tuple(self._fields["weights"])})

    @property
    def numel(self) -> int:
        """Elements of the buffer, gaps between its weights included."""
        return self.spec.numel

    @property
    def own(self) -> Slice:
        """The slice that this rank updates."""
        return self.held.own

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.held.padded_numel

    @property
    def own_padding(self) -> int:
        """How many elements of the local slice belong to no weight."""
        return self.spec.padding(self.held.own)

    def window(self, whole: Buffer, index: int) -> Buffer:
        """Return the window of parameter `index` in a buffer of this layout, in its own shape."""
        weight, offset = self.spec.weights[index], self.spec.offsets[index]
        return whole[offset : offset + weight.numel].reshape(*weight.shape)

    def own_window(self, whole: Buffer) -> Buffer:
        """Return the local shard of a buffer of this layout."""
        return whole[self.own.start : self.own.stop]

    @property
    def adds_at_once(self) -> bool:
        """Whether each weight's gradient is added to a permanent whole buffer as soon as it is computed."""
        return self.collector.stays_whole and self.collector.lasting is not None

    def place_grads(
        self,
        row: Row,
        memory: GradMemory,
        param_dtype: DType,
        *,
        probes: bool,
        dummies: DummyGrads | None = None,
    ) -> None:
        """Set how gradients are stored, before the first step: a permanent buffer if they have one, and whether a
        GradProbe checks them. `dummies`: the rank's, into which a block computes its linear maps' gradients."""
        uses_dummies = is_block(self.spec.unit) and row.is_whole and row.lives == "always" and self.spec.is_trained
        self.collector = Collector(
            param_dtype if memory.param_dtype else self.grad_dtype,
            stays_whole=row.is_whole,
            dummies=dummies if uses_dummies else None,
            probe=GradProbe(self.device) if probes else None,
            sums=memory.sum_computed,
        )
        if row.lives == "always":
            numel, padding = self.padded_numel, self.padded_numel - self.spec.num_parameters
            if not row.is_whole:
                numel, padding = self.own.size, self.own_padding
            is_wide = memory.host_buffers and not row.is_whole and row.memory != DEVICE
            dtype = compute_dtype(self.grad_dtype) if is_wide else self.grad_dtype
            with self.device.at(DEVICE if row.is_whole else row.memory):
                self.collector.lasting = self.device.alloc((numel,), dtype, Kind.GRAD, padding=padding)
                self._zero(self.collector.lasting.array)
            if row.is_whole:
                self.grad_whole = self.collector.lasting

    def begin_step(self) -> None:
        """Begin a new sum."""
        if self.adds_at_once and self.collector.lasting is not None:
            self._zero(self.collector.lasting.array)

    # -- one microbatch --------------------------------------------------------------------------
    def grad_window(self, index: int) -> Buffer:
        """Return where to write a gradient of parameter `index`; contents undefined.

        It is the window itself at its first use in a microbatch. After that, or if gradients are added at once or
        later, it is a buffer of its own.
        """
        into = self.collector
        if index in into.given or self.adds_at_once or into.later is not None:
            return self.device.alloc(self.spec.weights[index].shape, into.dtype, Kind.UNSHARDED_GRAD)
        into.given.add(index)
        return self.window(self.open_grad(), index)

    def map_grad_window(self, index: int, packed: Sequence[tuple[int, ...]], place: int) -> Buffer:
        """Return the same for a linear map's weight: a dummy if there are dummies. `packed` are the shapes of the
        weights that lie side by side, this one at `place`."""
        dummies = self.collector.dummies
        if dummies is None:
            return self.grad_window(index)
        return dummies.window(packed, place, self.collector.dtype)

    def collect_grad(self, index: int, grad: Buffer) -> None:
        """Collect a complete gradient of parameter `index`: it is in its window already, or is added there."""
        if self.collector.later is not None:
            self.postpone(index, lambda: grad)
            return
        whole = self.open_grad()
        if grad.storage is not whole.storage:
            into, k = self.window(whole, index).array, self.device.backend
            if index in self.collector.collected or self.adds_at_once:
                accumulate(self.device, grad.numel, k.add, into, grad.array, into)
            else:
                accumulate(self.device, 0, k.copy, grad.array, into)
        self.collector.note(index)

    def postpone(self, index: int, make: Callable[[], Buffer]) -> None:
        """Postpone a gradient of parameter `index`, which is computed and collected later."""
        assert self.collector.later is not None
        self.collector.later.append(lambda: self.collect_grad(index, make()))

    def open_grad(self) -> Buffer:
        """Return the microbatch's gradient buffer, allocated when backward reaches this flat; or the permanent one."""
        if self.adds_at_once:
            return self.whole_grad()
        grad = self.collector.grad
        if grad is None:
            grad = self.collector.grad = self._new_whole(self.collector.dtype)
            for start, stop in self.spec.gaps(Slice(0, self.padded_numel, self.numel)):
                self._zero(grad[start:stop].array)
        return grad

    def _new_whole(self, dtype: DType) -> Buffer:
        keep = self.collector.stays_whole and self.grad_whole is None and dtype == self.grad_dtype
        kind, numel = Kind.GRAD if keep else Kind.UNSHARDED_GRAD, self.held.padded_numel
        return self.device.alloc((numel,), dtype, kind, padding=numel - self.spec.num_parameters)

    def take_grad(self) -> Buffer:
        """Take this microbatch's finished gradient, padded_numel elements; the flat forgets it."""
        return self.collector.look(self._as_sent(self._take_local()))

    def hold_grad(self) -> None:
        """Add this microbatch's finished gradient to the earlier ones, whole and not reduced."""
        into, mine = self.collector, self._take_local()
        as_it_is = into.sums or into.waiting is not None
        into.waiting = into.look(added(into.waiting, mine if as_it_is else self._as_sent(mine)))

    def _as_sent(self, whole: Buffer) -> Buffer:
        """Return a finished gradient in a dtype in which it is sent."""
        if whole.dtype not in (self.grad_dtype, self.collector.sent):
            computed, whole = whole, self._new_whole(self.grad_dtype)
            self.device.kernel(0, self.device.backend.copy, computed.array, whole.array)
        return whole

    def _take_local(self) -> Buffer:
        """Take it in the dtype in which it was computed, without a cast."""
        whole = self.open_grad()
        for index in range(len(self.spec.weights)):
            if index not in self.collector.collected and not self.adds_at_once:  # the loss does not depend on it
                self._zero(self.window(whole, index).array)
        self.collector.close()
        return whole

    # -- what is kept -----------------------------------------------------------------------------
    def add_grad_whole(self, grad: Buffer) -> None:
        """Store a finished gradient whole; a later microbatch's is added, unless it already has been."""
        if grad is not self.grad_whole:
            self.grad_whole = added(self.grad_whole, grad)

    def new_grad_shard(self) -> Buffer:
        """Return a buffer for the local slice of a reduced gradient; a later microbatch's is added to the stored
        sum."""
        return self.device.alloc((self.own.size,), self.grad_dtype, Kind.GRAD, padding=self.own_padding)

    def add_grad_shard(self, grad: Buffer | None) -> None:
        """Store the local shard of a reduced gradient (None: there is none)."""
        if grad is not None:
            self.keep_grad_shard(grad)

    def keep_grad_shard(self, grad: Buffer) -> None:
        """Store it in place; a later microbatch's is added."""
        lasting = self.collector.lasting
        if self.grad_shard is None and lasting is not None and lasting.memory == grad.memory:
            own = self.own_window(lasting) if self.collector.stays_whole else lasting
            self.device.kernel(0, self.device.backend.copy, grad.array, own.array)
            self.grad_shard = own
        else:
            self.grad_shard = added(self.grad_shard, grad)

    def keep_own_grad(self) -> None:
        """Keep only the local shard of a whole gradient, in a buffer of its own if the shard is not all of it."""
        own, whole = self.grad_shard, self.grad_whole
        if own is not None and whole is not None and own is not whole and own.memory == DEVICE:
            self.grad_shard = self.new_grad_shard()
            self.device.kernel(0, self.device.backend.copy, own.array, self.grad_shard.array)
        self.grad_whole = None

    def take_finished(self) -> list[Buffer]:
        """Take the whole gradient that is to be reduced, in a list; the flat forgets it."""
        if self.collector.waiting is not None:
            self.hold_grad()
            held, self.collector.waiting = self.collector.waiting, None
            return [self._as_sent(held)]
        if not self.collector.stays_whole:
            return [self.take_grad()]
        whole, self.grad_whole = self.whole_grad(), self.collector.lasting
        return [whole]

    def whole_grad(self) -> Buffer:
        assert self.grad_whole is not None, f"{self.name}: its gradient is not stored whole"
        return self.grad_whole

    def drop_grads(self) -> None:
        """Drop the gradients at the end of a step, except permanent buffers."""
        self.collector.grad = self.grad_shard = None
        self.grad_whole = self.collector.lasting if self.collector.stays_whole else None
        if self.collector.probe is not None:
            self.collector.probe.flag = None

    def _zero(self, array: Array) -> None:
        self.device.kernel(0, self.device.backend.fill, array, 0.0)
