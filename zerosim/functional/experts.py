"""Experts: a router chooses k of E for each token, and each expert's rows go through its own two maps.

    logits  x gateᵀ                       (M, E)
    route   k experts of each token, and their weights (M, k)
    rows    dispatch: x's rows, sorted by expert, (R, D); dropless R = M k
    maps    grouped_linear: each expert's rows times its matrix of a stack
    y       combine: each token's sum of its rows, which were weighed before

R does not depend on the data, so every buffer's shape and every product's work are known without it. Only how R divides
among experts does, and that is read from the device once a layer: a host synchronisation. On shapes it is assumed even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.backends.forms import Choice
from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import Copy
from zerosim.device.work import GROUPED, GROUPED_DGRAD, GROUPED_WGRAD, KernelWork, work_of
from zerosim.dtypes import DType, int64
from zerosim.errors import InputError
from zerosim.functional.common import Grads, kept_for, like, rows_of, weight_grad
from zerosim.placement.memories import HOST
from zerosim.placement.spread import EVEN, Spread
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Outline, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class Routing:
    """The way of rows to experts, without gradients.

    ids     the expert of each of a token's choices, (M, k)
    order   the choice t k + c of each row, sorted by expert, (R)
    each    choices a token
    counts  the rows of each expert
    """

    ids: Buffer
    order: Buffer
    each: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of tokens: ids (M, k), the order of their rows, sorted by expert, and the rows of each expert, (E).

    spread  how they are assumed to spread; None: as `table` says"""

    ids: Buffer
    order: Buffer
    table: Buffer
    spread: Spread | None

    def routing(self) -> Routing:
        """Read the rows of each expert, for which the host waits."""
        [counts] = read_counts([self.table], None if self.spread is None else [self.assumed()])
        return Routing(self.ids, self.order, self.ids.shape[1], counts)

    def assumed(self) -> tuple[int, ...]:
        """Return the rows of each expert as they are assumed to spread."""
        tokens, top_k = self.ids.shape
        return (self.spread or EVEN).counts(tokens, top_k, self.table.numel)


@dataclass(frozen=True, slots=True)
class Route:
    """Saves the logits and the chosen experts. Backward computes the scores again."""

    logits: Readable
    ids: Buffer
    how: Choice

    def backward(self, grad: Buffer) -> Grads:
        dlogits = self.logits.new_grad()
        arrays = grad.array, rows_of(self.logits.array), self.ids.array, self.how, rows_of(dlogits.array)
        grad.device.kernel(8 * dlogits.numel, grad.device.backend.route_backward, *arrays)
        return (dlogits,)


def route(
    logits: Tensor,
    top_k: int,
    how: Choice,
    bias: Operand | None = None,
    *,
    dtype: DType | None = None,
    spread: Spread | None = None,
) -> tuple[Tensor, Chosen]:
    """Return the weights (M, k) of each token's experts, in `dtype` or that of the logits, and the experts. They are
    the router's or, with a `spread`, chosen to spread so. On shapes without one they spread evenly.

    Shapes: logits (..., E), bias (E), which is added to the scores by which experts are chosen.

    Raises: InputError for more choices than experts.
    """
    weights, ids = choose(logits, top_k, how, bias, dtype=dtype, spread=spread)
    is_assumed = spread is not None or logits.device.backend.name == "meta"
    return weights, sort_rows(ids, logits.shape[-1], (spread or EVEN) if is_assumed else None)


