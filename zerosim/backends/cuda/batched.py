"""Flash attention on the device by strided-batched products over all sequences and heads: `--batched-flash`.

q, k and v are copied heads first (`heads_first.py`). Then a tile of queries takes three launches in forward (scores, a
row kernel, values) and six in backward, however many sequences and heads there are. `flash.py` and `blocks.py`, the
default, call cuBLAS for each sequence of a tile: on an H100 that took 3.7 times PyTorch's step. No GPU has run this
file yet. It stays an option until one has.

Scratch of a group of sequences and key-value heads, each array of at most SCORES elements unless one key-value head of
one sequence has more: forward q, k, v, the result and one tile of scores; backward q, k, v and the result's gradient,
their gradients, and two tiles of scores. Half types store a tile's operands of products beside its scores.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1; cuBLAS, 2.8.13 (cublasGemmStridedBatchedEx).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, fill, result_for
from zerosim.backends.cuda.attention import common, within
from zerosim.backends.cuda.batched_rows import Rows, softmax, softmax_backward
from zerosim.backends.cuda.blocks import merge
from zerosim.backends.cuda.flash import attention_delta
from zerosim.backends.cuda.heads_first import from_heads, to_heads
from zerosim.backends.cuda.products import product
from zerosim.backends.kernels import Array, Dropout, Heads, Met, Tile
from zerosim.backends.numpy.cast import wide

SCORES = 32 * 1024 * 1024
"""The maximum of scores in scratch at a time: 128 MB in float32. Eight sequences of 12 heads and 1,024 tokens are four
tiles."""

QUERIES = 256
"""Queries in a tile of a short row. Fewer skip more of the future half; more take fewer launches."""

Packed = tuple[Array, Array, Array]
"""q, k and v: views (B, T, columns) of packed heads."""


class Group(NamedTuple):
    """Sequences and key-value heads that go together; several sequences only with all their heads."""

    batch: slice
    heads: slice

    def of(self, packed: Sequence[Array], keys: int) -> list[Array]:
        """Return the group's part of arrays whose columns are those of `keys` key-value heads."""
        each = (x.shape[2] // keys for x in packed)
        return [x[self.batch, :, self.heads.start * n : self.heads.stop * n] for x, n in zip(packed, each, strict=True)]


@dataclass(frozen=True, slots=True)
class Plan:
    """An attention cut into groups, and each of them into tiles, in the order of the queries."""

    heads: Heads
    tokens: int
    dropout: Dropout
    scale: float
    groups: tuple[Group, ...]
    tiles: tuple[Tile, ...]

    @property
    def chance(self) -> float:
        """The factor of what dropout keeps."""
        return 1.0 / (1.0 - self.dropout.chance)

    def to_heads(self, group: Group, *packed: Array) -> list[Array]:
        count = group.heads.stop - group.heads.start
        return to_heads(group.of(packed, self.heads.keys), count, self.heads.sharing)

    def from_heads(self, group: Group, first: Sequence[Array], packed: Sequence[Array], *, add: bool = False) -> None:
        count = group.heads.stop - group.heads.start
        from_heads(first, group.of(packed, self.heads.keys), count, self.heads.sharing, add=add)

    def by_head(self, group: Group, a: Array) -> Array:
        """Return the group's part of (B, H, T)."""
        sharing = self.heads.sharing
        return a[group.batch, group.heads.start * sharing : group.heads.stop * sharing]

    def rows(self, group: Group, tile: Tile) -> Rows:
        return Rows(self.heads, self.dropout, self.tokens, group.batch, group.heads, tile)

    def queries(self, tile: Tile) -> slice:
        """Return a tile's rows of queries heads first."""
        return slice(tile.rows.start * self.heads.sharing, tile.rows.stop * self.heads.sharing)

    def rooms(self, n: int, compute: np.dtype[Any], stored: np.dtype[Any], count: int) -> list[Array]:
        """Return `count` flat arrays for a tile of n sequences times key-value heads in the compute dtype, and as many
        in the stored one; the same memory if the dtypes are equal."""
        largest = max(((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in self.tiles), default=0)
        numel = n * self.heads.sharing * largest
        wide_rooms = [cp.empty((numel,), compute) for _ in range(count)]
        return wide_rooms + (wide_rooms if stored == compute else [cp.empty((numel,), stored) for _ in range(count)])


# -- forward -------------------------------------------------------------------------------------------
def flash_attention(
    qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, sinks: Array | None = None
) -> None:
    if not qkv.size:
        return
    stored, compute = common(qkv, out), wide(qkv)
    packed = _columns(dense(qkv, stored), heads)
    plan = _plan(packed, heads, _all(qkv), dropout)
    sinks = None if sinks is None else dense(sinks, compute)
    with result_for(out, stored) as result, result_for(lse, compute) as sums:
        for group in plan.groups:
            plan.from_heads(group, [_result(plan, group, packed, sums, sinks)], [result])


def _result(plan: Plan, group: Group, packed: Packed, lse: Array, sinks: Array | None) -> Array:
    """Return a group's result heads first, in the compute dtype, and write its log-sum-exp."""
    parts, own = plan.to_heads(group, *packed), plan.by_head(group, lse)
    rooms = plan.rooms(len(parts[0]), lse.dtype, parts[0].dtype, 1)
    y = cp.empty((*parts[0].shape[:2], parts[2].shape[2]), lse.dtype)
    for tile in plan.tiles:
        _attend(plan, group, tile, parts, rooms, y[:, plan.queries(tile)], own, tile.rows.start, sinks)
    return y


def attention_block(q: Array, kv: Array, heads: Heads, met: Met, dropout: Dropout, out: Array, lse: Array) -> None:
    """As `blocks.attention_block`: a tile's result goes through scratch, and a row kernel merges it."""
    if not q.size or not kv.size:
        return
    stored, compute = common(q, kv), wide(q, kv, out)
    packed = _columns(dense(q, stored), heads, dense(kv, stored))
    plan = _plan(packed, heads, met, dropout)
    for group in plan.groups:
        _merge_group(plan, group, packed, group.of([out], heads.keys)[0], plan.by_head(group, lse), compute)


def _merge_group(plan: Plan, group: Group, packed: Packed, out: Array, lse: Array, compute: np.dtype[Any]) -> None:
    parts = plan.to_heads(group, *packed)
    rooms = plan.rooms(len(parts[0]), compute, parts[0].dtype, 1)
    for tile in plan.tiles:
        queries = plan.queries(tile)
        result = cp.empty((len(parts[0]), queries.stop - queries.start, parts[2].shape[2]), compute)
        fresh = cp.empty((*lse.shape[:2], tile.rows.stop - tile.rows.start), compute)
        _attend(plan, group, tile, parts, rooms, result, fresh, 0, None)
        merge(result, fresh, out[:, tile.rows], lse[..., tile.rows], plan.heads.sharing)


def _attend(
    plan: Plan,
    group: Group,
    tile: Tile,
    parts: Sequence[Array],
    rooms: Sequence[Array],
    out: Array,
    lse: Array,
    place: int,
    sinks: Array | None,
) -> None:
    """Write a tile's result to `out`, and the log-sum-exp of its queries to the group's lse, from `place` on."""
    (q, k, v), queries = parts, plan.queries(tile)
    scores, after = (_tile_of(room, q[:, queries], k[:, tile.keys]) for room in rooms)
    product(q[:, queries], k[:, tile.keys].swapaxes(-1, -2), scores, scale=plan.scale)
    sharing = plan.heads.sharing
    own = None if sinks is None else sinks[group.heads.start * sharing : group.heads.stop * sharing]
    softmax(plan.rows(group, tile), scores, after, lse, place, own)
    product(after, v[:, tile.keys], out, scale=plan.chance)


# -- backward ------------------------------------------------------------------------------------------
def flash_attention_backward(
    grad: Array, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, delta: Array, dqkv: Array
) -> None:
    """As `flash.flash_attention_backward`. dq, dk and dv are added in the compute dtype and rounded once."""
    if not qkv.size:
        return
    stored, compute = common(grad, qkv, out, dqkv), wide(grad, qkv)
    gradient, packed = dense(grad, stored), _columns(dense(qkv, stored), heads)
    plan = _plan(packed, heads, _all(qkv), dropout)
    with result_for(dqkv, stored) as result, result_for(delta, compute) as deltas:
        attention_delta(gradient, dense(out, stored), heads, deltas)
        sums, into = dense(lse, compute), _columns(result, heads)
        for group in plan.groups:
            plan.from_heads(group, _gradients(plan, group, packed, gradient, sums, deltas, compute), into)


def attention_block_backward(
    grad: Array,
    q: Array,
    kv: Array,
    heads: Heads,
    met: Met,
    dropout: Dropout,
    lse: Array,
    delta: Array,
    dq: Array,
    dkv: Array,
) -> None:
    """As `flash_attention_backward`, for the keys of a block."""
    if not q.size or not kv.size:
        return
    stored, compute = common(grad, q, kv), wide(grad, q, kv, dq)
    packed, into = _columns(dense(q, stored), heads, dense(kv, stored)), _columns(dq, heads, dkv)
    plan, gradient = _plan(packed, heads, met, dropout), dense(grad, stored)
    sums, deltas = dense(lse, compute), dense(delta, compute)
    for group in plan.groups:
        plan.from_heads(group, _gradients(plan, group, packed, gradient, sums, deltas, compute), into, add=True)


def _gradients(
    plan: Plan, group: Group, packed: Packed, grad: Array, lse: Array, delta: Array, compute: np.dtype[Any]
) -> list[Array]:
    """Return a group's gradients of q, k and v, heads first, in the compute dtype."""
    q, k, v = parts = plan.to_heads(group, *packed)
    (g,), sums, deltas = plan.to_heads(group, grad), plan.by_head(group, lse), plan.by_head(group, delta)
    grads = dq, dk, dv = [cp.empty(part.shape, compute) for part in parts]
    rooms = plan.rooms(len(q), compute, q.dtype, 2)
    tiles = plan.tiles[::-1]
    # If the last tile reads every key and no query is in two tiles, nothing has to be zero before.
    rows = sum(tile.rows.stop - tile.rows.start for tile in tiles) * plan.heads.sharing
    sets = rows == q.shape[1] and bool(tiles) and tiles[0].keys == slice(0, k.shape[1])
    for total in () if sets else grads:
        fill(total, 0.0)
    for tile in tiles:
        queries, add = plan.queries(tile), not sets or tile is not tiles[0]
        scores, dp, after, ds = (_tile_of(room, q[:, queries], k[:, tile.keys]) for room in rooms)
        product(q[:, queries], k[:, tile.keys].swapaxes(-1, -2), scores, scale=plan.scale)
        product(g[:, queries], v[:, tile.keys].swapaxes(-1, -2), dp, scale=plan.chance)
        softmax_backward(plan.rows(group, tile), scores, dp, after, ds, sums, deltas, tile.rows.start)
        product(ds, k[:, tile.keys], dq[:, queries], scale=plan.scale, add=not sets)
        product(ds.swapaxes(-1, -2), q[:, queries], dk[:, tile.keys], scale=plan.scale, add=add)
        product(after.swapaxes(-1, -2), g[:, queries], dv[:, tile.keys], scale=plan.chance, add=add)
    return grads


# -- the plan ------------------------------------------------------------------------------------------
def _plan(packed: Packed, heads: Heads, met: Met, dropout: Dropout) -> Plan:
    """Cut an attention: a group has as many sequences and heads as leave room for a tile of QUERIES, a tile QUERIES
    queries or a quarter of a long run, fewer if its scores would exceed SCORES."""
    q, k, v = packed
    queries, keys = (max(map(len, runs)) for runs in (met.queries, met.keys))
    width, value = q.shape[2] // heads.queries, v.shape[2] // heads.keys
    operand = max(q.shape[1] * heads.sharing, k.shape[1]) * max(width, value)
    together = max(1, SCORES // max(operand, heads.sharing * min(queries, QUERIES) * keys))
    groups = tuple(_groups(len(q), heads.keys, together))
    largest = max((b.stop - b.start) * (some.stop - some.start) for b, some in groups)
    step = min(max(QUERIES, queries // 4), max(1, SCORES // (largest * heads.sharing * keys)))
    tiles = tuple(met.tiles(heads.form, step // 64 * 64 or step))
    return Plan(heads, met.tokens, dropout, heads.form.factor(width), groups, tiles)


def _groups(batches: int, keys: int, together: int) -> Iterator[Group]:
    """Yield groups of at most `together` sequences times key-value heads."""
    some, sequences = min(keys, together), max(1, together // keys)
    for batch in range(0, batches, sequences):
        for head in range(0, keys, some):
            yield Group(slice(batch, min(batch + sequences, batches)), slice(head, min(head + some, keys)))


def _columns(q: Array, heads: Heads, kv: Array | None = None) -> Packed:
    """View packed q|k|v, or q and the k|v of a block, as q, k and v."""
    first, keys = heads.cuts(q.shape[2], q_alone=kv is not None)
    q, pairs = (q[..., :first], q[..., first:]) if kv is None else (q, kv)
    return q, pairs[..., :keys], pairs[..., keys:]


def _tile_of(room: Array, queries: Array, keys: Array) -> Array:
    """Return the scores of heads first queries and keys, in a room's memory."""
    return within(room, (len(queries), queries.shape[1], keys.shape[1]))


def _all(qkv: Array) -> Met:
    """Every query and every key, in their order."""
    row = range(qkv.shape[1])
    return Met((row,), (row,), len(row))
