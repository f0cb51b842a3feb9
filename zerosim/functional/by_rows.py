"""A layer that works on each row alone, run for some rows at a time: sequence tiling (ALST, arXiv 2506.13996, section
3.1). Forward saves the input. Backward runs the layer again for a tile, then the tile's backward, and adds up the
weights' gradients, each rounded after each tile. So the widths between the layer's maps exist for one tile alone.

Source: DeepSpeed's TiledMLP (runtime/sequence_parallel/ulysses_sp.py), whose tile is as many tokens as the model is
wide. Under recompute of whole blocks the layer runs forward three times, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, like, rows_of, spans
from zerosim.tensor.autograd import backward
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Leaf, Tensor, apply

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ByRows:
    """Saves x. The layer's weights collect their gradients while a tile's own graph is walked."""

    x: Readable
    layer: Layer
    each: int

    def backward(self, grad: Buffer) -> Grads:
        device, x, dx = grad.device, self.x.buffer, self.x.new_grad()
        for rows in spans(grad.numel // grad.shape[-1], self.each):
            leaf = Leaf()
            node = self.layer(Tensor(_tile(x, rows), leaf)).node
            assert node is not None
            backward(node, [_tile(grad, rows)])
            del node
            device.kernel(0, device.backend.copy, rows_of(leaf.take().array), rows_of(dx.array)[rows])
        return (dx,)


def by_rows(layer: Layer, x: Tensor, each: int, op: str) -> Tensor:
    """Return layer(x) for a `layer` of trained weights from rows to rows as wide, computed for `each` rows at a time.

    Shapes: x and result (..., D); the layer is given (1, `each` or fewer, D).
    """
    device, out = x.device, like(x)
    with device.no_grad():
        for rows in spans(out.numel // out.shape[-1], each):
            device.kernel(
                0, device.backend.copy, rows_of(layer(Tensor(_tile(x.buffer, rows))).array), rows_of(out.array)[rows]
            )
    return apply(ByRows(held(x), layer, each), out, x, op=op, saved={"input": held(x)})


def _tile(x: Buffer, rows: slice) -> Buffer:
    """View some rows of x (..., D) as (1, rows, D)."""
    width = x.shape[-1]
    return x.reshape(-1, width)[rows].reshape(1, -1, width)
