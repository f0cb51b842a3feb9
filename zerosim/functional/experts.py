"""Experts: a router (`router.py`) chooses k of E for each token, and each expert's rows go through its own two maps.

    rows    dispatch: x's rows, sorted by expert, (R, D); dropless R = M k
    maps    grouped_linear: each expert's rows times its matrix of a stack
    y       combine: each token's sum of its rows, which were weighed before

R does not depend on the data, so every buffer's shape and every product's work are known without it. Only how R divides
among experts does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import GROUPED, GROUPED_DGRAD, GROUPED_WGRAD, VECTOR, KernelWork, work_of
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.cast import cast
from zerosim.functional.common import Grads, kept_for, like, rows_of, weight_grad
from zerosim.functional.router import Routing
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Outline, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Saves the order of rows."""

    shape: tuple[int, ...]
    order: Buffer
    each: int

    def backward(self, grad: Buffer) -> Grads:
        device, dx = grad.device, grad.device.alloc(self.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        arrays = grad.array, self.order.array, self.each, dx.array.reshape(-1, grad.shape[1])
        device.kernel(grad.numel, device.backend.sum_rows, *arrays)
        return (dx,)


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Return x's row for each of its token's choices, sorted by expert. Shapes: x (..., D), result (R, D)."""
    return _taken(x, rows_of(x.array), routing.order, routing.each)


def row_weights(weights: Tensor, routing: Routing) -> Tensor:
    """Return the weight of each row. Shapes: weights (M, k), result (R, 1)."""
    return _taken(weights, weights.array.reshape(-1, 1), routing.order, 1)


def _taken(x: Tensor, rows: Array, order: Buffer, each: int) -> Tensor:
    device, out = x.device, like(x, order.numel, rows.shape[1])
    device.kernel(0, device.backend.take_rows, rows, order.array, each, out.array)
    return apply(Dispatch(x.shape, order, each), out, x, op="dispatch", saved={"order": order})


@dataclass(frozen=True, slots=True)
class Combine:
    """Saves the order of rows."""

    shape: tuple[int, ...]
    order: Buffer
    each: int

    def backward(self, grad: Buffer) -> Grads:
        device, drows = grad.device, grad.device.alloc(self.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        device.kernel(0, device.backend.take_rows, rows_of(grad.array), self.order.array, self.each, drows.array)
        return (drows,)


def combine(rows: Tensor, routing: Routing, shape: tuple[int, ...]) -> Tensor:
    """Return each token's sum of its rows. Shapes: rows (R, D), result (..., D) as `shape` says."""
    device, order, each = rows.device, routing.order, routing.each
    out = like(rows, *shape)
    device.kernel(rows.buffer.numel, device.backend.sum_rows, rows.array, order.array, each, rows_of(out.array))
    return apply(Combine(rows.shape, order, each), out, rows, op="combine", saved={"order": order})


@dataclass(frozen=True, slots=True)
class Weigh:
    """Saves rows and weights.

    composed  PyTorch's multiplication of two tensors: its backward multiplies the gradient by the rows at full width
              and sums the product after both gradients are there (torch/csrc/autograd: MulBackward0; the engine's
              validate_outputs)
    """

    rows: Readable
    weights: Readable
    composed: bool = False

    def backward(self, grad: Buffer) -> Grads:
        drows, dweights = self.rows.new_grad(), self.weights.new_grad()
        _product = grad.device.alloc(grad.shape, grad.dtype, Kind.TEMP) if self.composed else None
        arrays = rows_of(grad.array), rows_of(self.rows.array), self.weights.array, rows_of(drows.array), dweights.array
        grad.device.kernel(3 * grad.numel, grad.device.backend.weigh_rows_backward, *arrays)
        return drows, dweights


def weigh(rows: Tensor, weights: Tensor, dtype: DType | None = None, *, composed: bool = False) -> Tensor:
    """Return each row times its weight, by way of `dtype` if it is given: then a copy of the rows in it is kept.
    Shapes: rows and result (..., D), of R rows, weights (R, 1)."""
    if dtype not in (None, rows.dtype):
        return cast(weigh(cast(rows, dtype), cast(weights, dtype), composed=composed), rows.dtype)
    out = like(rows)
    rows.device.kernel(
        out.numel, rows.device.backend.weigh_rows, rows_of(rows.array), weights.array, rows_of(out.array)
    )
    saved = {"rows": held(rows), "weights": held(weights)}
    return apply(Weigh(held(rows), held(weights), composed), out, rows, weights, op="weigh", saved=saved)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Saves its rows, if the stack is trained, and the stack's handle.

    kernel  'grouped'; 'eager': in PyTorch each expert's gradient is a stack of zeros but for it, which is added to that
            of the experts before in a third one; 'batched': it also saves a matrix for each row, and has as many
            gradients
    gathered  those matrices
    """

    x: Readable | Outline
    stack: Operand
    counts: tuple[int, ...]
    transposed: bool
    grad_scale: float = 1.0
    kernel: str = "grouped"
    gathered: Buffer | None = None
    bias: Operand | None = None
    first: int = 0

    def backward(self, grad: Buffer) -> Grads:
        device, k, dx = grad.device, grad.device.backend, None
        if self.x.requires_grad:
            dx = self.x.new_grad()
            values = self.stack.buffer
            across = values.array if self.transposed else values.array.swapaxes(1, 2)
            shape = grad.shape[0], grad.shape[1], dx.shape[1], len(self.counts)
            work = grouped_work(GROUPED_DGRAD, shape, grad.array, across, dx.array)
            device.kernels((work,), k.grouped, grad.array, across, self.counts, dx.array)
            del values, across

        def make() -> Buffer:
            assert not isinstance(self.x, Outline)
            dstack, _beside = self.stack.new_grad(), self._beside(device)
            left, right = (grad.array, self.x.array) if self.transposed else (self.x.array, grad.array)
            shape = left.shape[1], left.shape[0], right.shape[1], len(self.counts)
            work = grouped_work(GROUPED_WGRAD, shape, left, right, dstack.array)
            device.kernels((work,), k.grouped_wgrad, left, right, self.counts, self.grad_scale, dstack.array)
            return dstack

        own = () if self.bias is None else (weight_grad(self.bias, lambda: self._dbias(grad)),)
        return dx, weight_grad(self.stack, make, self.x), *own

    def _dbias(self, grad: Buffer) -> Buffer:
        assert self.bias is not None
        dbias, columns = self.bias.new_grad(), slice(self.first, self.first + self.bias.shape[1])
        arrays = grad.array[:, columns], self.counts, self.grad_scale, dbias.array
        grad.device.kernel(grad.shape[0] * self.bias.shape[1], grad.device.backend.sum_biases, *arrays)
        return dbias

    def _beside(self, device: Device) -> list[Buffer]:
        """Return what an implementation holds while it computes the stack's gradient."""
        shape, dtype = self.stack.shape, self.stack.dtype
        if self.kernel == "eager":
            stacks, numel = [shape, shape, shape[1:]], prod(shape)
            nbytes = len(self.counts) * numel * dtype.itemsize
            device.count(KernelWork("experts_accumulate", VECTOR, len(self.counts) * numel, 2 * nbytes, 2 * nbytes))
            return [device.alloc(one, dtype, Kind.TEMP) for one in stacks]
        return [] if self.gathered is None else [device.alloc(self.gathered.shape, dtype, Kind.TEMP)]


def grouped_linear(
    x: Tensor,
    stack: Operand,
    counts: tuple[int, ...],
    bias: Operand | None = None,
    *,
    transposed: bool = True,
    grad_scale: float = 1.0,
    kernel: str = "grouped",
    first: int = 0,
) -> Tensor:
    """Return each expert's rows times its matrix and, with a `bias`, plus its bias; `counts`: the rows of each. The
    gradients of both are multiplied by `grad_scale`, a product's alpha. `kernel`: see `Grouped`.

    Shapes: x (R, I), stack (E, I, O) or, transposed, (E, O, I), bias (E, O) or narrower, of columns from `first` on,
    result (R, O).

    Raises: InputError where the stack does not take x's columns, or has another number of experts.
    """
    experts, inner, wide = (stack.shape[0], *stack.shape[:0:-1]) if transposed else stack.shape
    if x.shape[-1] != inner or experts != len(counts):
        raise InputError(f"grouped_linear: a stack of shape {stack.shape} for {x.shape[-1]} columns, and rows of "
                         f"{len(counts)} experts")  # fmt: skip
    device, out, values = x.device, like(x, x.shape[0], wide), stack.buffer
    matrices = values.array.swapaxes(1, 2) if transposed else values.array
    work = grouped_work(GROUPED, (x.shape[0], inner, wide, experts), x.array, matrices, out.array)
    device.kernels((work,), device.backend.grouped, x.array, matrices, counts, out.array)
    del values, matrices
    if bias is not None:
        own = out.array[:, first : first + bias.shape[1]]
        device.kernel(x.shape[0] * bias.shape[1], device.backend.add_biases, own, bias.array, counts)
    gathered = None
    if kernel == "batched":
        gathered = device.alloc((x.shape[0], *stack.shape[1:]), stack.dtype, Kind.ACTIVATION)
    kept, op = kept_for([stack], x), layer_of(stack, "grouped_linear")
    rule = Grouped(kept, stack, counts, transposed, grad_scale, kernel, gathered, bias, first)
    more = () if bias is None else (bias,)
    return apply(rule, out, x, stack, *more, op=op, saved={"input": kept, "weight": stack, "gathered": gathered})


def grouped_work(name: str, shape: tuple[int, int, int, int], *arrays: Array) -> KernelWork:
    """Return the work of one product of all experts' rows, however they divide: (M, K) by (K, N), and the experts."""
    rows, inner, wide, _ = shape
    return work_of("grouped", 2 * rows * inner * wide, arrays)._replace(name=name, shape=shape)
