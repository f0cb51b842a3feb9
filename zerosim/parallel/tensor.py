"""Tensor parallelism: every linear map of a block is cut over t ranks (Megatron-LM, arXiv 1909.08053, section 3).

    column-parallel   W by outputs, [W1 | W2 ...]: y_i = x W_i.       f: backward all-reduces x's gradient
    row-parallel      W by inputs, the rows of W_i: y = sum of x_i W_i. g: forward all-reduces the result

Attention is column-parallel by heads (q, k and v are cut apart), then row-parallel; so is the feed-forward. Norms,
dropout and residuals between them are the same on every rank. The token table is cut by rows of the vocabulary: a rank
looks up its own ids and g adds the results; the head's logits are columns by rank, and the loss needs three numbers for
each token from all of them (section 3, "Output embedding").

    all-reduces per layer and microbatch     4 of b s h: two in forward, two in backward; 6 with full recompute
    per model                                1 of b s h for the table, 1 for the head, 3 of b s in fp32 for the loss
    volume of each, per rank                 2 (t-1)/t of its elements

The bias of a row-parallel map is added once, after the reduction. Every all-reduce leaves the same bits on every rank,
so replicated values stay equal without being sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import ADD_BIAS, work_of
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, bias_grad, kept_for, rows_of
from zerosim.functional.embedding import Embedding, embedding_result
from zerosim.functional.linear import Linear, PackedLinear, linear_result, packed_linear_result
from zerosim.functional.loss import form_rows
from zerosim.nn.fp8 import Entering
from zerosim.nn.group import WholeMaps
from zerosim.nn.rows import OwnRows
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.split import Split, Splits
from zerosim.tensor.autograd import Rule
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Leaf, Operand, Outline, Saved, Tensor, apply, layer_of, outline

PURPOSE = "activations"


class Borders:
    """f and g: activations enter the part of a layer that is cut over ranks through f, and leave it through g.

    Each takes a buffer and returns one, the same or another.
    """

    cuts_rows = False

    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        """Return all of x for a column-parallel map."""
        return x

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        """Add up the ranks' shares of x's gradient, one from each rank's columns."""
        comm.all_reduce(dx, op="sum", purpose=PURPOSE)
        return dx

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        """Add up the ranks' shares of a row-parallel map's result, one from each rank's rows."""
        comm.all_reduce(y, op="sum", purpose=PURPOSE)
        return y

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        """Return all of the result's gradient."""
        return dy


class NoBorders(Borders):
    """Neither f nor g: a layer inside another one, which has them."""

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return dx

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return y


