"""Linear maps: one, and several of one input side by side. I and O are widths, M = product of the leading dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import DGRAD, LINEAR, WGRAD
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.common import Grads, bias_grad, kept_for, like, map_grad, ready_map_grads, rows_of, weight_grad
from zerosim.tensor.discarded import Readable
from zerosim.tensor.tensor import Operand, Outline, Saved, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class Linear:
    """Saves x, if the weight is trained, and the handles of weight and bias."""

    x: Readable | Outline
    weight: Operand
    bias: Operand | None
    transposed: bool = False

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        rows, dx = rows_of(grad.array), None
        if self.x.requires_grad:
            weight, dx = self.weight.buffer, self.x.new_grad()
            across = weight.array if self.transposed else weight.array.T
            device.product(DGRAD, k.matmul, rows, across, rows_of(dx.array))
            del weight, across

        def make() -> Buffer:
            assert not isinstance(self.x, Outline)
            dweight, x, rows = map_grad(self.weight), rows_of(self.x.array), rows_of(grad.array)
            left, right = (rows.T, x) if self.transposed else (x.T, rows)
            device.product(WGRAD, k.matmul, left, right, dweight.array)
            return dweight

        dweight = weight_grad(self.weight, make, self.x)
        return (dx, dweight) if self.bias is None else (dx, dweight, bias_grad(self.bias, grad))


def linear(
    x: Tensor,
    weight: Operand,
    bias: Operand | None = None,
    *,
    transposed: bool = False,
    dtype: DType | None = None,
    known: Buffer | None = None,
) -> Tensor:
    """Compute y = x @ weight + bias, of x's dtype or another; or y is `known`, and only its place in the graph is new.

    Shapes: x (..., I), weight (I, O) or, transposed, (O, I); bias (O); y (..., O).

    Raises: InputError where the weight does not take x's columns.
    """
    out = known or linear_result(x, weight, bias, transposed=transposed, dtype=dtype)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    kept = kept_for([weight], x)
    saved: Saved = {"input": kept, "weight": weight, "bias": bias}
    return apply(Linear(kept, weight, bias, transposed), out, *inputs, op=layer_of(weight, "linear"), saved=saved)


def linear_result(
    x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False, dtype: DType | None = None
) -> Buffer:
    """Compute `linear` outside the graph. Raises: InputError if the weight does not accept x's columns."""
    width, wide = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != width:
        raise InputError(f"linear: x has {x.shape[-1]} columns, its weight of shape {weight.shape} takes {width}")
    ready_map_grads([weight])
    out = like(x, *x.shape[:-1], wide, dtype=dtype)
    rows = rows_of(x.array)
    values, added = weight.buffer, None if bias is None else bias.array
    matrix = values.array.T if transposed else values.array
    x.device.product(LINEAR, x.device.backend.linear, rows, matrix, added, rows_of(out.array))
    return out


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Several linear maps of one input, side by side in one buffer: Llama's q|k|v and gate|up.

    Each weight stays a separate parameter, named and laid out as in Llama's releases, and the result's
    columns are packed. `biases` are one for each weight, or none at all. Saves x, once, and the handles of weights and
    biases. Backward declares one TEMP like x: a map's share of x's gradient, before it is added.
    """

    x: Readable | Outline
    weights: Sequence[Operand]
    biases: Sequence[Operand] = ()

    def backward(self, grad: Buffer) -> Grads:
        dweights = [
            weight_grad(weight, partial(self._grad_of, i, grad), self.x) for i, weight in enumerate(self.weights)
        ]
        dbiases = [bias_grad(bias, grad, at) for bias, at in zip(self.biases, _spans(self.weights), strict=False)]
        return self._grad_of_x(grad) if self.x.requires_grad else None, *dweights, *dbiases

    def _grad_of(self, index: int, grad: Buffer) -> Buffer:
        assert not isinstance(self.x, Outline)
        x, (weight, columns) = rows_of(self.x.array), list(_columns(self.weights, grad))[index]
        dweight = map_grad(weight, self.weights, index)
        grad.device.product(WGRAD, grad.device.backend.matmul, columns.T, x, dweight.array)
        return dweight

    def _grad_of_x(self, grad: Buffer) -> Buffer:
        """Add the maps' shares in order. Each is rounded as for a separate map."""
        device, k, dx = grad.device, grad.device.backend, self.x.new_grad()
        (first, columns), *others = _columns(self.weights, grad)
        values = first.buffer
        device.product(DGRAD, k.matmul, columns, values.array, rows_of(dx.array))
        del values
        share = device.alloc(dx.shape, dx.dtype, Kind.TEMP) if others else dx
        for weight, columns in others:
            values = weight.buffer
            device.product(DGRAD, k.matmul, columns, values.array, rows_of(share.array))
            del values
            device.kernel(dx.numel, k.add, dx.array, share.array, dx.array)
        return dx


def packed_linear(x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand] = ()) -> Tensor:
    """Return y = x @ weight.T + bias of each weight, side by side. `biases`: one for each weight, or none.

    Shapes: x (..., I), each weight (O, I) and its bias (O), with its own O; y (..., sum of all O).

    Raises: InputError if a weight does not accept x's columns, or some weights have a bias and others not.
    """
    out = packed_linear_result(x, weights, biases)
    op, kept = layer_of(weights[0], "packed_linear"), kept_for(weights, x)
    return apply(PackedLinear(kept, weights, biases), out, x, *weights, *biases, op=op, saved={"input": kept})


def packed_linear_result(x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand] = ()) -> Buffer:
    """Compute `packed_linear` outside the graph."""
    if biases and len(biases) != len(weights):
        raise InputError(f"packed_linear: {len(biases)} biases for {len(weights)} weights: give each one, or none")
    for weight in weights:
        if weight.shape[-1] != x.shape[-1]:
            raise InputError(f"linear: x has {x.shape[-1]} columns, its weight of shape {weight.shape} takes another")
    ready_map_grads(weights)
    out = like(x, *x.shape[:-1], sum(weight.shape[0] for weight in weights))
    rows = rows_of(x.array)
    every: Sequence[Operand | None] = biases or [None] * len(weights)
    for (weight, columns), bias in zip(_columns(weights, out), every, strict=True):
        values, added = weight.buffer, None if bias is None else bias.array
        x.device.product(LINEAR, x.device.backend.linear, rows, values.array.T, added, columns)
        del values, added
    return out


def _columns(weights: Sequence[Operand], packed: Buffer) -> Iterator[tuple[Operand, Array]]:
    """Yield each weight with its columns of `packed`, as a view (M, O)."""
    rows = rows_of(packed.array)
    for weight, columns in zip(weights, _spans(weights), strict=True):
        yield weight, rows[:, columns]


def _spans(weights: Sequence[Operand]) -> Iterator[slice]:
    """Yield each weight's range of columns."""
    start = 0
    for weight in weights:
        stop = start + weight.shape[0]
        yield slice(start, stop)
        start = stop
