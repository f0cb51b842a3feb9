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

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, fill, result_for
from zerosim.backends.cuda.attention import common, within
from zerosim.backends.cuda.batched_plan import Group, Packed, Plan, columns_of, plan_of
from zerosim.backends.cuda.batched_rows import softmax, softmax_backward
from zerosim.backends.cuda.blocks import merge
from zerosim.backends.cuda.flash import attention_delta
from zerosim.backends.cuda.products import product
from zerosim.backends.kernels import Array, Dropout, Heads, Met, Tile
from zerosim.backends.numpy.cast import wide


# -- forward -------------------------------------------------------------------------------------------
def flash_attention(
    qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, sinks: Array | None = None
) -> None:
    if not qkv.size:
        return
    stored, compute = common(qkv, out), wide(qkv)
    packed = columns_of(dense(qkv, stored), heads)
    plan = plan_of(packed, heads, _all(qkv), dropout)
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
    packed = columns_of(dense(q, stored), heads, dense(kv, stored))
    plan = plan_of(packed, heads, met, dropout)
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
    gradient, packed = dense(grad, stored), columns_of(dense(qkv, stored), heads)
    plan = plan_of(packed, heads, _all(qkv), dropout)
    with result_for(dqkv, stored) as result, result_for(delta, compute) as deltas:
        attention_delta(gradient, dense(out, stored), heads, deltas)
        sums, into = dense(lse, compute), columns_of(result, heads)
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
    packed, into = columns_of(dense(q, stored), heads, dense(kv, stored)), columns_of(dq, heads, dkv)
    plan, gradient = plan_of(packed, heads, met, dropout), dense(grad, stored)
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


def _tile_of(room: Array, queries: Array, keys: Array) -> Array:
    """Return the scores of heads first queries and keys, in a room's memory."""
    return within(room, (len(queries), queries.shape[1], keys.shape[1]))


def _all(qkv: Array) -> Met:
    """Every query and every key, in their order."""
    row = range(qkv.shape[1])
    return Met((row,), (row,), len(row))
