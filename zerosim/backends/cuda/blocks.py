"""Self-attention on the device by blocks of keys and values that arrive one after the other, merged by log-sum-exp.

A block is cut into parts as a whole attention is (`tiles.py`). A part's result goes through scratch in the compute
dtype, and a row kernel merges it. Gradients are added where they belong by the products themselves, in cuBLAS.

Scratch beside that of `tiles.py`: forward, a part's result and its log-sum-exp. Source and layouts as in
`numpy/blocks.py`.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda.arrays import dense
from zerosim.backends.cuda.attention import by_group, common, multiply_shared, split
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.tiles import cut
from zerosim.backends.cuda.types import raw, run_rows
from zerosim.backends.kernels import Array, Dropout, Heads, Met
from zerosim.backends.numpy.cast import wide

_MERGE = r"""
// out = e^(lse - both) out + e^(fresh - both) result, and lse = both = log(e^lse + e^fresh), of each query and head;
// nothing changes where fresh is -inf. result (sequences, heads / sharing, queries, sharing, width) and fresh
// (sequences, heads, queries) are contiguous; out and lse have strides, in elements.
template <class S> __global__ void merge_rows(
    const S* result, const S* fresh, S* out, S* lse, long long rows, long long heads, long long sharing,
    long long queries, long long width, long long out_sequence, long long out_query, long long out_column,
    long long lse_sequence, long long lse_head, long long lse_query) {
    __shared__ S shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long query = row / sharing % queries, sequence = row / queries / heads;
    const long long head = row / sharing / queries % (heads / sharing) * sharing + row % sharing;
    const S now = fresh[(sequence * heads + head) * queries + query];
    if (now == log(S(0))) return;
    S* const sum = lse + sequence * lse_sequence + head * lse_head + query * lse_query;
    S* const target = out + sequence * out_sequence + query * out_query + head * width * out_column;
    const S before = row_max(*sum, shared);  // all have read it before one of them writes it
    const S top = larger(before, now), both = top + log(exp(before - top) + exp(now - top));
    const S kept = exp(before - both), share = exp(now - both);
    for (long long j = threadIdx.x; j < width; j += blockDim.x)
        target[j * out_column] = kept * target[j * out_column] + share * result[row * width + j];
    if (threadIdx.x == 0) *sum = both;
}
"""


def attention_block(q: Array, kv: Array, heads: Heads, met: Met, dropout: Dropout, out: Array, lse: Array) -> None:
    if not q.size or not kv.size:
        return
    queries, k, v = split(q, heads, kv)
    compute = wide(q, kv, out)
    all_of = cut(queries, heads, met, dropout, 1, compute, common(q, kv))
    for at in all_of.parts():
        shape = *queries[at.queries].shape[:-1], v.shape[-1]
        result, fresh = cp.empty(shape, compute), cp.empty(shape[:-1], compute)
        all_of.attend(at, queries, k, v, result, fresh, place=0)
        own = all_of.query_heads(at.batch, at.group)
        first = own[1].start * shape[-1]
        merge(result, fresh, out[at.batch, at.tile.rows, first:], lse[(*own, at.tile.rows)], 1)


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
    (queries, k, v), g, (dqueries, dk, dv) = split(q, heads, kv), by_group(grad, heads), split(dq, heads, dkv)
    compute = wide(grad, q, kv, dq)
    all_of = cut(queries, heads, met, dropout, 2, compute, common(grad, q, kv))
    sums, deltas = dense(lse, compute), dense(delta, compute)
    for at in all_of.parts():
        after, ds = all_of.gradients(at, queries, k, v, g, sums, deltas)
        product(ds, k[at.keys], dqueries[at.queries], scale=all_of.scale, add=True)
        multiply_shared(ds, queries[at.queries], dk[at.keys], all_of.scale, add=True)
        multiply_shared(after, g[at.queries], dv[at.keys], all_of.chance, add=True)


def merge(result: Array, fresh: Array, out: Array, lse: Array, sharing: int) -> None:
    """Merge the result of some queries and its log-sum-exp into out (sequences, queries, columns) and lse (sequences,
    heads, queries). In `result` `sharing` heads lie side by side in each query; fresh is contiguous."""
    strides = [stride // a.itemsize for a in (out, lse) for stride in a.strides]
    sizes = fresh.size, lse.shape[1], sharing, lse.shape[2], result.shape[-1]
    kernel = raw(_MERGE, "merge_rows", (result.dtype,))
    run_rows(kernel, fresh.size, result.shape[-1], result, fresh, out, lse, *sizes, *strides)
