"""Attention on the device with its probabilities stored, forward and backward, over packed q|k|v, or over q and the
k|v of another sequence.

Products go through cuBLAS, batched over heads in place in the packed array. Row kernels compute the
softmax and its gradient. Scores of half types stay in float32 until they become probabilities. They pass through
scratch that holds some of them at a time (SCORES), so that probabilities are rounded once, when they are stored. Tensor
cores multiply the rounded probabilities with v: each is off by at most half a unit in the last place.
The same holds for the scores' gradient. Attention that stores no probabilities is in `flash.py`.

Layouts are those of `numpy/attention.py`: (B, K, H/K, T, d), keys and values (B, K, 1, T, d).
B batch, T tokens, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import cast, dense, result_for, room_like
from zerosim.backends.cuda.ops import sum_to
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.scores import FORM, form_of, softmax
from zerosim.backends.cuda.types import NULL, elementwise, raw, run_rows
from zerosim.backends.kernels import ALONE, Array, Beside, Heads, Probs
from zerosim.backends.numpy.cast import wide

SCORES = 16 * 1024 * 1024
"""About how many scores are in scratch at a time: 64 MB in float32. A sequence of 12 heads and 1,024 tokens is one
part."""

_SOFTMAX_BACKWARD = (
    FORM
    + r"""
// ds = p * (dp * mask - sum(dp * mask * p)) of each row of whole heads, times the derivative of the cap at the scores
// before it; ds may lie over dp, mask and before may be null. 0 where a query does not read a key.
template <class S, class P> __global__ void softmax_backward_rows(
    const P* probs, const unsigned char* mask, const S* dp, const S* before, P* ds, long long rows, long long tokens,
    FORM_ARGUMENTS) {
    FORM_MADE
    __shared__ S shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * tokens, begin = form.first(row % tokens), live = form.stop(row % tokens, tokens);
    S sum = 0;
    for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) {
        const S kept = mask ? dp[start + j] * S(mask[start + j]) : dp[start + j];
        sum += kept * wide_of(probs[start + j]);
    }
    sum = row_sum(sum, shared);
    for (long long j = threadIdx.x; j < tokens; j += blockDim.x) {
        const bool read = j >= begin && j < live;
        const S kept = !read ? S(0) : mask ? dp[start + j] * S(mask[start + j]) : dp[start + j];
        S gradient = read ? wide_of(probs[start + j]) * (kept - sum) : S(0);
        if (before) {
            const S r = form.capped(before[start + j]);
            gradient *= S(1) - r * r;
        }
        store(gradient, ds[start + j]);
    }
}
"""
)

_add_bias = elementwise("S x, B bias", "S out", "out = x + wide_of(bias)", "add_bias")
_negative = elementwise("S x", "B out", "store(-x, out)", "negative")
_apply_mask = elementwise("T x, M mask", "U y", "store(wide_of(x) * mask, y)", "apply_mask")


def attention(qkv: Array, heads: Heads, kept: Probs, out: Array, beside: Beside = ALONE) -> None:
    """Scratch: half types, 4 bytes for each of SCORES scores, or of one key-value head's H/K T² where they are more;
    with a mask but no `dropped`, an element's bytes for each of as many."""
    probs, mask, keep, dropped = kept
    if not probs.size:
        return
    compute, stored = wide(qkv), common(qkv, out, probs, *([] if dropped is None else [dropped]))
    q, k, v = split(dense(qkv, stored), heads, None if beside.kv is None else dense(beside.kv, stored))
    bias = None if beside.bias is None else by_heads(dense(beside.bias)[None], heads)[0]
    sinks = None if beside.sinks is None else dense(beside.sinks, compute).reshape(heads.keys, -1)
    masks = None if mask is None else by_heads(dense(mask), heads)
    last = nullcontext() if dropped is None else result_for(dropped, stored)
    with result_for(out, stored) as result, result_for(probs, stored) as softmaxed, last as left:
        y, whole = by_group(result, heads), by_heads(softmaxed, heads)
        cuts = list(parts(whole.shape, stored != compute or (mask is not None and left is None)))
        room = whole[cuts[0]].size  # no other part is larger
        scores_room = None if stored == compute else cp.empty((room,), compute)
        dropped_room = None if masks is None or left is not None else cp.empty((room,), stored)
        for part in cuts:
            p, m, after = whole[part], None if masks is None else masks[part], None
            scores = p if scores_room is None else within(scores_room, p.shape)
            product(q[part], k[part].swapaxes(-1, -2), scores, scale=heads.form.factor(q.shape[-1]))
            if bias is not None:
                _add_bias(scores, bias[part[1]], scores)
            if m is not None:
                after = within(dropped_room, p.shape) if left is None else by_heads(left, heads)[part]
            own = None if sinks is None else sinks[part[1]]
            softmax(
                scores,
                m,
                form_of(heads, p.shape[1] * p.shape[2], part[1], p.shape[-1]),
                probs=p,
                dropped=after,
                sinks=own,
            )
            product(p if after is None else after, v[part], y[part], scale=1.0 / keep if m is not None else 1.0)


