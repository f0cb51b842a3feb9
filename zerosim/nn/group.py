"""The ranks among which a layer's work is divided, and what each of them does: linear maps, rows, attention.

A layer never knows that it is cut. It asks its group for a map, for a row's position, for attention. `Group()` is the
group of one rank. Larger groups put `parallel/tensor.py` in the place of `WholeMaps`, and part of the rows in the
place of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerosim import functional as F
from zerosim.device.device import Buffer
from zerosim.nn.rows import ALL_ROWS, OwnRows
from zerosim.placement.spec import Split
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Held, held
from zerosim.tensor.tensor import Operand, Tensor, apply


class WholeMaps:
    """Linear maps, the token table and the loss, on one rank: every weight is whole, every op the plain one."""

    size = 1
    index = 0

    def split(
        self, shape: tuple[int, ...], dim: int, *, parts: int = 1, pieces: int | None = None, padding: int = 0
    ) -> Split | None:
        """How a weight of this whole shape is cut along `dim` (`placement.spec.Split`); None: it is whole."""
        return None

    def split_vocabulary(self, shape: tuple[int, ...]) -> Split | None:
        """How a table of this whole shape is cut by its rows, one for each token."""
        return None

    def embedding(self, ids: Buffer, table: Operand, split: Split | None) -> Tensor:
        """Rows of a token table that is cut by rows."""
        return F.embedding(ids, table)

    def column_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        """x @ weight + bias, of a weight that is cut by outputs: each rank has some columns of the result."""
        return F.linear(x, weight, bias, transposed=transposed)

    def packed_linear(self, x: Tensor, weights: Sequence[Operand]) -> Tensor:
        """`column_linear` of several weights, side by side."""
        return F.packed_linear(x, weights)

    def columns(
        self,
        x: Tensor,
        weights: Sequence[Operand],
        run: Callable[[Tensor], Buffer],
        rule_of: Callable[[Held], Rule],
        op: str,
    ) -> Tensor:
        """Any map of weights that are cut by outputs: `run` makes its result of all rows of x, `rule_of` its rule,
        which reads x."""
        return apply(rule_of(held(x)), run(x), x, *weights, op=op, saved={"input": held(x)})

    def row_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        """x @ weight + bias, of a weight that is cut by inputs and an x of which each rank has some columns."""
        return F.linear(x, weight, bias, transposed=transposed)

    def sum_over(self, buffer: Buffer) -> None:
        """Add up what every rank has, in place."""

    def vocabulary(self, split: Split | None) -> tuple[int, int | None]:
        """Of a table that is cut by rows: this rank's first row, and its rows without padding; None: all."""
        return 0, None

    def cross_entropy_sum(
        self, logits: Buffer, targets: Buffer, split: Split | None, *, fused: bool = False
    ) -> tuple[Buffer, Buffer]:
        """As `functional.cross_entropy_sum`, of logits by a table that is cut by rows. `fused`: in fewer exchanges."""
        return F.cross_entropy_sum(logits, targets)

    def whole_logits(self, logits: Tensor, split: Split | None) -> Buffer:
        """All columns of logits (..., V), padding left out."""
        return logits.buffer


WHOLE_MAPS = WholeMaps()


@dataclass(frozen=True, slots=True)
class Group:
    """What a layer asks for, a part for each kind of division.

    maps        linear maps and the vocabulary: whole, or cut over `tp`
    rows        which rows this rank works on between the maps
    attention   causal attention over packed q|k|v: `functional.attention`, or a function of its parameters
    """

    maps: WholeMaps = WHOLE_MAPS
    rows: OwnRows = ALL_ROWS
    attention: Callable[..., Tensor] = F.attention


ONE_RANK = Group()
