"""Helpers of the rules: rows of any tensor, and buffers like another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.tensor.discarded import Discarded, Readable, held
from zerosim.tensor.tensor import Operand, Outline, Parameter, Tensor, outline

Grads = tuple[Buffer | None, ...]


def weight_grad(weight: Operand, make: Callable[[], Buffer], reads: Readable | Outline | None = None) -> Buffer | None:
    """Compute a weight's gradient now. Return None if the weight is not trained, or if a pipeline's action wants only
    the input's gradient: then it is computed later, and `make` keeps its inputs alive. `reads`: the map's input, which
    is recomputed now if it was discarded, because parameters are gathered for the input's gradient only."""
    if not weight.requires_grad:
        return None
    if isinstance(weight, Parameter) and weight.flat.collector.later is not None:
        if isinstance(reads, Discarded):
            reads.recompute()
        weight.flat.postpone(weight.index, make)
        return None
    return make()


def kept_for(weights: Sequence[Operand], x: Tensor) -> Readable | Outline:
    """Return what a map's rule saves of its input for the weights' gradients, if any of the weights is trained."""
    return held(x) if any(weight.requires_grad for weight in weights) else outline(x)


def map_grad(weight: Operand, packed: Sequence[Operand] = (), place: int = 0) -> Buffer:
    """Return the buffer for the gradient of a linear map's weight; for `packed` maps, of the one at `place`."""
    if isinstance(weight, Parameter):
        return weight.flat.map_grad_window(weight.index, [one.shape for one in packed or [weight]], place)
    return weight.new_grad()


def ready_map_grads(weights: Sequence[Operand]) -> None:
    """Allocate the persistent gradients of these packed maps in their first forward, so that all steps are alike."""
    for place, weight in enumerate(weights):
        if isinstance(weight, Parameter) and weight.flat.collector.dummies is not None:
            map_grad(weight, weights, place)


def bias_grad(bias: Operand, grad: Buffer, columns: slice | None = None) -> Buffer | None:
    """Return the gradient of a bias that was added to each row, or to these columns of each row."""

    def make() -> Buffer:
        dbias, rows = bias.new_grad(), rows_of(grad.array)
        rows = rows if columns is None else rows[:, columns]
        grad.device.kernel(rows.size, grad.device.backend.column_sum, rows, dbias.array)
        return dbias

    return weight_grad(bias, make)


def rows_of(array: Array) -> Array:
    """View (..., D) as (M, D), without a copy."""
    return array.reshape(-1, array.shape[-1])


def spans(count: int, each: int) -> list[slice]:
    """Return `count` rows in runs of `each`, fewer in the last one."""
    return [slice(start, min(start + each, count)) for start in range(0, count, each)]


def copy_columns(source: Readable | Buffer, out: Buffer, first: int) -> None:
    """Copy the columns of each row from `first` on."""
    kept, into = rows_of(source.array)[:, first:], rows_of(out.array)[:, first:]
    out.device.kernel(0, out.device.backend.copy, kept, into)


def like(x: Tensor, *shape: int, dtype: DType | None = None) -> Buffer:
    """Allocate an activation of x's shape and dtype, or of the given ones."""
    return x.device.alloc(shape or x.shape, dtype or x.dtype, Kind.ACTIVATION)


def one_like(x: Buffer) -> Buffer:
    """Allocate a gradient of x, filled with 1."""
    grad = grad_like(x)
    grad.device.kernel(0, grad.device.backend.fill, grad.array, 1.0)
    return grad


def grad_like(x: Buffer) -> Buffer:
    """Allocate a gradient of an activation, of x's shape and dtype."""
    return x.device.alloc(x.shape, x.dtype, Kind.ACTIVATION_GRAD)