def attention_backward(
    grad: Array,
    qkv: Array,
    heads: Heads,
    kept: Probs,
    workspace: Array,
    dqkv: Array,
    beside: Beside = ALONE,
    dbeside: Beside = ALONE,
) -> None:
    """The formulas of `numpy_attention.attention_backward`. The scores' gradient is stored in `workspace`, and a bias's
    gradient is summed from there.

    Scratch: half types, 4 bytes for each of SCORES scores, as in `attention`; with a cap as much again; with shared
    keys and values, a key's or value's gradient in the compute dtype.
    """
    probs, mask, keep, dropped = kept
    if not probs.size:
        return
    compute, stored = wide(grad, qkv), common(grad, qkv, probs, dqkv)
    q, k, v = split(dense(qkv, stored), heads, None if beside.kv is None else dense(beside.kv, stored))
    g = by_group(dense(grad, stored), heads)
    p, ds = (by_heads(a, heads) for a in (dense(probs, stored), room_like(workspace, stored)))
    masks = None if mask is None else by_heads(dense(mask), heads)
    after, chance, scale = p, 1.0 if mask is None else 1.0 / keep, heads.form.factor(q.shape[-1])
    if masks is not None:
        after = ds if dropped is None else by_heads(dense(dropped, stored), heads)
        if dropped is None:
            _apply_mask(p, masks, ds)
    pairs = nullcontext() if dbeside.kv is None else result_for(dbeside.kv, stored)
    with result_for(dqkv, stored) as result, pairs as others:
        dq, dk, dv = split(result, heads, others)
        _multiply_shared(after, g, dv, chance, compute)
        cuts = list(parts(p.shape, stored != compute))
        room = None if stored == compute else cp.empty((p[cuts[0]].size,), compute)
        for part in cuts:
            dp = ds[part] if room is None else within(room, ds[part].shape)
            product(g[part], v[part].swapaxes(-1, -2), dp, scale=chance)
            kernel = raw(_SOFTMAX_BACKWARD, "softmax_backward_rows", (dp.dtype, stored))
            rows, tokens = dp.size // dp.shape[-1], dp.shape[-1]
            before = NULL
            if heads.form.cap:
                before = cp.empty(dp.shape, compute)
                product(q[part], k[part].swapaxes(-1, -2), before, scale=scale)
            arrays = p[part], NULL if masks is None else masks[part], dp, before, ds[part]
            run_rows(
                kernel, rows, tokens, *arrays, rows, tokens, *form_of(heads, dp.shape[1] * dp.shape[2], part[1], tokens)
            )
        if dbeside.bias is not None:
            sum_to(ds.reshape(len(ds), *dbeside.bias.shape), dbeside.bias)
        if dbeside.sinks is not None:  # a row of ds adds up to the sink's probability times sum(dp * p)
            add_up = cp.empty((ds.shape[1] * ds.shape[2],), compute)
            sum_to(ds.reshape(len(ds), len(add_up), -1).transpose(0, 2, 1), add_up)
            _negative(add_up, dbeside.sinks)
        product(ds, k, dq, scale=scale)
        _multiply_shared(ds, q, dk, scale, compute)


def multiply_shared(scores: Array, rows: Array, out: Array, scale: float, *, add: bool = False) -> None:
    """out (B, K, 1, T, d) = scale * scores^T @ rows (with `add`, out += ...), summed over the query heads that share a
    key-value head, each sum stored in out's dtype."""
    for i in range(scores.shape[2]):
        one = slice(i, i + 1)
        product(scores[:, :, one].swapaxes(-1, -2), rows[:, :, one], out, scale=scale, add=add or i > 0)


def _multiply_shared(scores: Array, rows: Array, out: Array, scale: float, compute: np.dtype[Any]) -> None:
    """`multiply_shared`, rounded once."""
    total = out if scores.shape[2] == 1 or out.dtype == compute else cp.empty(out.shape, compute)
    multiply_shared(scores, rows, total, scale)
    if total is not out:
        cast(total, out)


# -- views --------------------------------------------------------------------------------------------
def common(*arrays: Array) -> np.dtype[Any]:
    """Return the dtype to read and write all of these arrays in: their own if they share one, else the compute
    dtype."""
    first = arrays[0].dtype
    return first if all(a.dtype == first for a in arrays) else wide(*arrays)


def split(qkv: Array, heads: Heads, kv: Array | None = None) -> tuple[Array, Array, Array]:
    """View contiguous (B, T, (H + 2K) d) as q (B, K, H/K, T, d), k and v (B, K, 1, T, d); or contiguous q and `kv`."""
    first, keys = heads.cuts(qkv.shape[2], q_alone=kv is not None)
    q, pairs = (qkv[..., :first], qkv[..., first:]) if kv is None else (qkv, kv)
    k, v = (by_group(x, Heads(heads.keys, heads.keys)) for x in (pairs[..., :keys], pairs[..., keys:]))
    return by_group(q, heads), k, v


def by_group(packed: Array, heads: Heads) -> Array:
    """View (B, T, H d), rows of contiguous elements, as (B, K, H/K, T, d)."""
    batch, tokens, columns = packed.shape
    shape = (batch, tokens, heads.keys, heads.sharing, columns // heads.queries)
    return packed.reshape(shape).transpose(0, 2, 3, 1, 4)


def by_heads(scores: Array, heads: Heads) -> Array:
    """View contiguous (B, H, T, T) as (B, K, H/K, T, T)."""
    return scores.reshape(len(scores), heads.keys, heads.sharing, *scores.shape[2:])


def within(room: Array, shape: tuple[int, ...]) -> Array:
    """Return an array of that shape over the first elements of the flat `room`."""
    return room[: math.prod(shape)].reshape(shape)


def parts(shape: tuple[int, ...], by_parts: bool) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the batch and the key-value heads, contiguous in memory, of about SCORES scores each; or one
    slice of all."""
    batches, kv_heads, scores = shape[0], shape[1], math.prod(shape[2:])
    heads = min(kv_heads, max(1, SCORES // scores)) if by_parts else kv_heads
    rows = max(1, SCORES // (scores * kv_heads)) if by_parts else batches
    for row in range(0, batches, rows):
        for head in range(0, kv_heads, heads):
            yield slice(row, row + rows), slice(head, head + heads)
