"""Rows of batched flash attention's scores on the device: cap, slopes, window, softmax and dropout in one kernel, and
its backward in another.

Scores are (n, queries S, keys): n sequences times key-value heads, and the S query heads of a query next to each other
(`heads_first.py`). Dropout's words are drawn in the kernel, eight neighbours to a thread, so no mask is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerosim.backends.cuda.fused import PHILOX
from zerosim.backends.cuda.scores import FORM, form_of
from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array, Dropout, Heads, Tile

_ROWS = (
    PHILOX
    + FORM
    + r"""
// Of a row of scores: `number`, of its query among these queries; `query`, its position less the first key's; `local`,
// of its head among `heads` of one sequence; `at`, its place in lse and delta (sequence, head, token).
#define ROW_ARGUMENTS \
    long long rows, long long queries, long long sharing, long long first, long long columns, long long of_sequence, \
    long long of_head, long long place, unsigned long long key0, unsigned long long key1, \
    unsigned long long threshold, long long word, long long whole, long long tokens, FORM_ARGUMENTS
#define ROW_MADE \
    FORM_MADE \
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y; \
    if (row >= rows) return; \
    const long long start = row * columns, number = row / sharing % queries, query = first + number; \
    const long long local = (row / sharing / queries % (heads / sharing)) * sharing + row % sharing; \
    const long long sequence = row / (queries * heads); \
    const long long at = sequence * of_sequence + local * of_head + place + number; \
    const long long begin = form.first(query), live = form.stop(query, columns); \
    const S slope = form.slope(local, 1); \
    const Drawn drawn{key0, key1, threshold, word + ((sequence * whole + local) * tokens + number) * tokens};

// Dropout of one row, whose column 0 is this word of the key's stream. threshold 0: all are kept.
struct Drawn {
    unsigned long long key0, key1, threshold;
    long long word;
    // Calls run(column, is kept) for each column from begin to live, on one of the row's threads.
    template <class F> __device__ void each(long long begin, long long live, F run) const {
        if (!threshold) {
            for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) run(j, true);
            return;
        }
        if (begin >= live) return;
        const long long last = (word + live - 1) / 8;
        for (long long block = (word + begin) / 8 + threadIdx.x; block <= last; block += blockDim.x) {
            const Words words = philox_words(key0, key1, block);
            for (int k = 0; k < 8; ++k) {
                const long long j = block * 8 + k - word;
                if (j >= begin && j < live) run(j, words.at[k] >= threshold);
            }
        }
    }
};

// Calls run(column) for each column that is not read.
template <class F> __device__ void each_unread(long long begin, long long live, long long columns, F run) {
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
        if (j < begin || j >= live) run(j);
}

// dropped = softmax(scores) * kept, perhaps over the scores, and lse, -inf where a query reads no key. sinks (heads):
// one more score of each row, or null.
template <class S, class P> __global__ void batched_softmax(
    S* scores, P* dropped, S* lse, const S* sinks, ROW_ARGUMENTS) {
    ROW_MADE
    __shared__ S shared[32];
    S top = log(S(0));
    for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) {
        const S score = form.formed(scores[start + j], slope, j - query);
        if (cap != 0 || near) scores[start + j] = score;
        top = larger(top, score);
    }
    top = row_max(top, shared);
    __syncwarp();  // other threads of the row may drop the scores that this one formed
    const S sink = sinks ? sinks[local] : log(S(0));
    top = larger(top, sink);
    S total = 0;
    for (long long j = begin + threadIdx.x; j < live; j += blockDim.x) total += exp(scores[start + j] - top);
    total = row_sum(total, shared);
    if (sinks) total += exp(sink - top);
    drawn.each(begin, live, [&](long long j, bool kept) {
        const S p = exp(scores[start + j] - top) / total;
        store(kept ? p : p * S(0), dropped[start + j]);
    });
    each_unread(begin, live, columns, [&](long long j) { store(S(0), dropped[start + j]); });
    if (threadIdx.x == 0) lse[at] = top + log(total);
}

// p = exp(score - lse), dropped = p * kept, perhaps over the scores, and ds = p * (dp * kept - delta) times the cap's
// derivative, perhaps over dp.
template <class S, class P> __global__ void batched_softmax_backward(
    const S* scores, const S* lse, const S* delta, const S* dp, P* dropped, P* ds, ROW_ARGUMENTS) {
    ROW_MADE
    const S sum = lse[at], less = delta[at];
    drawn.each(begin, live, [&](long long j, bool is_kept) {
        const S score = scores[start + j], kept = is_kept ? S(1) : S(0);
        const S p = exp(form.formed(score, slope, j - query) - sum);
        S gradient = p * (dp[start + j] * kept - less);
        if (cap != 0) gradient *= S(1) - form.capped(score) * form.capped(score);
        store(p * kept, dropped[start + j]);
        store(gradient, ds[start + j]);
    });
    each_unread(begin, live, columns, [&](long long j) {
        store(S(0), dropped[start + j]);
        store(S(0), ds[start + j]);
    });
}
"""
)


class Rows(NamedTuple):
    """Whose scores they are: a tile of some sequences, and of some key-value heads, of an attention over `tokens`."""

    heads: Heads
    dropout: Dropout
    tokens: int
    batch: slice
    group: slice
    tile: Tile

    def numbers(self, scores: Array, lse: Array, place: int) -> tuple[float | np.uint64, ...]:
        """Return ROW_ARGUMENTS: the queries' lse are at `place` and on in lse (sequences, heads, tokens)."""
        rows, columns = scores.shape[0] * scores.shape[1], scores.shape[2]
        sharing, tile = self.heads.sharing, self.tile
        head = self.heads.number(self.batch.start, self.group.start * sharing)
        keys = map(np.uint64, (*self.dropout.key, round(self.dropout.chance * 2**32)))
        word = (head * self.tokens + tile.query) * self.tokens + tile.key
        steps = lse.strides[0] // lse.itemsize, lse.strides[1] // lse.itemsize, place
        sizes = rows, scores.shape[1] // sharing, sharing, tile.query - tile.key, columns, *steps
        count = (self.group.stop - self.group.start) * sharing
        form = form_of(self.heads, count, self.group, self.tokens)
        return (*sizes, *keys, word, self.heads.whole or self.heads.queries, self.tokens, *form)


def softmax(rows: Rows, scores: Array, dropped: Array, lse: Array, place: int, sinks: Array | None) -> None:
    """Write probabilities after dropout, without its factor, and the log-sum-exp. The scores are spent."""
    kernel = raw(_ROWS, "batched_softmax", (scores.dtype, dropped.dtype))
    arrays = scores, dropped, lse, NULL if sinks is None else sinks
    numbers = rows.numbers(scores, lse, place)
    run_rows(kernel, int(numbers[0]), scores.shape[2], *arrays, *numbers)


def softmax_backward(
    rows: Rows, scores: Array, dp: Array, dropped: Array, ds: Array, lse: Array, delta: Array, place: int
) -> None:
    """Write probabilities after dropout and the gradient of scores. lse and delta have the same strides."""
    kernel = raw(_ROWS, "batched_softmax_backward", (scores.dtype, ds.dtype))
    numbers = rows.numbers(scores, lse, place)
    run_rows(kernel, int(numbers[0]), scores.shape[2], scores, lse, delta, dp, dropped, ds, *numbers)
