"""The rows of a rank between the linear maps: all B T, or some of them (context and sequence parallelism).

(B, T, D) is B T rows of D. Norms, dropout and residuals need one row at a time, so groups may divide the rows. Context
parallelism divides the tokens of every row, everywhere. Sequence parallelism divides what is left among the ranks of
tp, between the cut maps (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Ops that depend on a row's position in
the whole are here: learned positions, rotary positions, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerosim import functional as F
from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Window
from zerosim.placement.context import WHOLE_ROWS, ContextCut
from zerosim.tensor.tensor import Operand, Tensor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Share `index` of `parts` equal shares of the rows that have the tokens of rank `place` of the `context`. A rank
    holds its share as (B, T / (c parts), D), c ranks in the context.

    Along `axes` other ranks have other rows: each computes a share of the gradient of weights that work on rows. Of
    other tokens the gradient is averaged with that of other rows, as ZeRO averages.
    """

    parts: int = 1
    index: int = 0
    axes: tuple[str, ...] = ()
    context: ContextCut = WHOLE_ROWS
    place: int = 0

    def own(self, tokens: int) -> int:
        """Return the length of this rank's T dim, for T `tokens`."""
        return tokens // (self.parts * self.context.ranks)

    def tokens(self, count: int) -> Sequence[range]:
        """Return the positions of this rank's tokens in a row of `count`, those of all shares."""
        return self.context.pieces(count, self.place)

    def padding(self, tokens: int) -> int:
        """Return the tokens missing to a multiple of the shares."""
        return -tokens % (self.parts * self.context.multiple)

    def by_row(self, tokens: int, first: int, count: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of rows `first` to `first` + `count` of this place's, each within one of B, with the number of its
        first row among the whole's B T, for T `tokens`."""
        pieces, each, at = self.tokens(tokens), tokens // self.context.ranks, 0
        while at < count:
            row, left = divmod(first + at, each)
            for piece in pieces:
                if left < len(piece):
                    length = min(len(piece) - left, count - at)
                    yield slice(at, at + length), row * tokens + piece[left]
                    at += length
                    break
                left -= len(piece)

    def runs(self, tokens: int, first: int, count: int) -> list[tuple[slice, int]]:
        """Return the same with as few runs as there can be."""
        found = list[tuple[slice, int]]()
        for here, at in self.by_row(tokens, first, count):
            if found and found[-1][1] + found[-1][0].stop - found[-1][0].start == at:
                before, start = found.pop()
                here, at = slice(before.start, here.stop), start
            found.append((here, at))
        return found

    def _of_share(self, x: Tensor) -> tuple[int, int, int]:
        """Return the arguments of `runs` for the rows of x (B, own T, D)."""
        batch, own, _ = x.shape
        return own * self.parts * self.context.ranks, self.index * batch * own, batch * own

    @property
    def is_all(self) -> bool:
        """Whether this rank has all rows."""
        return self.parts == self.context.ranks == 1

    def add_positions(self, x: Tensor, table: Operand, first: int = 0) -> Tensor:
        """Return x + each row's position, the first one being row `first` of the table. Shapes: x and result
        (B, own T, D), table (first + T or more, D)."""
        if self.is_all:
            return F.add_rows(x, table, first)
        tokens, start, count = self._of_share(x)
        places = [(here, first + at % tokens) for here, at in self.by_row(tokens, start, count)]
        return F.add_row_runs(x, table, [(here, slice(at, at + here.stop - here.start)) for here, at in places])

    def rotary(self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, rope: Rope, keeps: bool = False) -> Tensor:
        """Rotate q and k by their positions. Between the maps of attention a rank has all rows of some heads."""
        positions = self.tokens(qkv.shape[1] * self.context.ranks)
        return F.rotary(qkv, num_heads, num_kv_heads, rope=rope, positions=positions, keeps=keeps)

    def windows(self, x: Tensor, first: int, width: int) -> list[Window]:
        """Return the windows of x (B, own T, C), one after the other, in a mask of (B, T, width): its rows' columns
        from `first` on. None: it is all of the mask."""
        own = x.shape[-1]
        if self.is_all:
            return [Window(first, own, width)] if own < width else []
        runs = self.runs(*self._of_share(x))
        if own == width:
            return [Window(at * width, (here.stop - here.start) * width, 0) for here, at in runs]
        rows = (row for here, at in runs for row in range(at, at + here.stop - here.start))
        return [Window(row * width + first, own, 0) for row in rows]

    def dropout(
        self, x: Tensor, probability: float, key: tuple[int, int], op: str, *, keep_mask: bool = True
    ) -> Tensor:
        """Apply `functional.dropout` with these rows' windows of the whole's mask."""
        windows = self.windows(x, 0, x.shape[-1])
        return F.dropout(x, probability, key, op=op, windows=windows, keep_mask=keep_mask)


ALL_ROWS = OwnRows()
