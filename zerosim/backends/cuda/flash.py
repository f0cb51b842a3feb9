"""Causal self-attention on the device that stores no probabilities: FlashAttention's promise, by other means.

Forward saves the result and the log-sum-exp of each query's scores. Backward recomputes the
probabilities, p = exp(score - lse), and with dropout the mask from its key. A block of queries of several heads and
sequences meets its keys, up to the block's end, in scratch of bounded size: as many sequences as it has room for, since
on an H100 one sequence at a time left a GPU waiting for launches for three quarters of a step. FlashAttention is one
kernel that iterates over keys in on-chip memory; this is three calls for each block: cuBLAS, a row kernel, cuBLAS. dk
and dv are added in the compute dtype, blocks from the last to the first, and rounded once. As in FlashAttention, tensor
cores multiply probabilities rounded to the half type.

Scratch: forward 4 bytes for each of SCORES scores (8 in fp64), half types 2 more, dropout 1 more; backward twice
that (one mask), and dk and dv of the heads at work, in the compute dtype.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1. Layouts are those of `numpy/attention.py`.
B batch, T tokens, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import cast, dense, fill, result_for
from zerosim.backends.cuda.attention import by_group, common, split, within
from zerosim.backends.cuda.fused import mask_rows
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.scores import FORM, form_of, softmax
from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array, Dropout, Heads
from zerosim.backends.numpy.cast import wide

SCORES = 16 * 1024 * 1024
"""The maximum of scores in scratch at a time, unless one query of one key-value head has more."""

QUERIES = 128
"""Queries in a block for short sequences. Fewer skip more of the future half; more keep the matrices large."""

_DELTA = r"""
// delta (B, H, T) = the sum over a head of grad * out, both (B, T, H, width).
template <class S, class P> __global__ void delta_rows(
    const P* grad, const P* out, S* delta, long long rows, long long tokens, long long heads, long long width) {
    __shared__ S shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    S sum = 0;
    for (long long j = threadIdx.x; j < width; j += blockDim.x)
        sum += wide_of(grad[row * width + j]) * wide_of(out[row * width + j]);
    sum = row_sum(sum, shared);
    const long long head = row % heads, token = row / heads % tokens, batch = row / heads / tokens;
    if (threadIdx.x == 0) delta[(batch * heads + head) * tokens + token] = sum;
}
"""

_BACKWARD = (
    FORM
    + r"""
