"""One unit's gradients on one rank: collected weight by weight in a micro-batch, then kept, whole or as a slice.

    grad         the gradient of the micro-batch under way, all of it
    grad_whole   gradients kept whole (DDP, ZeRO-1), summed over micro-batches
    grad_held    the same before it is reduced, in stages that keep a slice (ZeRO-2 and 3 without sync)
    grad_shard   the own slice of the reduced gradient (ZeRO-2 and 3: summed over micro-batches)

Backward writes each gradient into its window of `grad`; a strategy takes the finished buffer at `post_backward`,
reduces it, and keeps what its stage keeps. Where frameworks do otherwise is a `GradMemory`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zerosim.backends.kernels import Array
from zerosim.config.zero import GradMemory
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType
from zerosim.placement.layout import Row, Rows
from zerosim.placement.memories import DEVICE
from zerosim.placement.partition import Slice, nothing
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.tensor.dummy_grads import DummyGrads
from zerosim.tensor.offloaded import Outgoing
from zerosim.tensor.sums import GradProbe, accumulate, added


class GradAccumulator:
    """The gradients of one flat buffer, in the layout of `spec`; `own` is the slice that this rank keeps.

    They are kept and sent in `grad_dtype`, and made in `local_dtype`.
    """

    def __init__(self, name: str, device: Device, grad_dtype: DType, module: str = "") -> None:
        self.spec = FlatSpec(name, (), module)
        self.device = device
        self.grad_dtype = self.local_dtype = grad_dtype
        self.rows: Rows = {}
        self.is_trained = True  # it has gradients and optimizer states
        self.owner = 0  # of a flat that belongs to one member of its group: which one
        self.padded_numel = 0
        self.own = nothing(0)
        self.keeps_whole_grad = False
        self.probe: GradProbe | None = None
        self.dummies: DummyGrads | None = None  # where gradients of linear maps in blocks are made, if anywhere
        self.grad: Buffer | None = None
        self.grad_whole: Buffer | None = None
        self.grad_held: Buffer | None = None
        self.grad_shard: Buffer | None = None
        self.grad_upcast: Buffer | None = None
        self._lasting: Buffer | None = None  # where gradients live always: what `grad_whole` or `grad_shard` points to
        self.grad_memory = DEVICE  # where the own slice of the reduced gradient goes
        self.outgoing: Outgoing | None = None  # what brings it there
        self.later: deque[Callable[[], None]] | None = None  # takes weights' gradients while inputs' alone are made
        self._given: set[int] = set()
        self._collected: set[int] = set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> str:
        """What is gathered with it: the unit, or the leaf module that one tensor belongs to."""
        return self.spec.module

    @property
    def numel(self) -> int:
        """Elements of the buffer, gaps between its weights included."""
        return self.spec.numel

    @property
    def own_padding(self) -> int:
        """How many elements of the own slice are no weight's."""
        return self.spec.padding(self.own)

    def window(self, whole: Buffer, index: int) -> Buffer:
        """Parameter `index` in a buffer of this layout, in its own shape."""
        weight, offset = self.spec.weights[index], self.spec.offsets[index]
        return whole[offset : offset + weight.numel].reshape(*weight.shape)

    def lie(self, rows: Rows, owner: int | None, own: Slice, padded_numel: int) -> None:
        """Take a place in a layout: the flat's rows, its owner, the part that is this rank's, and elements of the whole
        buffer, padding included."""
        self.rows, self.owner, self.own, self.padded_numel = rows, owner or 0, own, padded_numel
        self.is_trained = "optim" in rows

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that its own parts are cut over."""
        return self.rows["optim" if self.is_trained else "param"].axes

    def own_window(self, whole: Buffer) -> Buffer:
        """The own part of a buffer of this layout."""
        return whole[self.own.start : self.own.stop]

    @property
    def adds_at_once(self) -> bool:
        """Whether each weight's gradient is added to a whole that lives always, as soon as it is there."""
        return self.keeps_whole_grad and self._lasting is not None

    def place_grads(
        self,
        row: Row,
        memory: GradMemory,
        param_dtype: DType,
        *,
        probes: bool,
        dummies: DummyGrads | None = None,
        out: Outgoing | None = None,
    ) -> None:
        """Before the first step: how gradients are held, a buffer for them where they live always, and whether a
        GradProbe looks at them. `dummies`: the rank's, which a block makes its linear maps' gradients in."""
        self.probe = GradProbe(self.device) if probes else None
        uses_dummies = is_block(self.spec.unit) and row.is_whole and row.lives == "always" and self.is_trained
        self.dummies = dummies if uses_dummies else None
        self.keeps_whole_grad, self.grad_memory, self.outgoing = row.is_whole, row.memory, out
        self.local_dtype = param_dtype if memory.param_dtype else self.grad_dtype
        if row.lives == "always":
            numel, padding = self.padded_numel, self.padded_numel - self.spec.num_parameters
            if not row.is_whole:
                numel, padding = self.own.size, self.own_padding
            with self.device.at(DEVICE if row.is_whole else row.memory):
                self._lasting = self.device.alloc((numel,), self.grad_dtype, Kind.GRAD, padding=padding)
                self._zero(self._lasting.array)
            if row.is_whole:
                self.grad_whole = self._lasting

    def begin_step(self) -> None:
        """What outlived the last step goes, and a sum begins anew."""
        self.grad_upcast = None
        if self.adds_at_once and self._lasting is not None:
            self._zero(self._lasting.array)

    # -- one micro-batch --------------------------------------------------------------------------
    def grad_window(self, index: int) -> Buffer:
        """Where a gradient of parameter `index` is to be written; contents undefined.

        The window itself at its first use in a micro-batch. After that, and where it is added at once or later, a
        buffer of its own.
        """
        if index in self._given or self.adds_at_once or self.later is not None:
            return self.device.alloc(self.spec.weights[index].shape, self.local_dtype, Kind.UNSHARDED_GRAD)
        self._given.add(index)
        return self.window(self._open_grad(), index)

    def map_grad_window(self, index: int, packed: Sequence[tuple[int, ...]], place: int) -> Buffer:
        """The same of a linear map's weight: a dummy where there are such. `packed` are the shapes of the weights that
        lie side by side, this one at `place`."""
        if self.dummies is None:
            return self.grad_window(index)
        return self.dummies.window(packed, place, self.local_dtype)

    def collect_grad(self, index: int, grad: Buffer) -> None:
        """A gradient of parameter `index` is complete: it is in its window already, or is added there."""
        if self.later is not None:
            self.postpone(index, lambda: grad)
            return
        whole = self._open_grad()
        if grad.storage is not whole.storage:
            into, k = self.window(whole, index).array, self.device.backend
            if index in self._collected or self.adds_at_once:
                accumulate(self.device, grad.numel, k.add, into, grad.array, into)
            else:
                accumulate(self.device, 0, k.copy, grad.array, into)
        self._given.add(index)
        self._collected.add(index)

    def postpone(self, index: int, make: Callable[[], Buffer]) -> None:
        """Leave a gradient of parameter `index` to be made and collected later."""
        assert self.later is not None
        self.later.append(lambda: self.collect_grad(index, make()))

    def _open_grad(self) -> Buffer:
        """The micro-batch's gradient buffer, made when backward reaches this flat; or the persistent one."""
        if self.adds_at_once:
            return self.whole_grad()
        if self.grad is None:
            self.grad = self._new_whole(self.local_dtype)
            for start, stop in self.spec.gaps(Slice(0, self.padded_numel, self.numel)):
                self._zero(self.grad[start:stop].array)
        return self.grad

    def _new_whole(self, dtype: DType) -> Buffer:
        keep = self.keeps_whole_grad and self.grad_whole is None and dtype == self.grad_dtype
        kind = Kind.GRAD if keep else Kind.UNSHARDED_GRAD
        return self.device.alloc(
            (self.padded_numel,), dtype, kind, padding=self.padded_numel - self.spec.num_parameters
        )

    def take_grad(self) -> Buffer:
        """This micro-batch's finished gradient, padded_numel elements; the flat forgets it."""
        whole = self._take_local()
        if whole.dtype != self.grad_dtype:
            local, whole = whole, self._new_whole(self.grad_dtype)
            self.device.kernel(0, self.device.backend.copy, local.array, whole.array)
        if self.probe is not None:
            self.probe.look(whole)
        return whole

    def hold_grad(self) -> None:
        """Add this micro-batch's finished gradient to those before it, whole and not reduced."""
        if self.grad_held is None:
            self.grad_held = self.take_grad()
            return
        added(self.grad_held, self._take_local())
        if self.probe is not None:
            self.probe.look(self.grad_held)

    def _take_local(self) -> Buffer:
        """The same in the dtype in which it was made, without a cast."""
        whole = self._open_grad()
        for index in range(len(self.spec.weights)):
            if index not in self._collected and not self.adds_at_once:  # the loss does not depend on it
                self._zero(self.window(whole, index).array)
        self.grad = None
        self._given.clear()
        self._collected.clear()
        return whole

    # -- what is kept -----------------------------------------------------------------------------
    def add_grad_whole(self, grad: Buffer) -> None:
        """Keep a finished gradient whole; a later micro-batch's is added, if it has not been."""
        if grad is not self.grad_whole:
            self.grad_whole = added(self.grad_whole, grad)

    def new_grad_shard(self) -> Buffer:
        """A buffer for the own slice of a reduced gradient; where a sum is kept already, to be added to it."""
        own = self.own
        return self.device.alloc((own.size,), self.grad_dtype, Kind.GRAD, padding=self.own_padding)

    def stand_own(self, own: Buffer | None) -> None:
        """The own part of a gradient that is reduced where it stands, once a step: keep it there, or send it."""
        if not self._leaves(own):
            self.grad_shard = own

    def add_grad_shard(self, grad: Buffer | None) -> None:
        """Keep the own part of a reduced gradient (None: there is none), or send it where it is kept."""
        if grad is not None and not self._leaves(grad):
            self.keep_grad_shard(grad)

    def _leaves(self, own: Buffer | None) -> bool:
        if own is None or own.memory == self.grad_memory or self.outgoing is None or not self.outgoing.as_it_goes:
            return False
        self.outgoing.send(self, own)
        return True

    def keep_grad_shard(self, grad: Buffer) -> None:
        """The same where it is; a later micro-batch's is added."""
        if self.grad_shard is None and self._lasting is not None and self._lasting.memory == grad.memory:
            own = self.own_window(self._lasting) if self.keeps_whole_grad else self._lasting
            self.device.kernel(0, self.device.backend.copy, grad.array, own.array)
            self.grad_shard = own
        else:
            self.grad_shard = added(self.grad_shard, grad)

    def keep_own_grad(self) -> None:
        """Of a gradient that is whole only the own part stays, in a buffer of its own where it is not all of it."""
        own, whole = self.grad_shard, self.grad_whole
        if own is not None and whole is not None and own is not whole and own.memory == DEVICE:
            self.grad_shard = self.new_grad_shard()
            self.device.kernel(0, self.device.backend.copy, own.array, self.grad_shard.array)
        self.grad_whole = None

    def take_finished(self) -> list[Buffer]:
        """The gradient that is to be reduced, whole, handed over in a list; the flat forgets it."""
        if self.grad_held is not None:
            self.hold_grad()
            held, self.grad_held = [self.grad_held], None
            return held
        if not self.keeps_whole_grad:
            return [self.take_grad()]
        whole = [self.whole_grad()]
        self.grad_whole = self._lasting
        return whole

    def whole_grad(self) -> Buffer:
        assert self.grad_whole is not None, f"{self.name}: its gradient is not kept whole"
        return self.grad_whole

    def drop_grads(self) -> None:
        """Gradients end with the step, save for persistent buffers."""
        self.grad = self.grad_shard = None
        self.grad_whole = self._lasting if self.keeps_whole_grad else None
        if self.probe is not None:
            self.probe.flag = None

    def _zero(self, array: Array) -> None:
        self.device.kernel(0, self.device.backend.fill, array, 0.0)
