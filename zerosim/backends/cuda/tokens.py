"""The two ends of a language model in CUDA: token embedding, cross-entropy, labels drawn; a block or warp to a row."""

from __future__ import annotations

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, fill, result_for
from zerosim.backends.cuda.fused import PHILOX
from zerosim.backends.cuda.types import raw, run_rows
from zerosim.backends.kernels import Array

EMBEDDING = r"""
template <class I, class T, class O>
__global__ void embedding(const I* ids, const T* weight, O* out, long long rows, int columns, I first, I height) {
    using W = typename wide<T>::type;
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const I at = ids[row] - first;
    const bool here = at >= 0 && at < height;
    const T* from = weight + (here ? at : 0) * columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        store(here ? W(wide_of(from[c])) : W(0), out[row * columns + c]);
    }
}

// A stable sort by counting. Token t comes at the place p that is the number of tokens before it: those with a
// smaller id, and those with the same id and earlier. order[p] = t; length[p] = how many tokens have that id if
// t is the first of them, else 0. A warp counts for four tokens.
template <class I> __global__ void sort_ids(const I* ids, int* order, int* length, int tokens) {
    const int first = 4 * (blockIdx.x * blockDim.y + threadIdx.y);
    if (first >= tokens) return;
    I own[4];
    int smaller[4] = {0, 0, 0, 0}, earlier[4] = {0, 0, 0, 0}, equal[4] = {0, 0, 0, 0};
    for (int k = 0; k < 4; ++k) own[k] = ids[first + k < tokens ? first + k : tokens - 1];
    for (int j = threadIdx.x; j < tokens; j += 32) {
        const I id = ids[j];
        for (int k = 0; k < 4; ++k) {
            smaller[k] += id < own[k];
            equal[k] += id == own[k];
            earlier[k] += id == own[k] && j < first + k;
        }
    }
    for (int k = 0; k < 4 && first + k < tokens; ++k) {
        const int less = row_sum<int>(smaller[k], nullptr), before = row_sum<int>(earlier[k], nullptr);
        const int same = row_sum<int>(equal[k], nullptr);
        if (threadIdx.x == 0) {
            order[less + before] = first + k;
            length[less + before] = before ? 0 : same;
        }
    }
}

// dweight's row of each id that occurs: its rows of grad, added in the tokens' order. A block to 128 columns.
template <class I, class G, class O>
__global__ void add_runs(const I* ids, const int* order, const int* length, const G* grad, O* dweight, int columns,
                         I first, I height) {
    using W = typename wide<G>::type;
    const int start = blockIdx.x, count = length[start], c = blockIdx.y * 128 + threadIdx.x;
    if (count == 0 || c >= columns) return;
    const I at = ids[order[start]] - first;
    if (at < 0 || at >= height) return;
    W total = 0;
    #pragma unroll 8
    for (int k = 0; k < count; ++k) {
        total += wide_of(grad[static_cast<long long>(order[start + k]) * columns + c]);
    }
    store(total, dweight[at * columns + c]);
}
"""

CROSS_ENTROPY = r"""
template <class T, class I, class W>
__global__ void cross_entropy(const T* logits, const I* targets, W* losses, W* lses, long long rows, int columns) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    W top = wide_of(logits[0]);
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) top = larger(top, W(wide_of(logits[c])));
    top = row_max(top, shared);
    W total = 0;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) total += exp(W(wide_of(logits[c])) - top);
    total = row_sum(total, shared);
    if (threadIdx.x == 0) {
        const W lse = log(total) + top;
        lses[row] = lse;
        losses[row] = lse - W(wide_of(logits[targets[row]]));
    }
}

template <class T, class I, class W>
__global__ void cross_entropy_shares(const T* logits, const I* targets, const W* tops, W* sums, W* picked,
                                     long long rows, int columns, I first) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    const W top = tops[row];
    W total = 0;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) total += exp(W(wide_of(logits[c])) - top);
    total = row_sum(total, shared);
    if (threadIdx.x == 0) {
        const I at = targets[row] - first;
        sums[row] = total;
        picked[row] = at >= 0 && at < columns ? W(wide_of(logits[at])) : W(0);
    }
}

template <class T, class I, class W, class O>
__global__ void cross_entropy_backward(const T* logits, const I* targets, const W* lses, double scale, double count,
                                       O* dlogits, long long rows, int columns, I first) {
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    dlogits += row * columns;
    const W lse = lses[row];
    const I target = targets[row] - first;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        W v = exp(W(wide_of(logits[c])) - lse);
        if (c == target) v -= W(1);
        store(v * W(scale) / W(count), dlogits[c]);
    }
}
"""

