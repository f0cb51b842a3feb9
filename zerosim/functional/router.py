"""A router: which experts each token chooses, their weights, how many rows each expert gets, and its own losses.

    logits  x gateᵀ                       (M, E)
    route   k experts of each token, and their weights (M, k)

How rows divide among experts is read from the device once a layer: a host synchronisation. On shapes it is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerosim.backends.forms import Choice
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import Copy
from zerosim.dtypes import compute_dtype, int64
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.placement.memories import HOST
from zerosim.placement.spread import EVEN, Capacity, Spread
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Routing:
    """The way of rows to experts, without gradients.

    ids     the expert of each of a token's choices, (M, k)
    order   the choice t k + c of each row, sorted by expert, (R); a row of zeros has no choice, M k
    each    choices a token
    counts  the rows of each expert
    chosen  how many tokens here chose each; `dropped`: the choices beyond their experts' capacity
    """

    ids: Buffer
    order: Buffer
    each: int
    counts: tuple[int, ...]
    chosen: tuple[int, ...] = ()
    dropped: int = 0


class Known(NamedTuple):
    """What a router returned of tokens: logits (..., E), and the weights and numbers of their experts, (M, k)."""

    logits: Buffer
    weights: Buffer
    experts: Buffer


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of tokens: ids (M, k), the order of their rows, sorted by expert, and the rows of each expert, (E).

    spread  how they are assumed to spread; None: as `table` says
    known   where experts have a capacity: the rows of each, and how many tokens chose it
    """

    ids: Buffer
    order: Buffer
    table: Buffer
    spread: Spread | None
    known: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def routing(self) -> Routing:
        """Read the rows of each expert, for which the host waits."""
        if self.known is None:
            [counts] = read_counts([self.table], None if self.spread is None else [self.assumed()])
            return self.of_counts(counts)
        return self.of_counts(*self.known)

    def of_counts(self, counts: tuple[int, ...], chosen: tuple[int, ...] | None = None) -> Routing:
        """Return the way of so many rows."""
        dropped = 0 if chosen is None else sum(chosen) - sum(map(min, chosen, counts))
        return Routing(self.ids, self.order, self.ids.shape[1], counts, chosen or counts, dropped)

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
    bias: Buffer | None = None,
    *,
    spread: Spread | None = None,
    capacity: Capacity | None = None,
    known: Known | None = None,
) -> tuple[Tensor, Chosen]:
    """Return the weights (M, k) of each token's experts, and the experts. They are
    the router's or, with a `spread`, chosen to spread so. On shapes without one they spread evenly. `known`: what the
    router returned before.

    Shapes: logits (..., E), bias (E), which is added to the scores by which experts are chosen.

    Raises: InputError for more choices than experts.
    """
    weights, ids = choose(logits, top_k, how, bias, spread=spread, known=known)
    is_assumed = spread is not None or logits.device.backend.name == "meta"
    chosen = sort_rows(ids, logits.shape[-1], (spread or EVEN) if is_assumed else None)
    return weights, chosen if capacity is None else _kept(weights, chosen, capacity)


def choose(
    logits: Tensor,
    top_k: int,
    how: Choice,
    bias: Buffer | None = None,
    *,
    spread: Spread | None = None,
    known: Known | None = None,
) -> tuple[Tensor, Buffer]:
    """Return the weights and the numbers of each token's experts, (M, k) both, which may be `known`."""
    device, rows = logits.device, rows_of(logits.array)
    count, experts = rows.shape
    if not 0 < top_k <= experts:
        raise InputError(f"route: {top_k} choices for a token, and there are {experts} experts")
    if known is None:
        weights, ids = like(logits, count, top_k), device.alloc((count, top_k), int64, Kind.ACTIVATION)
        if spread is not None:
            how = how._replace(given=spread.counts(count, top_k, experts))
        added = None if bias is None else bias.array
        device.kernel(6 * rows.size, device.backend.route, rows, added, how, weights.array, ids.array)
    else:
        _, weights, ids = known
    saved = {"logits": held(logits), "experts": ids}
    rule = Route(held(logits), ids, how)
    return apply(rule, weights, logits, op="route", saved=saved), ids