class TensorParallel(WholeMaps):
    """Member `index` of a group of `size`. Without a `comm` it describes how weights are cut, and runs nothing.

    borders          f and g
    keeps_gathered   a column-parallel map keeps its input for backward as f gave it; without, f gives it again
    pads_vocab       the token table is padded as Megatron's (`vocab_padding`)
    """

    axes = ("tp",)

    def __init__(
        self, size: int, index: int, comm: Comm | None, borders: Borders, *, keeps_gathered: bool, pads_vocab: bool
    ) -> None:
        self.size = size
        self.index = index
        self._comm = comm
        self.borders = borders
        self.cuts_rows = borders.cuts_rows and not keeps_gathered
        self.keeps_gathered = keeps_gathered
        self.pads_vocab = pads_vocab

    def bordered(self, borders: Borders, *, keeps_gathered: bool) -> TensorParallel:
        """Return the same maps with another f and g."""
        size, index, pads = self.size, self.index, self.pads_vocab
        return TensorParallel(size, index, self._comm, borders, keeps_gathered=keeps_gathered, pads_vocab=pads)

    @property
    def comm(self) -> Comm:
        assert self._comm is not None, "a model that was built for its layout alone does not run"
        return self._comm

    def split(self, shape: tuple[int, ...], dim: int, **how: Any) -> Splits:
        return (Split(shape, dim, **{"pieces": self.size, "axis": self.axes[0], **how}),)

    def summed(self, rows: OwnRows) -> tuple[str, ...]:
        return ()

    def split_vocabulary(self, shape: tuple[int, ...]) -> Splits:
        return self.split(shape, 0, padding=vocab_padding(shape[0], self.size, padded=self.pads_vocab))

    def sum_over(self, buffer: Buffer) -> None:
        self.comm.all_reduce(buffer, op="sum", purpose=PURPOSE)

    def largest(self, buffer: Buffer) -> None:
        self.comm.all_reduce(buffer, op="max", purpose=PURPOSE)

    def all_rows(self, buffer: Buffer) -> Buffer:
        rows, columns = buffer.shape
        return self.borders.f_forward(self.comm, buffer.reshape(1, rows, columns)).reshape(-1, columns)

    # -- f and g ------------------------------------------------------------------------------------
    def column_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        return self.linear_columns(
            x,
            (weight,) if bias is None else (weight, bias),
            lambda whole: linear_result(whole, weight, bias, transposed=transposed),
            lambda whole: Linear(whole, weight, bias, transposed),
            layer_of(weight, "linear"),
        )

    def gather_columns(self, y: Tensor) -> Tensor:
        (batch, tokens, each), device, cuts = y.shape, y.device, self.borders.cuts_rows
        whole = self.comm.all_gather(y.buffer.reshape(-1), kind=Kind.TEMP, purpose=PURPOSE).reshape(-1, each)
        own = tokens // self.size if cuts else tokens
        out = device.alloc((batch, own, each * self.size), y.dtype, Kind.ACTIVATION)
        into, count, first = rows_of(out.array), batch * own, batch * own * self.index if cuts else 0
        for member in range(self.size):
            at = member * batch * tokens + first
            columns = into[:, member * each : (member + 1) * each]
            device.kernel(0, device.backend.copy, whole.array[at : at + count], columns)
        return apply(Columns(outline(y), self), out, y, op="gather_columns")

    def packed_linear(self, x: Tensor, weights: Sequence[Operand], biases: Sequence[Operand] = ()) -> Tensor:
        return self.linear_columns(
            x,
            (*weights, *biases),
            lambda whole: packed_linear_result(whole, weights, biases),
            lambda whole: PackedLinear(whole, weights, biases),
            layer_of(weights[0], "packed_linear"),
        )

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
        whole = self.entered(x)
        kept = held(whole if self.keeps_gathered else x) if reads else outline(whole)
        return self.behind(x, run(whole), weights, kept, rule_of, op, {"input": kept, **saved})

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
        whole = self.entered(x)
        kept: Readable | Outline = outline(whole)
        if any(weight.requires_grad for weight in (weights if readers is None else readers)):
            kept = held(whole if self.keeps_gathered else x)
        return self.behind(x, run(whole), weights, kept, rule_of, op, {"input": kept, **saved})

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
        return apply(F(entering, self, rule_of), out, x, *weights, op=op, saved=saved)

    def entered(self, x: Any) -> Any:
        """Return x after f, or what knows itself how it enters."""
        if isinstance(x, Entering):
            return x.entered()
        whole = self.borders.f_forward(self.comm, x.buffer)
        return x if isinstance(x, Tensor) and whole is x.buffer else Tensor(whole, Leaf() if x.requires_grad else None)

    def enter(self, x: Tensor) -> Tensor:
        whole = self.borders.f_forward(self.comm, x.buffer)
        entered = apply(Enter(self), whole, x, op="enter")
        entered.discarded = x.discarded if whole is x.buffer else None
        return entered

    def leave(self, y: Tensor) -> Tensor:
        out = self.borders.g_forward(self.comm, y.buffer)
        return apply(Leave(self), out, y, op="leave")

    def inside(self) -> TensorParallel:
        return self.bordered(NoBorders(), keeps_gathered=True)

    def row_linear(
        self, x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False
    ) -> Tensor:
        return self.linear_rows(
            x,
            weight,
            bias,
            lambda x, bias: linear_result(x, weight, bias, transposed=transposed),
            lambda kept, bias: Linear(kept, weight, bias, transposed),
            layer_of(weight, "linear"),
        )

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
        out = self.borders.g_forward(self.comm, run(x, None))
        if bias is not None:
            arrays = out.array, bias.array, out.array
            work = work_of("add", out.numel, arrays)._replace(name=ADD_BIAS)
            out.device.kernels((work,), out.device.backend.add, *arrays)
        inputs = (x, weight, *more) if bias is None else (x, weight, *more, bias)
        kept = kept_for([weight, *more] if readers is None else readers, x)
        rule = G(rule_of(kept, None), bias, self)
        return apply(rule, out, *inputs, op=op, saved={"input": kept, **saved})

    # -- the vocabulary ------------------------------------------------------------------------------
    def embedding(self, ids: Buffer, table: Operand, splits: Splits) -> Tensor:
        first, _ = self.vocabulary(splits)
        out = self.borders.g_forward(self.comm, embedding_result(ids, table, first))
        saved: Saved = {"ids": ids, "weight": table}
        rule = G(Embedding(ids, table, first), None, self)
        return apply(rule, out, table, op=layer_of(table, "embedding"), saved=saved)

    def cross_entropy_sum(
        self,
        logits: Buffer,
        targets: Buffer,
        splits: Splits,
        *,
        fused: bool = False,
        form: LogitForm = PLAIN,
    ) -> tuple[Buffer, Buffer]:
        """Return the loss without moving logits: ranks exchange the maximum, the target's logit and the sum of
        exponentials of every row, `fused` the latter two together. Padding is outside of the softmax."""
        (first, columns), device = self.vocabulary(splits), logits.device
        k, stats, ids = device.backend, compute_dtype(logits.dtype), targets.array.reshape(-1)
        own = rows_of(logits.array)[:, :columns]
        rows = own.shape[0]
        top, both = device.alloc((rows,), stats, Kind.TEMP), device.alloc((2 * rows,), stats, Kind.TEMP)
        picked, sums = both[:rows], both[rows:]
        if columns:
            device.kernel(own.size, k.max_to, own, top.array.reshape(rows, 1))
        else:
            device.kernel(0, k.fill, top.array, -math.inf)
        self.comm.all_reduce(top, op="max", purpose=PURPOSE)
        form_rows(top, form)  # a larger logit stays larger
        arrays = own, ids, first, top.array, sums.array, picked.array
        device.kernel((3 + form.flops) * own.size, k.cross_entropy_shares, *arrays, form)
        for numbers in [both] if fused else [picked, sums]:
            self.sum_over(numbers)
        lse = device.alloc((rows,), stats, Kind.ACTIVATION)
        device.kernel(rows, k.log, sums.array, lse.array)
        device.kernel(rows, k.add, lse.array, top.array, lse.array)
        device.kernel(rows, k.subtract, lse.array, picked.array, sums.array)
        total = device.alloc((1,), stats, Kind.TEMP)
        device.kernel(rows, k.sum_to, sums.array, total.array)
        return total, lse

    def whole_logits(self, logits: Tensor, splits: Splits) -> Buffer:
        """Gather each rank's columns of the logits; for generation, which needs one row of them."""
        own, rows = rows_of(logits.array), logits.buffer.numel // logits.shape[-1]
        device = logits.device
        sent = device.alloc((logits.shape[-1], rows), logits.dtype, Kind.TEMP)  # columns first: gathered in order
        device.kernel(0, device.backend.copy, own.T, sent.array)
        flat = self.comm.all_gather(sent.reshape(-1), kind=Kind.TEMP, purpose=PURPOSE)
        vocab = splits[0].shape[0]
        whole = device.alloc((*logits.shape[:-1], vocab), logits.dtype, Kind.TEMP)
        device.kernel(0, device.backend.copy, flat.array.reshape(-1, rows)[:vocab].T, rows_of(whole.array))
        return whole

    def vocabulary(self, splits: Splits) -> tuple[int, int]:
        """Return this rank's first row of a table that is cut by rows, and its number of rows without padding."""
        return splits[0].span(self.index, self.size)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add linear maps that are cut over tp."""
    mesh = made.group.device_mesh
    if mesh.tp == 1:
        return made
    index, comm = mesh.index(place.rank, "tp"), None if place.groups is None else place.groups("tp")
    pads = config.parallel.pad_vocab
    maps = TensorParallel(mesh.tp, index, comm, Borders(), keeps_gathered=True, pads_vocab=pads)
    return made._replace(group=replace(made.group, maps=maps))


def vocab_padding(vocab: int, size: int, *, padded: bool) -> int:
    """Return how many rows are added to a token table: up to a multiple of 128 t, as Megatron pads it, or none."""
    return -vocab % (128 * size) if padded else 0


@dataclass(frozen=True, slots=True)
class F:
    """f and the column-parallel map after it. Saves the map's whole input or, where f gathers it again, this rank's
    rows; nothing where no weight is trained."""

    held: Readable | Outline | Entering
    group: TensorParallel
    rule_of: Callable[..., Rule]

    def backward(self, grad: Buffer) -> Grads:
        group = self.group
        whole: Any = self.held
        if not group.keeps_gathered and not isinstance(whole, Outline):
            whole = group.entered(whole)
        dx, *dweights = self.rule_of(whole).backward(grad)
        del whole
        return None if dx is None else group.borders.f_backward(group.comm, dx), *dweights


@dataclass(frozen=True, slots=True)
class Columns:
    """All ranks' columns of a column-parallel map, gathered: each rank takes its own of the gradient, of all rows."""

    y: Outline
    group: TensorParallel

    def backward(self, grad: Buffer) -> Grads:
        whole, dy = self.group.borders.g_backward(self.group.comm, grad), self.y.new_grad()
        first, each = self.group.index * dy.shape[-1], dy.shape[-1]
        own = rows_of(whole.array)[:, first : first + each]
        grad.device.kernel(0, grad.device.backend.copy, own, rows_of(dy.array))
        return (dy,)


@dataclass(frozen=True, slots=True)
class Enter:
    """f alone, at the beginning of a layer."""

    group: TensorParallel

    def backward(self, grad: Buffer) -> Grads:
        return (self.group.borders.f_backward(self.group.comm, grad),)


@dataclass(frozen=True, slots=True)
class Leave:
    """g alone, at its end."""

    group: TensorParallel

    def backward(self, grad: Buffer) -> Grads:
        return (self.group.borders.g_backward(self.group.comm, grad),)


@dataclass(frozen=True, slots=True)
class G:
    """A map of which each rank has a share, and g after it. The bias is added after g."""

    rule: Rule
    bias: Operand | None
    group: TensorParallel

    def backward(self, grad: Buffer) -> Grads:
        results = self.rule.backward(self.group.borders.g_backward(self.group.comm, grad))
        return results if self.bias is None else (*results, bias_grad(self.bias, grad))
