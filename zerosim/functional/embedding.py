"""Rows of a table by token, and rows added by position. B batch, T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import work_of
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of, weight_grad
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class Embedding:
    """Saves ids."""

    ids: Buffer
    weight: Operand
    first: int = 0

    def backward(self, grad: Buffer) -> Grads:
        def make() -> Buffer:
            dweight = self.weight.new_grad()
            arrays = grad.array, self.ids.array, dweight.array
            grad.device.kernel(grad.numel, grad.device.backend.embedding_backward, *arrays, self.first)
            return dweight

        return (weight_grad(self.weight, make),)


def embedding(ids: Buffer, weight: Operand) -> Tensor:
    """Look up rows of a table by token. Shapes: ids (...), int64 in [0, V), weight (V, D); result (..., D)."""
    out = embedding_result(ids, weight)
    saved: Saved = {"ids": ids, "weight": weight}
    return apply(Embedding(ids, weight), out, weight, op=layer_of(weight, "embedding"), saved=saved)


def embedding_result(ids: Buffer, weight: Operand, first: int = 0) -> Buffer:
    """Compute `embedding` outside the graph, from a table that begins with id `first`; zeros for other ids."""
    device = ids.device
    out = device.alloc((*ids.shape, weight.shape[1]), weight.dtype, Kind.ACTIVATION)
    device.kernel(0, device.backend.embedding, ids.array, weight.array, out.array, first)
    return out


@dataclass(frozen=True, slots=True)
class AddRows:
    """Saves the handle of the added rows, whose gradient is summed over the batch. Does not save x."""

    x_requires_grad: bool
    rows: Operand
    first: int = 0

    def backward(self, grad: Buffer) -> Grads:
        dx = grad if self.x_requires_grad else None
        if not self.rows.requires_grad:
            return dx, None
        device, drows = grad.device, self.rows.new_grad()
        used = slice(self.first, self.first + grad.shape[-2])
        if grad.shape[-2] < drows.shape[0]:
            device.kernel(0, device.backend.fill, drows.array, 0.0)
        device.kernel(grad.numel, device.backend.sum_to, grad.array, drows.array[used])
        return dx, drows


def add_rows(x: Tensor, rows: Operand, first: int = 0) -> Tensor:
    """Add T of `rows` to x, from number `first` on: learned positions. Shapes: x and result (B, T, D), rows (first + T
    or more, D).

    Raises: InputError for fewer rows than tokens, or another width.
    """
    tokens = x.shape[-2]
    if x.shape[-2:] != (min(tokens, rows.shape[0] - first), rows.shape[1]):
        raise InputError(f"add_rows: x of shape {x.shape} needs as many rows as tokens, of its width, not {rows.shape}")
    device, out = x.device, like(x)
    device.kernel(out.numel, device.backend.add, x.array, rows.array[first : first + tokens], out.array)
    rule = AddRows(x.requires_grad, rows, first)
    return apply(rule, out, x, rows, op=layer_of(rows, "add_rows"), saved={"rows": rows})


def add_row(x: Tensor, rows: Operand) -> Tensor:
    """Add the first of `rows` to every row of x: the token type of a text in one piece. Shapes: x and result (B, T, D),
    rows (R, D)."""
    device, out = x.device, like(x)
    device.kernel(out.numel, device.backend.add, x.array, rows.array[0], out.array)
    rule = AddRow(x.requires_grad, rows)
    return apply(rule, out, x, rows, op=layer_of(rows, "add_row"), saved={"rows": rows})


@dataclass(frozen=True, slots=True)
class AddRow:
    """Saves the handle of the added row, whose gradient is summed over all rows. Does not save x."""

    x_requires_grad: bool
    rows: Operand

    def backward(self, grad: Buffer) -> Grads:
        dx = grad if self.x_requires_grad else None
        if not self.rows.requires_grad:
            return dx, None
        device, drows = grad.device, self.rows.new_grad()
        device.kernel(0, device.backend.fill, drows.array, 0.0)
        device.kernel(grad.numel, device.backend.column_sum, rows_of(grad.array), drows.array[0])
        return dx, drows


@dataclass(frozen=True, slots=True)
class AddRowRuns:
    """Saves the handle of the added rows, whose gradient is summed over the rows of each position."""

    x_requires_grad: bool
    rows: Operand
    runs: Sequence[tuple[slice, slice]]

    def backward(self, grad: Buffer) -> Grads:
        dx = grad if self.x_requires_grad else None
        if not self.rows.requires_grad:
            return dx, None
        device, drows, own = grad.device, self.rows.new_grad(), rows_of(grad.array)
        device.kernel(0, device.backend.fill, drows.array, 0.0)
        _add_each(device, [(drows.array[there], own[here], drows.array[there]) for here, there in self.runs], own)
        return dx, drows


def add_row_runs(x: Tensor, rows: Operand, runs: Sequence[tuple[slice, slice]]) -> Tensor:
    """Compute `add_rows` for an x with some rows of a whole. Each run is a slice of x's B T rows and one of `rows` of
    equal length."""
    device, out = x.device, like(x)
    own, into = rows_of(x.array), rows_of(out.array)
    _add_each(device, [(own[here], rows.array[there], into[here]) for here, there in runs], into)
    rule = AddRowRuns(x.requires_grad, rows, runs)
    return apply(rule, out, x, rows, op=layer_of(rows, "add_rows"), saved={"rows": rows})


def _add_each(device: Device, adds: Sequence[tuple[Array, Array, Array]], whole: Array) -> None:
    """Add run by run in one kernel over `whole`: ranks may have different numbers of runs of as many rows."""
    add = device.backend.add

    def add_each() -> None:
        for arrays in adds:
            add(*arrays)

    device.kernels((work_of(add.__name__, whole.size, (whole, whole, whole)),), add_each)
