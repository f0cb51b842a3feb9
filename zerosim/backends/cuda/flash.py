"""Causal self-attention on the device that stores no probabilities: FlashAttention's promise, by other means.

Forward saves the result and the log-sum-exp of each query's scores. Backward recomputes the
probabilities, p = exp(score - lse), and with dropout the mask from its key. Queries meet the keys that they read a part
at a time (`tiles.py`). dk and dv are added in the compute dtype, tiles from the last to the first, and rounded once.

Scratch: that of `tiles.py`; backward also dk and dv of the heads at work, in the compute dtype.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1. Layouts are those of `numpy/attention.py`.
B batch, T tokens, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda.arrays import cast, dense, fill, result_for
from zerosim.backends.cuda.attention import by_group, common, multiply_shared, split
from zerosim.backends.cuda.ops import sum_to
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.tiles import Part, cut
from zerosim.backends.cuda.types import elementwise, raw, run_rows
from zerosim.backends.kernels import Array, Dropout, Heads, Met
from zerosim.backends.numpy.cast import wide

_BOTH = "const S sink = wide_of(s), top = larger(lse, sink), both = top + log(exp(lse - top) + exp(sink - top)); "
_add_sinks = elementwise("S lse, T s", "S y", _BOTH + "y = S(y * exp(lse - both))", "add_sinks")
_add_to_lse = elementwise("T s", "S lse", _BOTH + "lse = both", "add_to_lse")
_of_sinks = elementwise("S lse, S delta, T s", "S part", "part = -exp(S(wide_of(s)) - lse) * delta", "of_sinks")
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


def flash_attention(
    qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, sinks: Array | None = None
) -> None:
    if not qkv.size:
        return
    stored, compute = common(qkv, out), wide(qkv)
    sinks = None if sinks is None else dense(sinks, compute).reshape(heads.keys, -1)
    q, k, v = split(dense(qkv, stored), heads)
    all_of = cut(q, heads, _all(qkv), dropout, 1, compute, stored)
    with result_for(out, stored) as result, result_for(lse, compute) as sums:
        y = by_group(result, heads)
        for at in all_of.parts():
            own = all_of.query_heads(at.batch, at.group)
            all_of.attend(at, q, k, v, y[at.queries], sums[own], at.tile.rows.start, sinks)


def flash_attention_backward(
    grad: Array, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, delta: Array, dqkv: Array
) -> None:
    """As `attention_backward`, with sum(dp * p) per query as sum(grad * out): `delta`, before parts begin."""
    if not qkv.size:
        return
    stored, compute, tokens = common(grad, qkv, out, dqkv), wide(grad, qkv), qkv.shape[1]
    gradient, sums = dense(grad, stored), dense(lse, compute)
    q, k, v = split(dense(qkv, stored), heads)
    g, all_of = by_group(gradient, heads), cut(q, heads, _all(qkv), dropout, 2, compute, stored)
    with result_for(dqkv, stored) as result, result_for(delta, compute) as deltas:
        attention_delta(gradient, dense(out, stored), heads, deltas)
        dq, dk, dv = split(result, heads)
        for b, group in all_of.groups:
            totals = [cp.empty(part[b, group].shape, compute) for part in (dk, dv)]
            is_windowed = heads.form.reach(tokens) > 0
            for total in totals if is_windowed else ():
                fill(total, 0.0)
            for tile in reversed(all_of.tiles):  # the last one sets totals, the others add; with a window all add
                at, add = Part(b, group, tile), tile.rows.stop < tokens or is_windowed
                after, ds = all_of.gradients(at, q, k, v, g, sums, deltas)
                product(ds, k[at.keys], dq[at.queries], scale=all_of.scale)
                for total, left, right, factor in (
                    (totals[0], ds, q, all_of.scale),
                    (totals[1], after, g, all_of.chance),
                ):
                    multiply_shared(left, right[at.queries], total[:, :, :, tile.keys], factor, add=add)
            for total, target in zip(totals, (dk, dv), strict=True):
                cast(total, target[b, group])


def add_sinks(out: Array, lse: Array, sinks: Array) -> None:
    if not out.size:
        return
    batch, tokens, _ = out.shape
    by_head = out.reshape(batch, tokens, lse.shape[1], -1)
    _add_sinks(lse.swapaxes(1, 2)[..., None], sinks[:, None], by_head)
    _add_to_lse(sinks[:, None], lse)


def sinks_backward(lse: Array, delta: Array, sinks: Array, dsinks: Array) -> None:
    parts, total = cp.empty(lse.shape, lse.dtype), cp.empty(dsinks.shape, lse.dtype)
    _of_sinks(lse, delta, sinks[:, None], parts)
    sum_to(parts.transpose(0, 2, 1), total)
    cast(total, dsinks)


def attention_delta(grad: Array, out: Array, heads: Heads, delta: Array) -> None:
    if not grad.size:
        return
    stored, compute, width = common(grad, out), wide(grad, out), grad.shape[2] // heads.queries
    with result_for(delta, compute) as result:
        kernel = raw(_DELTA, "delta_rows", (compute, stored))
        sizes = result.size, grad.shape[1], heads.queries, width
        run_rows(kernel, result.size, width, dense(grad, stored), dense(out, stored), result, *sizes)


def _all(qkv: Array) -> Met:
    """Every query and every key, in their order."""
    row = range(qkv.shape[1])
    return Met((row,), (row,), len(row))
