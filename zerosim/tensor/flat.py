"""A unit's parameters in one flat buffer, as one rank holds it.

The few buffers that a rank holds of one unit: whole or own slice of parameters, gradients and
optimizer state. Where each weight lies is `placement/spec.py`'s, who owns which part
`placement/layout.py`'s; which buffers exist at which moment is a strategy's business (`parallel/`).
ZeRO paper, section 5: the slices of a flat buffer are what is partitioned.
"""

from __future__ import annotations

from typing import Any

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, compute_dtype, fp64
from zerosim.placement.partition import Slice as Slice
from zerosim.placement.partition import nothing as nothing
from zerosim.placement.partition import slice_of as slice_of
from zerosim.placement.partition import slice_size as slice_size
from zerosim.placement.partition import whole as whole
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.tensor.tensor import Parameter


class Flat:
    """One flat buffer of parameters as one rank holds it.

    param        all of it, while it is there: PARAM where every rank keeps it, UNSHARDED_PARAM
                 where it is gathered for use
    param_shard  the own slice: a window of `param`, or (ZeRO-3) a buffer of its own; None where it is
                 cast from the master at each use
    grad         the gradient of the micro-batch under way, all of it
    grad_whole   gradients kept whole (DDP, ZeRO-1), summed over micro-batches
    grad_shard   the own slice of the reduced gradient
    master       fp32 copy of the own slice, for half types
    moments      the optimizer's states of the own slice

    Parameters point here; nothing here points back.
    """

    def __init__(self, name: str, device: Device, dtype: DType, grad_dtype: DType) -> None:
        self.spec = FlatSpec(name, ())
        self.device = device
        self.dtype = dtype
        self.grad_dtype = grad_dtype
        self.padded_numel = 0
        self.own = nothing(0)
        self.keeps_whole_grad = False
        self.watches = False
        self.was_unsharded = False  # since the start: what lies elsewhere now was then here, and is freed
        self.param: Buffer | None = None
        self.param_shard: Buffer | None = None
        self.grad: Buffer | None = None
        self.grad_whole: Buffer | None = None
        self.grad_shard: Buffer | None = None
        self.local_probe: Buffer | None = None
        self.master: Buffer | None = None
        self.moments: list[Buffer] = []
        self._given: set[int] = set()
        self._collected: set[int] = set()

    # -- layout ---------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.spec.numel

    def declare(self, name: str, shape: tuple[int, ...], *, std: float | None = None, fill: float = 0.0) -> Parameter:
        """Append a parameter to the layout; no memory is taken yet."""
        self.spec = FlatSpec(self.name, (*self.spec.weights, WeightSpec(name, shape, std, fill)))
        return Parameter(self, len(self.spec.weights) - 1, name, shape)

    def window(self, whole: Buffer, index: int) -> Buffer:
        """Parameter `index` in a buffer of this layout, in its own shape."""
        weight, offset = self.spec.weights[index], self.spec.offsets[index]
        return whole[offset : offset + weight.numel].reshape(*weight.shape)

    # -- parameters -----------------------------------------------------------------------------
    def param_window(self, index: int) -> Buffer:
        if self.param is None:
            raise RuntimeError(
                f"rank {self.device.rank} uses {self.spec.weights[index].name} while {self.name} is sharded: "
                "all_gather it before use, and reshard only after its last use"
            )
        return self.window(self.param, index)

    def shard(self) -> Buffer:
        assert self.param_shard is not None, f"{self.name} has not been placed"
        return self.param_shard

    def whole_param(self) -> Buffer:
        assert self.param is not None, f"{self.name} is sharded"
        return self.param

    def unshard(self, full: Buffer) -> None:
        """The whole is there: `full` has padded_numel elements (numel suffice)."""
        self.param = full
        self.was_unsharded = True

    def reshard(self) -> None:
        """The whole goes; the own slice stays."""
        self.param = None

    def write(self, index: int, values: Any, *, exact_master: bool) -> None:
        """Store a parameter's values (host array) in what this rank holds of it.

        The master is a copy of the rounded weight or, with `exact_master`, of the value as given.
        """
        values = values.reshape(-1)
        backend = self.device.backend
        if self.param is not None:
            backend.from_host(values, self.window(self.param, index).reshape(-1).array)
        mine = self.spec.overlap(self.own, index)
        if mine is None:
            return
        values, here = values[mine.start : mine.stop], slice(mine.at, mine.at + mine.numel)
        # Without a stored shard the rounding is the host's: an array that takes no memory of the device.
        stored = self.param_shard
        rounded = backend.empty(values.shape, self.dtype) if stored is None else stored[here].array
        backend.from_host(values, rounded)
        if self.master is not None:
            if exact_master:
                backend.from_host(values, self.master[here].array)
            else:
                backend.copy(rounded, self.master[here].array)

    def weights(self) -> Buffer:
        """What the optimizer updates: the own slice of the master or, without one, of the parameters."""
        return self.shard() if self.master is None else self.master

    def store_param_shard(self) -> None:
        """Round the updated master into the own slice of the parameters. No traffic."""
        if self.master is not None and self.param_shard is not None:
            self.device.kernel(0, self.device.backend.copy, self.master.array, self.param_shard.array)

    def cast_shard(self, kind: Kind) -> Buffer:
        """The own slice of the parameters, cast from the master for one use."""
        assert self.master is not None, f"{self.name} has no master"
        shard = self.device.alloc((self.own.size,), self.dtype, kind, padding=self.own.padding)
        self.device.kernel(0, self.device.backend.copy, self.master.array, shard.array)
        return shard

    # -- gradients ------------------------------------------------------------------------------
    def grad_window(self, index: int) -> Buffer:
        """Where a gradient of parameter `index` is to be written; contents undefined.

        The window itself at its first use in a micro-batch; after that a buffer of its own.
        """
        if index in self._given:
            return self.device.alloc(self.spec.weights[index].shape, self.grad_dtype, Kind.UNSHARDED_GRAD)
        self._given.add(index)
        return self.window(self._open_grad(), index)

    def collect_grad(self, index: int, grad: Buffer) -> None:
        """A gradient of parameter `index` is complete: it is in its window already, or is added there."""
        whole = self._open_grad()
        if grad.storage is not whole.storage:
            into = self.window(whole, index).array
            k = self.device.backend
            if index in self._collected:
                self.device.kernel(grad.numel, k.add, into, grad.array, into)
            else:
                self.device.kernel(0, k.copy, grad.array, into)
        self._given.add(index)
        self._collected.add(index)

    def _open_grad(self) -> Buffer:
        """The micro-batch's gradient buffer, made when backward reaches this flat."""
        if self.grad is None:
            keep = self.keeps_whole_grad and self.grad_whole is None
            kind = Kind.GRAD if keep else Kind.UNSHARDED_GRAD
            padding = self.padded_numel - self.numel
            self.grad = self.device.alloc((self.padded_numel,), self.grad_dtype, kind, padding=padding)
            if padding:
                self._zero(self.grad[self.numel :].array)
        return self.grad

    def take_grad(self) -> Buffer:
        """This micro-batch's finished gradient, padded_numel elements; the flat forgets it."""
        whole = self._open_grad()
        for index in range(len(self.spec.weights)):
            if index not in self._collected:  # a parameter that the loss does not depend on
                self._zero(self.window(whole, index).array)
        self.grad = None
        self._given.clear()
        self._collected.clear()
        if self.watches:
            self._watch(whole)
        return whole

    def _watch(self, grad: Buffer) -> None:
        """Remember, on the device, whether this rank's own gradient was finite: an error can name its rank."""
        probe = self.device.alloc((1,), fp64, Kind.TEMP)
        self.device.kernel(grad.numel, self.device.backend.finite_probe, grad.array, probe.array)
        self.local_probe = self._added(self.local_probe, probe)

    def add_grad_whole(self, grad: Buffer) -> None:
        """Keep a finished gradient whole; a later micro-batch's is added."""
        self.grad_whole = self._added(self.grad_whole, grad)

    def new_grad_shard(self) -> Buffer:
        """A buffer for the own slice of a reduced gradient; where a sum is kept already, to be added to it."""
        own = self.own
        return self.device.alloc((own.size,), self.grad_dtype, Kind.GRAD, padding=own.padding)

    def add_grad_shard(self, grad: Buffer | None) -> None:
        """Keep the own part of a reduced gradient (None: there is none); a later micro-batch's is added."""
        if grad is not None:
            self.grad_shard = self._added(self.grad_shard, grad)

    def upcast_grad_shard(self) -> Buffer | None:
        """An fp32 copy of the own slice of half-type gradients, which stay; None where there is nothing to cast."""
        half, compute = self.grad_shard, compute_dtype(self.grad_dtype)
        if half is None or not self.grad_dtype.is_half:
            return None
        copy = self.device.alloc(half.shape, compute, Kind.GRAD, padding=self.own.padding)
        self.device.kernel(0, self.device.backend.copy, half.array, copy.array)
        return copy

    def whole_grad(self) -> Buffer:
        assert self.grad_whole is not None, f"{self.name}: its gradient is not kept whole"
        return self.grad_whole

    def drop_grads(self) -> None:
        """Gradients end with the step."""
        self.grad = self.grad_whole = self.grad_shard = self.local_probe = None

    def _added(self, kept: Buffer | None, grad: Buffer) -> Buffer:
        if kept is None:
            return grad
        self.device.kernel(grad.numel, self.device.backend.add, kept.array, grad.array, kept.array)
        return kept

    def _zero(self, array: Array) -> None:
        self.device.kernel(0, self.device.backend.fill, array, 0.0)
