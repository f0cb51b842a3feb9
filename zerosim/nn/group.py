"""The group of ranks that divide a layer's work, and each rank's share: linear maps, rows, attention.

A layer does not know that it is cut. It asks its group for a map, for a row's position, for attention. `Group()` is the
group of one rank. Larger groups use the maps of `parallel/tensor.py`, and hold some of the rows instead of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from zerosim import functional as F
from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.device.device import Buffer
from zerosim.functional.common import kept_for
from zerosim.functional.fp8_recipes import Products
from zerosim.functional.router import Chosen
from zerosim.nn.balance import Balance, Noted
from zerosim.nn.documents import Documents
from zerosim.nn.kept_routes import KeptRoutes
from zerosim.nn.rows import ALL_ROWS, OwnRows
from zerosim.placement.mesh import Mesh
from zerosim.placement.split import Splits
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Outline, Saved, Tensor, apply, outline


class WholeMaps:
    """Linear maps, the token table and the loss, on one rank: every weight is whole, every op the plain one."""

    size = 1
    index = 0
    axes: tuple[str, ...] = ()  # the mesh axis that cuts them, if there is one
    cuts_rows = False  # whether a rank has some of the rows between maps that are cut

    def split(self, shape: tuple[int, ...], dim: int, **how: Any) -> Splits:
        """Return how a weight of this whole shape is cut along `dim`; `how`: other fields of its `Split`, into as many
        pieces as ranks unless it says otherwise."""
        return ()

    def summed(self, rows: OwnRows) -> tuple[str, ...]:
        """Return the axes along which others have shares of a map's gradient: a whole one reads this rank's `rows`
        alone."""
        return rows.axes

    def split_vocabulary(self, shape: tuple[int, ...]) -> Splits:
        """Return how a table of this whole shape is cut by its rows, one for each token."""
        return ()

    def embedding(self, ids: Buffer, table: Operand, splits: Splits) -> Tensor:
        """Look up rows of a token table that is cut by rows."""
        return F.embedding(ids, table)

    def enter(self, x: Tensor) -> Tensor:
        """Return x for a layer whose inner widths are cut."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Return the result of such a layer, of which each rank has a share."""
        return y

    def inside(self) -> WholeMaps:
        """Return the maps inside such a layer, between `enter` and `leave`."""
        return self

    def column_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Return x @ weight + bias for a weight cut by outputs: each rank has some columns of the result."""
        return F.linear(x, weight, bias, transposed=transposed)

    def gather_columns(self, y: Tensor) -> Tensor:
        """Return all columns of such a result, for the rows that this rank works on between the maps."""
        return y

    def packed_linear(self, x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand] = ()) -> Tensor:
        """Return `column_linear` of several weights, side by side. `biases`: one for each, or none."""
        return F.packed_linear(x, weights, biases)

    def columns(
        self,
        x: Tensor,
        weights: Sequence[Operand],
        run: Callable[[Tensor], Buffer],
        rule_of: Callable[..., Rule],
        op: str,
        saved: Mapping[str, Buffer] = MappingProxyType({}),
        *,
        reads: bool = True,
    ) -> Tensor:
        """Apply any map with weights cut by outputs: `run` computes its result from all rows of x, and adds the rule's
        other saved buffers to `saved`. `rule_of` returns its rule, which `reads` x or not."""
        kept = held(x) if reads else outline(x)
        return apply(rule_of(kept), run(x), x, *weights, op=op, saved={"input": kept, **saved})

    def linear_columns(
        self,
        x: Tensor,
        weights: Sequence[Operand],
        run: Callable[[Tensor], Buffer],
        rule_of: Callable[[Readable | Outline], Rule],
        op: str,
        saved: Mapping[str, Buffer] = MappingProxyType({}),
        readers: Sequence[Operand] | None = None,
    ) -> Tensor:
        """Apply `columns` with a rule that reads x only for the gradients of `readers`, by default of all weights.
        `run` adds the rule's other saved buffers to `saved`."""
        kept, out = kept_for(weights if readers is None else readers, x), run(x)
        return apply(rule_of(kept), out, x, *weights, op=op, saved={"input": kept, **saved})

    def linear_rows(
        self,
        x: Tensor,
        weight: Operand,
        bias: Operand | None,
        run: Callable[[Tensor, Operand | None], Buffer],
        rule_of: Callable[[Readable | Outline, Operand | None], Rule],
        op: str,
        more: Sequence[Operand] = (),
        saved: Mapping[str, Buffer] = MappingProxyType({}),
        readers: Sequence[Operand] | None = None,
    ) -> Tensor:
        """Do the same for a map cut by inputs, with its bias and `more` weights."""
        kept, out = kept_for([weight, *more] if readers is None else readers, x), run(x, bias)
        inputs = (x, weight, *more) if bias is None else (x, weight, bias, *more)
        return apply(rule_of(kept, bias), out, *inputs, op=op, saved={"input": kept, **saved})

    def row_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        """Return x @ weight + bias for a weight cut by inputs and an x of which each rank has some columns."""
        return F.linear(x, weight, bias, transposed=transposed)

    def behind(
        self,
        x: Tensor,
        out: Buffer,
        weights: Sequence[Operand],
        entering: Any,
        rule_of: Callable[..., Rule],
        op: str,
        saved: Saved,
    ) -> Tensor:
        """Return the result of a map of all ranks' rows, computed already, with a rule of what has `entered` again in
        backward."""
        raise NotImplementedError("the rows are not cut")

    def all_rows(self, buffer: Buffer) -> Buffer:
        """Return all ranks' rows of a matrix (rows, columns)."""
        return buffer

    def sum_over(self, buffer: Buffer) -> None:
        """Add up every rank's buffer, in place."""

    def largest(self, buffer: Buffer) -> None:
        """Take the largest of every rank's buffer, in place."""

    def vocabulary(self, splits: Splits) -> tuple[int, int | None]:
        """Return, for a table cut by rows, this rank's first row and its number of rows without padding; None: all."""
        return 0, None

    def cross_entropy_sum(
        self,
        logits: Buffer,
        targets: Buffer,
        splits: Splits,
        *,
        fused: bool = False,
        form: LogitForm = PLAIN,
    ) -> tuple[Buffer, Buffer]:
        """Compute `functional.cross_entropy_sum` for logits of a table cut by rows. `fused`: in fewer exchanges."""
        return F.cross_entropy_sum(logits, targets, form)

    def whole_logits(self, logits: Tensor, splits: Splits) -> Buffer:
        """Return all columns of logits (..., V), without padding."""
        return logits.buffer


