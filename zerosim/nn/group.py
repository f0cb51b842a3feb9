"""What layers ask of their tensor-parallel group: how weights are cut, and the ops that exchange.

`Alone` is the group of one: nothing is cut and nothing is sent, every op is the plain one. Groups of several:
`parallel/tensor.py`, `parallel/sequence.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim import functional as F
from zerosim.device.device import Buffer
from zerosim.placement.spec import Split
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Held, held
from zerosim.tensor.tensor import Operand, Tensor, apply


class Alone:
    """One rank holds whole weights and whole activations."""

    size = 1
    index = 0
    cuts_rows = False
    """Whether what lies between the cut linear maps (norms, dropout, residuals) is cut by rows."""

    def split(
        self, shape: tuple[int, ...], dim: int, *, parts: int = 1, pieces: int | None = None, padding: int = 0
    ) -> Split | None:
        """How a weight of this whole shape is cut along `dim` (`placement.spec.Split`); None: it is whole."""
        return None

    def embedding(self, ids: Buffer, table: Operand, split: Split | None) -> Tensor:
        """Rows of a token table that is cut by rows."""
        return F.embedding(ids, table)

    def add_rows(self, x: Tensor, rows: Operand) -> Tensor:
        """x + a row for each position; `rows` are whole."""
        return F.add_rows(x, rows)

    def dropout(
        self, x: Tensor, probability: float, key: tuple[int, int], op: str, *, keep_mask: bool = True
    ) -> Tensor:
        """Dropout between the cut linear maps."""
        return F.dropout(x, probability, key, op=op, keep_mask=keep_mask)

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
        """Any map of weights that are cut by outputs: `run` makes its result of all rows of x, `rule_of` its rule."""
        return apply(rule_of(held(x)), run(x), x, *weights, op=op, saved={"input": held(x)})

    def row_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        """x @ weight + bias, of a weight that is cut by inputs and an x of which each rank has some columns."""
        return F.linear(x, weight, bias, transposed=transposed)

    def sum_over(self, buffer: Buffer) -> None:
        """Add up what every rank has, in place."""

    def own_rows(self, split: Split | None) -> tuple[int, int | None]:
        """Of a table that is cut by rows: where this rank's begin, and how many are no padding; None: all."""
        return 0, None

    def cross_entropy_sum(
        self, logits: Buffer, targets: Buffer, split: Split | None, *, fused: bool = False
    ) -> tuple[Buffer, Buffer]:
        """As `functional.cross_entropy_sum`, of logits by a table that is cut by rows. `fused`: in fewer exchanges."""
        return F.cross_entropy_sum(logits, targets)

    def whole_logits(self, logits: Tensor, split: Split | None) -> Buffer:
        """All columns of logits (..., V), padding left out."""
        return logits.buffer


ALONE = Alone()