// Of each score, once it is capped and has its slope: p = exp(score - lse), dropped = p * mask, ds = p * (dp * mask -
// delta) times the derivative of the cap; 0 where a query does not read a key. `queries` rows a head from query `first`
// on, keys from `origin` on. dropped may lie over the scores, ds over dp; mask may be null.
template <class S, class P> __global__ void flash_backward_rows(
    const S* scores, const unsigned char* mask, const S* lse, const S* delta, const S* dp, P* dropped, P* ds,
    long long rows, long long queries, long long first, long long columns, long long tokens, long long origin,
    FORM_ARGUMENTS) {
    FORM_MADE
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * columns, query = first + row % queries;
    const long long at = row / queries * tokens + origin + query;
    const long long begin = form.first(query), live = form.stop(query, columns);
    const S steepness = form.slope(row, queries);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) {
        S after = 0, slope = 0;
        if (j >= begin && j < live) {
            const S score = scores[start + j], p = exp(form.formed(score, steepness, j - query) - lse[at]);
            const S kept = mask ? S(mask[start + j]) : S(1);
            after = p * kept;
            slope = p * (dp[start + j] * kept - delta[at]);
            if (cap != 0) slope *= S(1) - form.capped(score) * form.capped(score);
        }
        store(after, dropped[start + j]);
        store(slope, ds[start + j]);
    }
}
"""
)


def flash_attention(qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array) -> None:
    if not qkv.size:
        return
    stored, compute = common(qkv, out), wide(qkv)
    q, k, v = split(dense(qkv, stored), heads)
    blocks, rooms = _blocks(q.shape), _rooms(q.shape, heads, 1, compute, stored, dropout.chance > 0)
    tokens, scale = qkv.shape[1], heads.form.factor(q.shape[-1])
    with result_for(out, stored) as result, result_for(lse, compute) as sums:
        y = by_group(result, heads)
        for b, group in _heads(q.shape):
            own = slice(group.start * heads.sharing, group.stop * heads.sharing)
            firsts = [heads.number(i, own.start) for i in range(b.start, b.stop)]
            for rows in blocks:
                keys = _keys(rows, heads, tokens)
                shape = (*q[b, group, :, rows].shape[:4], keys.stop - keys.start)
                scores, after = (within(room, shape) for room in rooms[:2])
                product(q[b, group, :, rows], k[b, group, :, keys].swapaxes(-1, -2), scores, scale=scale)
                mask = _mask(dropout, rooms[-1], scores, firsts, rows, keys, tokens)
                form, places = form_of(heads, scores, group, tokens), {"first": rows.start, "origin": keys.start}
                softmax(scores, mask, form, dropped=after, lse=sums[b, own], **places)
                product(after, v[b, group, :, keys], y[b, group, :, rows], scale=1.0 / (1.0 - dropout.chance))


def flash_attention_backward(
    grad: Array, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, delta: Array, dqkv: Array
) -> None:
    """As `attention_backward`, with sum(dp * p) per query as sum(grad * out): `delta`, before blocks begin."""
    if not qkv.size:
        return
    stored, compute, tokens = common(grad, qkv, out, dqkv), wide(grad, qkv), qkv.shape[1]
    gradient, y, sums = dense(grad, stored), dense(out, stored), dense(lse, compute)
    q, k, v = split(dense(qkv, stored), heads)
    g, chance, scale = by_group(gradient, heads), 1.0 / (1.0 - dropout.chance), heads.form.factor(q.shape[-1])
    blocks, rooms = _blocks(q.shape), _rooms(q.shape, heads, 2, compute, stored, dropout.chance > 0)
    with result_for(dqkv, stored) as result, result_for(delta, compute) as deltas:
        width = gradient.shape[2] // heads.queries
        kernel = raw(_DELTA, "delta_rows", (compute, stored))
        run_rows(kernel, deltas.size, width, gradient, y, deltas, deltas.size, tokens, heads.queries, width)
        dq, dk, dv = split(result, heads)
        for b, group in _heads(q.shape):
            own = slice(group.start * heads.sharing, group.stop * heads.sharing)
            firsts = [heads.number(i, own.start) for i in range(b.start, b.stop)]
            totals = [cp.empty(dk[b, group].shape, compute) for _ in range(2)]
            is_windowed = heads.form.reach(tokens) > 0
            for total in totals if is_windowed else ():
                fill(total, 0.0)
            for rows in reversed(blocks):  # the last one sets totals, the others add; with a window all add
                keys = _keys(rows, heads, tokens)
                shape = (*q[b, group, :, rows].shape[:4], keys.stop - keys.start)
                scores, dp, after, ds = (within(room, shape) for room in rooms[:4])
                product(q[b, group, :, rows], k[b, group, :, keys].swapaxes(-1, -2), scores, scale=scale)
                product(g[b, group, :, rows], v[b, group, :, keys].swapaxes(-1, -2), dp, scale=chance)
                mask = _mask(dropout, rooms[-1], scores, firsts, rows, keys, tokens)
                kernel, count = raw(_BACKWARD, "flash_backward_rows", (compute, stored)), scores.size // shape[4]
                arrays = scores, NULL if mask is None else mask, sums[b, own], deltas[b, own], dp, after, ds
                places = shape[3], rows.start - keys.start, shape[4], tokens, keys.start
                form = form_of(heads, scores, group, tokens)
                run_rows(kernel, count, shape[4], *arrays, count, *places, *form)
                product(ds, k[b, group, :, keys], dq[b, group, :, rows], scale=scale)
                for total, left, right, factor in zip(totals, (ds, after), (q, g), (scale, chance), strict=True):
                    for i in range(heads.sharing):
                        one, add = slice(i, i + 1), i > 0 or rows.stop < tokens or is_windowed
                        part = right[b, group, one, rows]
                        product(left[:, :, one].swapaxes(-1, -2), part, total[:, :, :, keys], scale=factor, add=add)
            for total, target in zip(totals, (dk, dv), strict=True):
                cast(total, target[b, group])


def _heads(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield as many sequences, and as many of their key-value heads, as leave room for a block of QUERIES; several
    sequences only with all their heads, so that lse and delta of the part are contiguous."""
    batches, kv_heads, sharing, tokens, _ = shape
    scores = sharing * min(tokens, QUERIES) * tokens
    heads = min(kv_heads, max(1, SCORES // scores))
    sequences = max(1, SCORES // (scores * kv_heads)) if heads == kv_heads else 1
    for batch in range(0, batches, sequences):
        for head in range(0, kv_heads, heads):
            yield slice(batch, min(batch + sequences, batches)), slice(head, min(head + heads, kv_heads))


def _together(shape: tuple[int, ...]) -> int:
    """Return the query heads at work together, those of all its sequences; the first part has the most."""
    sequences, group = next(_heads(shape))
    return shape[2] * len(range(*sequences.indices(shape[0]))) * len(range(*group.indices(shape[1])))


def _blocks(shape: tuple[int, ...]) -> list[slice]:
    """Return blocks of queries: QUERIES, or a quarter of a long sequence; fewer if the heads' scores would exceed
    SCORES."""
    tokens = shape[3]
    most = max(1, SCORES // (_together(shape) * tokens))
    step = min(max(QUERIES, tokens // 4), most)
    step = step // 64 * 64 or step
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _keys(rows: slice, heads: Heads, tokens: int) -> slice:
    """Return the keys that a block of queries reads."""
    window = heads.form.reach(tokens)
    return slice(max(0, rows.start - window + 1) if window else 0, rows.stop if heads.form.causal else tokens)


def _rooms(
    shape: tuple[int, ...], heads: Heads, count: int, compute: np.dtype[Any], stored: np.dtype[Any], has_mask: bool
) -> list[Array]:
    """Return flat scratch for the largest block: `count` arrays of scores, as many operands of the products (the same
    memory if the dtypes are equal), and with dropout one mask."""
    of = [(rows.stop - rows.start, _keys(rows, heads, shape[3])) for rows in _blocks(shape)]
    size = _together(shape) * max(queries * (keys.stop - keys.start) for queries, keys in of)
    wide_rooms = [cp.empty((size,), compute) for _ in range(count)]
    rooms = wide_rooms if stored == compute else [cp.empty((size,), stored) for _ in range(count)]
    return [*wide_rooms, *rooms, *([cp.empty((size,), np.dtype(np.uint8))] if has_mask else [])]


def _mask(
    dropout: Dropout, room: Array, scores: Array, firsts: list[int], rows: slice, keys: slice, tokens: int
) -> Array | None:
    """The parts of `dropout_mask` over (B, H, T, T) for `scores`. firsts: of each sequence, the number of its first
    head here among all B H."""
    if not dropout.chance:
        return None
    sequences, kv_heads, sharing, queries, columns = scores.shape
    mask = within(room, (sequences, kv_heads * sharing, queries, columns))
    for i, head in enumerate(firsts):
        first = (head * tokens + rows.start) * tokens + keys.start
        mask_rows(dropout, mask[i], first, tokens * tokens, tokens)
    return mask