LABELS = (
    PHILOX
    + r"""
// A row's sums are made a tile of blockDim.x columns at a time, twice in the same order: the second time to find the
// tile in which they pass u times the total. One thread walks through that.
template <class T, class I>
__global__ void sample_labels(const T* logits, unsigned long long key0, unsigned long long key1, long long first,
                              I* labels, long long rows, int columns) {
    using W = typename wide<T>::type;
    __shared__ W tops[32];
    __shared__ double shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    W top = wide_of(logits[0]);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) top = larger(top, W(wide_of(logits[c])));
    top = row_max(top, tops);
    const auto weight = [&](int c) { return c < columns ? double(exp(W(wide_of(logits[c])) - top)) : 0.0; };
    double total = 0;
    for (int start = 0; start < columns; start += blockDim.x) total += row_sum(weight(start + threadIdx.x), shared);
    const unsigned long long at = first + row;
    const Words words = philox_words(key0, key1, at / 4);
    const unsigned long long drawn = words.at[2 * (at % 4)] | (unsigned long long)(words.at[2 * (at % 4) + 1]) << 32;
    const double goal = double(drawn >> 11) / 9007199254740992.0 * total;
    double before = 0;
    int label = columns - 1;
    for (int start = 0; start < columns; start += blockDim.x) {
        const double tile = row_sum(weight(start + threadIdx.x), shared);
        if (before + tile > goal) {  // the same for all threads of the row
            label = start;
            const int last = min(start + static_cast<int>(blockDim.x), columns) - 1;
            double sum = before + weight(label);
            while (threadIdx.x == 0 && sum <= goal && label < last) sum += weight(++label);
            break;
        }
        before += tile;
    }
    if (threadIdx.x == 0) labels[row] = label;
}
"""
)


def embedding(ids: Array, weight: Array, out: Array, first: int = 0) -> None:
    if not out.size:
        return
    height, columns = weight.shape
    kernel = raw(EMBEDDING, "embedding", (ids.dtype, weight.dtype, out.dtype))
    with result_for(out) as target:
        sizes = ids.size, np.int32(columns), first, height
        run_rows(kernel, ids.size, columns, dense(ids), dense(weight), target, *sizes)


def embedding_backward(grad: Array, ids: Array, dweight: Array, first: int = 0) -> None:
    """Sort the tokens by id, keep the order of equal ids, and add up each run, without atomics.

    Scratch: 8 bytes a token. The sort compares every token with every other, so its work grows with the square of
    their number (67 million comparisons for 8,192). Unlike a library's sort it never waits for the device.
    """
    tokens, (height, columns) = ids.size, dweight.shape
    with result_for(dweight) as target:
        fill(target, 0.0)
        if not tokens or not columns:
            return
        ids, grad = dense(ids), dense(grad)
        order, length = cp.empty((tokens,), np.int32), cp.empty((tokens,), np.int32)
        sort = raw(EMBEDDING, "sort_ids", (ids.dtype,))
        sort((-(-tokens // 32),), (32, 8), (ids, order, length, np.int32(tokens)))
        add = raw(EMBEDDING, "add_runs", (ids.dtype, grad.dtype, target.dtype))
        add((tokens, -(-columns // 128)), (128,), (ids, order, length, grad, target, np.int32(columns), first, height))


def cross_entropy(logits: Array, targets: Array, losses: Array, lse: Array) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy", (logits.dtype, targets.dtype, lse.dtype))
    with result_for(losses) as each, result_for(lse) as sums:
        run_rows(kernel, rows, columns, dense(logits), dense(targets), each, sums, rows, np.int32(columns))


def cross_entropy_shares(logits: Array, targets: Array, first: int, top: Array, sums: Array, picked: Array) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy_shares", (logits.dtype, targets.dtype, top.dtype))
    with result_for(sums) as totals, result_for(picked) as found:
        sources = dense(logits), dense(targets), dense(top)
        run_rows(kernel, rows, columns, *sources, totals, found, rows, np.int32(columns), first)


def cross_entropy_backward(
    logits: Array, targets: Array, lse: Array, scale: float, count: int, dlogits: Array, first: int = 0
) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy_backward", (logits.dtype, targets.dtype, lse.dtype, dlogits.dtype))
    sources = dense(logits), dense(targets), dense(lse)
    with result_for(dlogits) as target:
        run_rows(kernel, rows, columns, *sources, float(scale), float(count), target, rows, np.int32(columns), first)


def sample_labels(logits: Array, key: tuple[int, int], first: int, labels: Array) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel, words = raw(LABELS, "sample_labels", (logits.dtype, labels.dtype)), map(np.uint64, key)
    with result_for(labels) as target:
        run_rows(kernel, rows, columns, dense(logits), *words, first, target, rows, np.int32(columns))
