"""The rows that a rank works on: B T of them between the linear maps, or a part (sequence parallelism).

(B, T, D) is B T rows of D. Norms, dropout and residuals need one row at a time, so a group may divide the rows:
Korthikanti et al., arXiv 2205.05198, section 4.2.2. What depends on where a row stands in the whole goes through here:
learned positions, rotary ones, dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim import functional as F
from zerosim.backends.kernels import Window
from zerosim.tensor.tensor import Operand, Tensor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Part `index` of `parts` equal parts of the rows. A rank holds its part as (B, T / parts, D)."""

    parts: int = 1
    index: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other rows. Then a weight that works on rows gets a share of its gradient here."""
        return self.parts > 1

    def own(self, tokens: int) -> int:
        """Length of this rank's T dim, of T `tokens`."""
        return tokens // self.parts

    def padding(self, tokens: int) -> int:
        """Tokens that are missing to a multiple of the parts."""
        return -tokens % self.parts

    def positions(self, batch: int, own: int) -> list[tuple[slice, slice]]:
        """Runs of this rank's B * own rows, each with its positions. Row i of the whole has position i % T."""
        tokens, count = own * self.parts, batch * own
        runs, at = [], 0
        while at < count:
            position = (self.index * count + at) % tokens
            length = min(tokens - position, count - at)
            runs.append((slice(at, at + length), slice(position, position + length)))
            at += length
        return runs

    def add_positions(self, x: Tensor, table: Operand) -> Tensor:
        """x + each row's position. Shapes: x and result (B, T / parts, D), table (T or more, D)."""
        if not self.is_cut:
            return F.add_rows(x, table)
        return F.add_row_runs(x, table, self.positions(*x.shape[:2]))

    def rotary(self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, base: float) -> Tensor:
        """q and k turned by their positions. Between the maps of attention a rank has all rows of some heads."""
        return F.rotary(qkv, num_heads, num_kv_heads, base=base)

    def dropout(
        self, x: Tensor, probability: float, key: tuple[int, int], op: str, *, keep_mask: bool = True
    ) -> Tensor:
        """`functional.dropout` by these rows' part of the whole's mask."""
        numel = x.buffer.numel
        window = Window(self.index * numel, numel, 0) if self.is_cut else None
        return F.dropout(x, probability, key, op=op, window=window, keep_mask=keep_mask)


ALL_ROWS = OwnRows()
