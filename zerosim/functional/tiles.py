"""Results of a map's tiles, put side by side: each tile computes some of every part's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.autograd import Node, Sink
from zerosim.tensor.tensor import Outline, Tensor, outline


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Saves nothing: the gradient's columns go back to the tiles that computed them."""

    tiles: Sequence[Outline]
    widths: Sequence[int]

    def backward(self, grad: Buffer) -> Grads:
        copy, grads = grad.device.backend.copy, []
        for index, tile in reversed(list(enumerate(self.tiles))):
            grads.append(tile.new_grad())
            for own, columns in _columns(self.widths, index, len(self.tiles)):
                grad.device.kernel(0, copy, rows_of(grad.array)[:, columns], rows_of(grads[-1].array)[:, own])
        return tuple(grads)


def side_by_side(x: Tensor, tiles: Sequence[Callable[[Tensor], Tensor]], widths: Sequence[int]) -> Tensor:
    """Return the tiles' results of x as one: for each part in turn, every tile's columns of it.

    `widths` are the columns of each part in a tile. One tile's result is live at a time, beside the whole. Backward
    visits the tiles from the last to the first.

    Shapes: x (..., I), a tile's result (..., sum of widths), the whole (..., as many times that as there are tiles).
    """
    out = like(x, *x.shape[:-1], sum(widths) * len(tiles))
    made = [_placed(tile(x), out, list(_columns(widths, i, len(tiles)))) for i, tile in enumerate(tiles)]
    node = Node(SideBySide([of for of, _ in made], widths), tuple(edge for _, edge in reversed(made)))
    return Tensor(out, node if any(of.requires_grad for of, _ in made) else None)


def _placed(y: Tensor, out: Buffer, places: Sequence[tuple[slice, slice]]) -> tuple[Outline, Node | Sink | None]:
    """Copy a tile's result to its columns; what the graph keeps of it."""
    for own, columns in places:
        y.device.kernel(0, y.device.backend.copy, rows_of(y.array)[:, own], rows_of(out.array)[:, columns])
    return outline(y), y.node


def _columns(widths: Sequence[int], index: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield for each part its columns in tile number `index` of `count`, and in the whole."""
    start = 0
    for width in widths:
        first = start * count + index * width
        yield slice(start, start + width), slice(first, first + width)
        start += width
