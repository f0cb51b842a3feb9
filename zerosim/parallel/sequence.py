"""Sequence parallelism: activations that tensor parallelism replicates are cut by rows over the same t ranks.

(Korthikanti et al., arXiv 2205.05198, sections 4.2.2 and 4.3.) Norms, dropout and residuals work on B T / t rows of
(B T, D), which a rank holds as (B, T/t, D). f becomes an all-gather of rows before a column-parallel map, g a
reduce-scatter of rows after a row-parallel one; in backward they change places.

    per layer and microbatch     6 all-gathers + 4 reduce-scatters of b s h: 10 b s h (t-1)/t elements per rank
                                 two of the gathers fetch the column-parallel inputs again, for their weights' gradients
    inputs kept whole            4 + 4, 8 b s h (t-1)/t, and 4 s b h (1 - 1/t) more bytes a layer in half types
    activations of a layer       s b h / t (34 + 5 a s / h) bytes, where tensor parallelism alone has 10 + 24/t + ...

Sequence parallelism is two values: `TensorParallel` with the f and g below, and `OwnRows(t, index)` (`nn/rows.py`),
from which follow positions, dropout masks and the shape between pipeline stages. Gradients of the norms, the positions
and the row-parallel biases are shares of one gradient: they are added over t once a step (`across.add_shares`).
"""

from __future__ import annotations

from dataclasses import replace

from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Kind
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.tensor import PURPOSE, Borders, TensorParallel


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the cut of the rows between the maps that are cut over tp."""
    maps = made.group.maps
    if not config.parallel.sequence_parallel or not isinstance(maps, TensorParallel):
        return made
    maps = maps.bordered(RowBorders(), keeps_gathered=config.parallel.keep_gathered)
    rows = replace(made.group.rows, parts=maps.size, index=maps.index, axes=maps.axes)
    return made._replace(group=replace(made.group, maps=maps, rows=rows))


class RowBorders(Borders):
    """f and g where each rank has (B, T/t, D) between the cut maps: f gathers rows, g scatters them."""

    cuts_rows = True

    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        return self._gather(comm, x)

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return self._scatter(comm, dx, Kind.ACTIVATION_GRAD)

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return self._scatter(comm, y, Kind.ACTIVATION)

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        return self._gather(comm, dy)

    def _gather(self, comm: Comm, x: Buffer) -> Buffer:
        """Gather every rank's rows: (B, T/t, D) to (B, T, D)."""
        whole = x.device.alloc((x.shape[0], x.shape[1] * comm.size, *x.shape[2:]), x.dtype, Kind.ACTIVATION)
        comm.all_gather(x.reshape(-1), out=whole.reshape(-1), purpose=PURPOSE)
        return whole

    def _scatter(self, comm: Comm, whole: Buffer, kind: Kind) -> Buffer:
        """Add up all ranks' values and keep the local rows: (B, T, D) to (B, T/t, D)."""
        own = whole.device.alloc((whole.shape[0], whole.shape[1] // comm.size, *whole.shape[2:]), whole.dtype, kind)
        comm.reduce_scatter(whole.reshape(-1), out=own.reshape(-1), op="sum", purpose=PURPOSE)
        return own