def choose(
    logits: Tensor,
    top_k: int,
    how: Choice,
    bias: Operand | None = None,
    *,
    dtype: DType | None = None,
    spread: Spread | None = None,
) -> tuple[Tensor, Buffer]:
    """Return the weights and the numbers of each token's experts, (M, k) both."""
    device, rows = logits.device, rows_of(logits.array)
    count, experts = rows.shape
    if not 0 < top_k <= experts:
        raise InputError(f"route: {top_k} choices for a token, and there are {experts} experts")
    weights, ids = like(logits, count, top_k, dtype=dtype), device.alloc((count, top_k), int64, Kind.ACTIVATION)
    if spread is not None:
        how = how._replace(given=spread.counts(count, top_k, experts))
    added = None if bias is None else bias.array
    device.kernel(6 * rows.size, device.backend.route, rows, added, how, weights.array, ids.array)
    saved = {"logits": held(logits), "experts": ids}
    rule = Route(held(logits), ids, how)
    return apply(rule, weights, logits, op="route", saved=saved), ids


def sort_rows(ids: Buffer, experts: int, spread: Spread | None) -> Chosen:
    """Sort the rows of these experts."""
    device = ids.device
    order, table = device.alloc((ids.numel,), int64, Kind.ACTIVATION), device.alloc((experts,), int64, Kind.TEMP)
    device.kernel(0, device.backend.sort_rows, ids.array, order.array, table.array)
    return Chosen(ids, order, table, spread)


def read_counts(tables: Sequence[Buffer], assumed: Sequence[tuple[int, ...]] | None) -> Sequence[tuple[int, ...]]:
    """Read counts together, for which the host waits; those `assumed`, where they are."""
    device, nbytes = tables[0].device, sum(table.nbytes for table in tables)
    device.recorder.add(Copy(device.where, tables[0].memory, HOST, nbytes, "control"))
    return assumed or [tuple(map(int, device.backend.to_host(table.array))) for table in tables]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Saves the order of rows."""

    shape: tuple[int, ...]
    order: Buffer
    each: int

    def backward(self, grad: Buffer) -> Grads:
        device, dx = grad.device, grad.device.alloc(self.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        arrays = grad.array, self.order.array, self.each, dx.array.reshape(-1, grad.shape[1])
        device.kernel(grad.numel, device.backend.sum_rows, *arrays)
        return (dx,)


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Return x's row for each of its token's choices, sorted by expert. Shapes: x (..., D), result (R, D)."""
    return _taken(x, rows_of(x.array), routing.order, routing.each)


def row_weights(weights: Tensor, routing: Routing) -> Tensor:
    """Return the weight of each row. Shapes: weights (M, k), result (R, 1)."""
    return _taken(weights, weights.array.reshape(-1, 1), routing.order, 1)


def _taken(x: Tensor, rows: Array, order: Buffer, each: int) -> Tensor:
    device, out = x.device, like(x, order.numel, rows.shape[1])
    device.kernel(0, device.backend.take_rows, rows, order.array, each, out.array)
    return apply(Dispatch(x.shape, order, each), out, x, op="dispatch", saved={"order": order})


@dataclass(frozen=True, slots=True)
class Combine:
    """Saves the order of rows."""

    shape: tuple[int, ...]
    order: Buffer
    each: int

    def backward(self, grad: Buffer) -> Grads:
        device, drows = grad.device, grad.device.alloc(self.shape, grad.dtype, Kind.ACTIVATION_GRAD)
        device.kernel(0, device.backend.take_rows, rows_of(grad.array), self.order.array, self.each, drows.array)
        return (drows,)


def combine(rows: Tensor, routing: Routing, shape: tuple[int, ...]) -> Tensor:
    """Return each token's sum of its rows. Shapes: rows (R, D), result (..., D) as `shape` says."""
    device, order, each = rows.device, routing.order, routing.each
    out = like(rows, *shape)
    device.kernel(rows.buffer.numel, device.backend.sum_rows, rows.array, order.array, each, rows_of(out.array))
    return apply(Combine(rows.shape, order, each), out, rows, op="combine", saved={"order": order})


@dataclass(frozen=True, slots=True)
class Weigh:
    """Saves rows and weights."""

    rows: Readable
    weights: Readable

    def backward(self, grad: Buffer) -> Grads:
        drows, dweights = self.rows.new_grad(), self.weights.new_grad()
        arrays = rows_of(grad.array), rows_of(self.rows.array), self.weights.array, rows_of(drows.array), dweights.array
        grad.device.kernel(3 * grad.numel, grad.device.backend.weigh_rows_backward, *arrays)
        return drows, dweights


