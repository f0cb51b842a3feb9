"""The rows of a rank between the linear maps: all B T, or some of them (sequence parallelism).

(B, T, D) is B T rows of D. Norms, dropout and residuals need one row at a time, so a group may divide the rows:
Korthikanti et al., arXiv 2205.05198, section 4.2.2. Ops that depend on a row's position in the whole are here:
learned positions, rotary positions, dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim import functional as F
from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Window
from zerosim.tensor.tensor import Operand, Tensor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Share `index` of `parts` equal shares of the rows. A rank holds its share as (B, T / parts, D).

    Along `axes` other ranks have other rows: each computes a share of the gradient of weights that work on rows.
    """

    parts: int = 1
    index: int = 0
    axes: tuple[str, ...] = ()

    def own(self, tokens: int) -> int:
        """Return the length of this rank's T dim, for T `tokens`."""
        return tokens // self.parts

    def tokens(self, count: int) -> Sequence[range]:
        """Return the positions of this rank's tokens in a row of `count`: all of them."""
        return (range(count),)

    def padding(self, tokens: int) -> int:
        """Return the tokens missing to a multiple of the shares."""
        return -tokens % self.parts

    def positions(self, batch: int, own: int) -> list[tuple[slice, slice]]:
        """Return runs of this rank's B * own rows, each with its positions. Row i of the whole has position i % T."""
        tokens, count = own * self.parts, batch * own
        runs, at = [], 0
        while at < count:
            position = (self.index * count + at) % tokens
            length = min(tokens - position, count - at)
            runs.append((slice(at, at + length), slice(position, position + length)))
            at += length
        return runs

    def add_positions(self, x: Tensor, table: Operand, first: int = 0) -> Tensor:
        """Return x + each row's position, the first one being row `first` of the table. Shapes: x and result
        (B, T / parts, D), table (first + T or more, D)."""
        if self.parts == 1:
            return F.add_rows(x, table, first)
        runs = self.positions(*x.shape[:2])
        return F.add_row_runs(x, table, [(here, slice(at.start + first, at.stop + first)) for here, at in runs])

    def rotary(self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, rope: Rope, keeps: bool = False) -> Tensor:
        """Rotate q and k by their positions. Between the maps of attention a rank has all rows of some heads."""
        positions = self.tokens(qkv.shape[1])
        return F.rotary(qkv, num_heads, num_kv_heads, rope=rope, positions=positions, keeps=keeps)

    def dropout(
        self, x: Tensor, probability: float, key: tuple[int, int], op: str, *, keep_mask: bool = True
    ) -> Tensor:
        """Apply `functional.dropout` with these rows' window of the whole's mask."""
        numel = x.buffer.numel
        window = Window(self.index * numel, numel, 0) if self.parts > 1 else None
        return F.dropout(x, probability, key, op=op, window=window, keep_mask=keep_mask)


ALL_ROWS = OwnRows()
