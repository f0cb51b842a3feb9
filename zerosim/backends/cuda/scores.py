"""Rows of attention's scores on the device: which keys a query reads, the soft cap, ALiBi's slopes, the softmax.

The row kernels, also those of `attention.py` and `tiles.py`, begin with FORM. They take `form_of`'s numbers last.
"""

from __future__ import annotations

from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array, Heads

FORM = r"""
// Rows of scores are `queries` a head, of `heads` heads and several sequences; their columns are consecutive keys. A
// query's number is its position less the first column's, perhaps below 0 or beyond the last column. near: the power of
// two below the model's heads; 0: no slopes. alibi: their factor.
struct Form {
    double cap, alibi;
    long long near, head, heads, window, causal;
    __device__ long long first(long long query) const { return window && query >= window ? query - window + 1 : 0; }
    __device__ long long stop(long long query, long long columns) const {
        return causal && query < columns ? query + 1 : columns;
    }
    __device__ double slope(long long row, long long queries) const {
        if (!near) return 0;
        const long long h = head + row / queries % heads;
        return alibi * exp2((h < near ? -8.0 * (h + 1) : -4.0 * (2 * (h - near) + 1)) / near);
    }
    // tanh(score / cap), of which cap times is the capped score.
    template <class S> __device__ S capped(S score) const { return tanh(score / S(cap)); }
    template <class S> __device__ S formed(S score, S slope, long long ahead) const {
        if (cap != 0) score = capped(score) * S(cap);
        return near ? score + slope * S(ahead) : score;
    }
};
#define FORM_ARGUMENTS \
    double cap, double alibi, long long near, long long head, long long heads, long long window, long long causal
#define FORM_MADE const Form form{cap, alibi, near, head, heads, window, causal};
"""


_SOFTMAX = (
    FORM
    + r"""
// The softmax of rows of scores, `queries` rows a head from query `first` on, `columns` keys each. A cap and slopes
// replace the scores. probs or dropped (probs * mask) may lie over the scores. lse (heads, tokens): the log-sum-exp of
// these queries, from `place` on; -inf where a query reads no key. sinks (heads): one more score of each row, whose
// probability is not stored. All but the scores may be null: not there, or not wanted.
template <class S, class P> __global__ void softmax_rows(
    S* scores, const unsigned char* mask, P* probs, P* dropped, S* lse, const S* sinks, long long rows,
    long long queries, long long first, long long columns, long long tokens, long long place, FORM_ARGUMENTS) {
    FORM_MADE
    __shared__ S shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * columns, query = first + row % queries;
    const long long begin = form.first(query), live = form.stop(query, columns);
    const S slope = form.slope(row, queries);
    S top = log(S(0));
    for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) {
        const S score = form.formed(scores[start + j], slope, j - query);
        if (cap != 0 || near) scores[start + j] = score;
        top = larger(top, score);
    }
    top = row_max(top, shared);
    const S sink = sinks ? sinks[row / queries % heads] : log(S(0));
    top = larger(top, sink);
    S total = 0;
    for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) total += exp(scores[start + j] - top);
    total = row_sum(total, shared);
    if (sinks) total += exp(sink - top);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) {
        const S p = j >= begin && j < live ? exp(scores[start + j] - top) / total : S(0);
        if (probs) store(p, probs[start + j]);
        if (dropped) store(mask && !mask[start + j] ? p * S(0) : p, dropped[start + j]);
    }
    if (lse && threadIdx.x == 0) lse[row / queries * tokens + place + row % queries] = top + log(total);
}
"""
)


def form_of(heads: Heads, count: int, group: slice, tokens: int) -> tuple[float, float, int, int, int, int, int]:
    """Return FORM_ARGUMENTS for rows of `count` query heads, those of the key-value heads `group`."""
    form = heads.form
    near = 1 << ((heads.whole or heads.queries).bit_length() - 1) if form.alibi else 0
    first, reach = heads.first + group.start * heads.sharing, form.reach(tokens)
    return float(form.cap), float(form.alibi), near, first, count, reach, int(form.causal)


def softmax(
    scores: Array,
    mask: Array | None,
    form: tuple[float, float, int, int, int, int, int],
    *,
    probs: Array | None = None,
    dropped: Array | None = None,
    lse: Array | None = None,
    sinks: Array | None = None,
    first: int = 0,
    place: int = 0,
) -> None:
    """Compute the softmax of scores (..., queries, keys), formed by `form_of`'s numbers, in place. The first query's
    position is `first` more than the first key's. All arrays are contiguous.

    probs and dropped, of one dtype, receive it before and after the mask, and may share the scores' memory. lse,
    (heads, T) in the scores' dtype, receives the log-sum-exp of these queries, from its column `place` on. sinks: one
    more score of each head's rows, in the scores' dtype.
    """
    queries, keys = scores.shape[-2:]
    target = probs if dropped is None else dropped
    assert target is not None
    kernel = raw(_SOFTMAX, "softmax_rows", (scores.dtype, target.dtype))
    arrays = (scores, *(NULL if a is None else a for a in (mask, probs, dropped, lse, sinks)))
    rows = scores.size // keys
    sizes = rows, queries, first, keys, 0 if lse is None else lse.shape[-1], place
    run_rows(kernel, rows, keys, *arrays, *sizes, *form)