WHOLE_MAPS = WholeMaps()


class Way(Noted, Protocol):
    """How rows came to experts."""

    @property
    def counts(self) -> tuple[int, ...]: ...


Weigh = Callable[[Tensor], Tensor]
"""Multiplies each row by its weight."""
RunsBeside = Callable[[Tensor], Tensor]
"""Runs beside an exchange. It is given what was sent, and returns what backward visits before that arrives."""


class WholeExperts:
    """Experts on one rank: all of them are here, and rows go nowhere."""

    size = 1
    axes: tuple[str, ...] = ()  # the mesh axes that divide the experts, where they are not those of maps
    grad_scale = 1.0  # the factor of the gradient of an expert's weight
    overlaps = False  # whether something else runs beside the exchange of rows

    def stack(self, maps: WholeMaps, shape: tuple[int, ...], *, of: int, parts: int = 1) -> dict[str, Any]:
        """Return the keywords for `declare` of a stack of this whole shape: (E, O, I), one matrix for each expert, or
        (E, O). `maps` cut the experts' width, which is dim `of`, in `parts` equal ones side by side."""
        return {"splits": maps.split(shape, of, parts=parts)}

    def adapters(self, shape: tuple[int, ...], dim: int, parts: int) -> dict[str, Any]:
        """Return the keywords for `declare` of experts' adapters of this whole shape: in each of `parts` of dim `dim`
        are all experts' in turn."""
        return {}

    def width_of(self, maps: WholeMaps) -> tuple[int, int]:
        """Return how many ranks cut an expert's width, and which of them this one is."""
        return maps.size, maps.index

    def num_local(self, experts: int) -> int:
        """Return how many of the experts are here."""
        return experts

    def dispatch(
        self, x: Tensor, weights: Tensor, chosen: Chosen, *, inside: bool, beside: RunsBeside | None = None
    ) -> tuple[Way, Tensor, Tensor]:
        """Return the way of rows to the experts that are here, these rows, sorted by expert, and the weight of each;
        `inside`: which the experts apply, else `combine`. `beside` runs while rows are on their way."""
        way = chosen.routing()
        return way, F.dispatch(x, way), F.row_weights(weights, way)

    def combine(
        self, way: Any, rows: Tensor, weigh: Weigh | None, shape: tuple[int, ...], beside: RunsBeside | None = None
    ) -> Tensor:
        """Bring results the same way back, and weigh them. Return each token's sum of them, in this shape. `beside`
        runs while they are on their way."""
        return F.combine(rows if weigh is None else weigh(rows), way, shape)


WHOLE_EXPERTS = WholeExperts()


@dataclass(frozen=True, slots=True)
class Group:
    """A layer's group, with one member for each kind of division.

    maps        linear maps and the vocabulary: whole, or cut over `tp`
    rows        which rows this rank works on between the maps
    attention   causal attention over packed q|k|v: `functional.attention`, or a function of its parameters
    chunked     the same within chunks of a row, of the model's length; None if a row is one
    device_mesh  all ranks
    experts     which experts are here, and how rows get to them
    balance     the loads and the biases of their routers, which last from step to step; None: there are none
    routes      what routers of recomputed blocks return, kept for the second forward; None: they run again
    products    how the linear maps of the block of a number multiply; None: in the weights' own format
    documents   where several of them begin in a row; None: a row is one
    """

    maps: WholeMaps = WHOLE_MAPS
    rows: OwnRows = ALL_ROWS
    attention: Callable[..., Tensor] = F.attention
    chunked: Callable[..., Tensor] | None = None
    device_mesh: Mesh = Mesh()  # noqa: RUF009  frozen
    documents: Documents | None = None
    experts: WholeExperts = WHOLE_EXPERTS
    balance: Balance | None = None
    routes: KeptRoutes | None = None
    products: Callable[[int], Products | None] = lambda number: None


ONE_RANK = Group()