def sort_rows(ids: Buffer, experts: int, spread: Spread | None) -> Chosen:
    """Sort the rows of these experts."""
    device = ids.device
    order, table = device.alloc((ids.numel,), int64, Kind.ACTIVATION), device.alloc((experts,), int64, Kind.TEMP)
    device.kernel(0, device.backend.sort_rows, ids.array, order.array, table.array)
    return Chosen(ids, order, table, spread)


def _kept(weights: Tensor, found: Chosen, capacity: Capacity) -> Chosen:
    """Return the rows of each expert that its capacity lets in."""
    device, choices, experts = weights.device, found.ids.numel, found.table.numel
    [chosen] = read_counts([found.table], None if found.spread is None else [found.assumed()])
    most, counts = capacity.rows(choices, experts), capacity.kept(chosen)
    rows, by = device.alloc((sum(counts),), int64, Kind.ACTIVATION), weights.array if capacity.by_weight else None
    arrays = found.order.array, found.table.array, by, most, capacity.padded, rows.array
    device.kernel(0, device.backend.keep_rows, *arrays)
    return replace(found, order=rows, known=(counts, chosen))


def read_counts(tables: Sequence[Buffer], assumed: Sequence[tuple[int, ...]] | None) -> Sequence[tuple[int, ...]]:
    """Read counts together, for which the host waits; those `assumed`, where they are."""
    device, nbytes = tables[0].device, sum(table.nbytes for table in tables)
    device.recorder.add(Copy(device.where, tables[0].memory, HOST, nbytes, "control"))
    return assumed or [tuple(map(int, device.backend.to_host(table.array))) for table in tables]


class RouterLosses(NamedTuple):
    """Losses of a router, beside that of the model's tokens, as means over M tokens.

    balance  the factor of E (sum over experts of the share of tokens that chose it times its mean score): 1, if all
             are alike. Source: Switch, arXiv 2101.03961, section 2.2; for k choices Megatron-LM, moe_utils.py
    runs     the balance is of each of so many runs of tokens, in the mean: sequences (DeepSeek-V3, 2412.19437, 2.1.2)
    size     the factor of the mean squared log-sum-exp of the logits (ST-MoE, 2202.08906)
    """

    balance: float = 0.0
    size: float = 0.0
    runs: int = 1


@dataclass(frozen=True, slots=True)
class OfRouter:
    """Saves logits and loads. `factor`: of the losses' gradient, when backward runs."""

    logits: Readable
    loads: Buffer
    losses: RouterLosses
    top_k: int
    scores: str
    factor: Callable[[], float]

    def backward(self, grad: Buffer) -> Grads:
        dlogits, rows, factor = self.logits.new_grad(), rows_of(self.logits.array), self.factor()
        (tokens, experts), losses = rows.shape, self.losses
        balance = factor * losses.balance * experts * losses.runs / (tokens * tokens * self.top_k)
        size = factor * 2 * losses.size / tokens
        arrays = rows, self.loads.array, self.scores, balance, size, rows_of(dlogits.array)
        grad.device.kernel(10 * dlogits.numel, grad.device.backend.router_losses_backward, *arrays)
        return grad, dlogits


def with_losses(
    weights: Tensor, logits: Tensor, ids: Buffer, how: Choice, losses: RouterLosses, factor: Callable[[], float]
) -> Tensor:
    """Return the weights. Their backward adds `factor` times the losses' gradient to that of the logits."""
    device, experts = logits.device, logits.shape[-1]
    loads = device.alloc((losses.runs, experts), compute_dtype(logits.dtype), Kind.ACTIVATION)
    device.kernel(0, device.backend.count_choices, ids.array, loads.array)
    rule = OfRouter(held(logits), loads, losses, ids.shape[1], how.scores, factor)
    saved = {"logits": held(logits), "loads": loads}
    return apply(rule, weights.buffer, weights, logits, op="router_losses", saved=saved)
