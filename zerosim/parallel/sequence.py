"""Sequence parallelism: what tensor parallelism replicates is cut by rows over the same t ranks.

(Korthikanti et al., arXiv 2205.05198, sections 4.2.2 and 4.3.) Norms, dropout and residuals work on B T / t rows of
(B T, D), which a rank holds as (B, T/t, D). f becomes an all-gather of rows before a column-parallel map, g a
reduce-scatter of rows after a row-parallel one; in backward they change places.

    per layer and micro-batch    6 all-gathers + 4 reduce-scatters of b s h: 10 b s h (t-1)/t elements per rank
                                 two of the gathers fetch the column-parallel inputs again, for their weights' gradients
    inputs kept whole            4 + 4, 8 b s h (t-1)/t, and 4 s b h (1 - 1/t) more bytes a layer in half types
    activations of a layer       s b h / t (34 + 5 a s / h) bytes, where tensor parallelism alone has 10 + 24/t + ...

Gradients of the norms, the positions and the row-parallel biases are each rank's rows' share: they are added over t
once a step (`across.add_shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim import functional as F
from zerosim.backends.kernels import Window
from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Kind
from zerosim.functional.common import Grads, rows_of
from zerosim.parallel.tensor import PURPOSE, Borders, TensorParallel
from zerosim.tensor.tensor import Operand, Tensor, apply, layer_of


class RowBorders(Borders):
    """f and g where each rank has (B, T/t, D) of what lies between the cut maps: f gathers rows, g scatters them."""

    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        return self._gather(comm, x)

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return self._scatter(comm, dx, Kind.ACTIVATION_GRAD)

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return self._scatter(comm, y, Kind.ACTIVATION)

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        return self._gather(comm, dy)

    def _gather(self, comm: Comm, x: Buffer) -> Buffer:
        """Every rank's rows: (B, T/t, D) to (B, T, D)."""
        whole = x.device.alloc((x.shape[0], x.shape[1] * comm.size, *x.shape[2:]), x.dtype, Kind.ACTIVATION)
        comm.all_gather(x.reshape(-1), out=whole.reshape(-1), purpose=PURPOSE)
        return whole

    def _scatter(self, comm: Comm, whole: Buffer, kind: Kind) -> Buffer:
        """The sum of what every rank has, of which each keeps its rows: (B, T, D) to (B, T/t, D)."""
        own = whole.device.alloc((whole.shape[0], whole.shape[1] // comm.size, *whole.shape[2:]), whole.dtype, kind)
        comm.reduce_scatter(whole.reshape(-1), out=own.reshape(-1), op="sum", purpose=PURPOSE)
        return own


class SequenceParallel(TensorParallel):
    """`keeps_gathered`: column-parallel maps keep their whole input for backward, and gather it once."""

    cuts_rows = True
    borders = RowBorders()

    def __init__(self, size: int, index: int, comm: Comm | None = None, *, keeps_gathered: bool = False) -> None:
        super().__init__(size, index, comm)
        self.keeps_gathered = keeps_gathered

    # -- between the linear maps -----------------------------------------------------------------------
    def dropout(
        self, x: Tensor, probability: float, key: tuple[int, int], op: str, *, keep_mask: bool = True
    ) -> Tensor:
        """The rows' part of the whole's mask."""
        numel = x.buffer.numel
        window = Window(self.index * numel, numel, 0)
        return F.dropout(x, probability, key, op=op, window=window, keep_mask=keep_mask)

    def add_rows(self, x: Tensor, rows: Operand) -> Tensor:
        """x's rows are number index B T/t and on of the whole's B T; row i has position i % T."""
        batch, own, _ = x.shape
        runs = position_runs(self.index * batch * own, batch * own, own * self.size)
        out, device = x.device.alloc(x.shape, x.dtype, Kind.ACTIVATION), x.device
        for here, there in runs:
            arrays = rows_of(x.array)[here], rows.array[there], rows_of(out.array)[here]
            device.kernel(arrays[2].size, device.backend.add, *arrays)
        rule = AddPositions(x.requires_grad, rows, runs)
        return apply(rule, out, x, rows, op=layer_of(rows, "add_rows"), saved={"rows": rows})


def position_runs(first: int, count: int, period: int) -> list[tuple[slice, slice]]:
    """Rows first .. first + count of a whole, whose row i has position i % period: runs of them, with positions."""
    runs = []
    at = 0
    while at < count:
        position = (first + at) % period
        length = min(period - position, count - at)
        runs.append((slice(at, at + length), slice(position, position + length)))
        at += length
    return runs


@dataclass(frozen=True, slots=True)
class AddPositions:
    """Saves the handle of what was added; its gradient is summed over the rows of each position."""

    x_requires_grad: bool
    rows: Operand
    runs: list[tuple[slice, slice]]

    def backward(self, grad: Buffer) -> Grads:
        device, drows, own = grad.device, self.rows.new_grad(), rows_of(grad.array)
        device.kernel(0, device.backend.fill, drows.array, 0.0)
        for here, there in self.runs:
            into = drows.array[there]
            device.kernel(into.size, device.backend.add, into, own[here], into)
        return grad if self.x_requires_grad else None, drows