def weigh(rows: Tensor, weights: Tensor) -> Tensor:
    """Return each row times its weight. Shapes: rows and result (..., D), of R rows, weights (R, 1)."""
    out = like(rows)
    rows.device.kernel(
        out.numel, rows.device.backend.weigh_rows, rows_of(rows.array), weights.array, rows_of(out.array)
    )
    saved = {"rows": held(rows), "weights": held(weights)}
    return apply(Weigh(held(rows), held(weights)), out, rows, weights, op="weigh", saved=saved)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Saves its rows, if the stack is trained, and the stack's handle."""

    x: Readable | Outline
    stack: Operand
    counts: tuple[int, ...]
    transposed: bool
    grad_scale: float

    def backward(self, grad: Buffer) -> Grads:
        device, k, dx = grad.device, grad.device.backend, None
        if self.x.requires_grad:
            dx = self.x.new_grad()
            values = self.stack.buffer
            across = values.array if self.transposed else values.array.swapaxes(1, 2)
            shape = grad.shape[0], grad.shape[1], dx.shape[1], len(self.counts)
            work = _work(GROUPED_DGRAD, shape, grad.array, across, dx.array)
            device.kernels((work,), k.grouped, grad.array, across, self.counts, dx.array)
            del values, across

        def make() -> Buffer:
            assert not isinstance(self.x, Outline)
            dstack = self.stack.new_grad()
            left, right = (grad.array, self.x.array) if self.transposed else (self.x.array, grad.array)
            shape = left.shape[1], left.shape[0], right.shape[1], len(self.counts)
            work = _work(GROUPED_WGRAD, shape, left, right, dstack.array)
            device.kernels((work,), k.grouped_wgrad, left, right, self.counts, self.grad_scale, dstack.array)
            return dstack

        return dx, weight_grad(self.stack, make, self.x)


def grouped_linear(
    x: Tensor, stack: Operand, counts: tuple[int, ...], *, transposed: bool = True, grad_scale: float = 1.0
) -> Tensor:
    """Return each expert's rows times its matrix; `counts`: the rows of each. The stack's gradient is multiplied by
    `grad_scale`, a product's alpha.

    Shapes: x (R, I), stack (E, I, O) or, transposed, (E, O, I); result (R, O).

    Raises: InputError where the stack does not take x's columns, or has another number of experts.
    """
    experts, inner, wide = (stack.shape[0], *stack.shape[:0:-1]) if transposed else stack.shape
    if x.shape[-1] != inner or experts != len(counts):
        raise InputError(f"grouped_linear: a stack of shape {stack.shape} for {x.shape[-1]} columns, and rows of "
                         f"{len(counts)} experts")  # fmt: skip
    device, out, values = x.device, like(x, x.shape[0], wide), stack.buffer
    matrices = values.array.swapaxes(1, 2) if transposed else values.array
    work = _work(GROUPED, (x.shape[0], inner, wide, experts), x.array, matrices, out.array)
    device.kernels((work,), device.backend.grouped, x.array, matrices, counts, out.array)
    del values, matrices
    kept, op = kept_for([stack], x), layer_of(stack, "grouped_linear")
    rule = Grouped(kept, stack, counts, transposed, grad_scale)
    return apply(rule, out, x, stack, op=op, saved={"input": kept, "weight": stack})


def _work(name: str, shape: tuple[int, int, int, int], *arrays: Array) -> KernelWork:
    """Return the work of one product of all experts' rows, however they divide: (M, K) by (K, N), and the experts."""
    rows, inner, wide, _ = shape
    return work_of("grouped", 2 * rows * inner * wide, arrays)._replace(name=name, shape=shape)
