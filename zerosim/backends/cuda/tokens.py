"""Token embedding in CUDA; a block or a warp to a row."""

from __future__ import annotations

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, fill, result_for
from zerosim.backends.cuda.types import raw, run_rows, run_threads
from zerosim.backends.forms import Buckets
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


RELATIVE = r"""
// The bucket of each distance between a query and a key: STARTS has the first distance of each in one direction. It is
// part of the source: a model has one or two, and no kernel waits for an upload.
__device__ const long long STARTS[] = {0};
template <class I> __global__ void relative_buckets(I* out, long long tokens, long long later) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= tokens * tokens) return;
    const long long ahead = at % tokens - at / tokens, apart = ahead < 0 ? -ahead : later ? ahead : 0;
    I found = ahead > 0 ? later : 0;
    for (int k = 1; k < sizeof(STARTS) / sizeof(STARTS[0]); ++k) found += apart >= STARTS[k];
    out[at] = found;
}
"""


def relative_buckets(of: Buckets, out: Array) -> None:
    source = RELATIVE.replace("{0}", f"{{{', '.join(map(str, of.starts))}}}")
    with result_for(out) as target:
        kernel = raw(source, "relative_buckets", (target.dtype,))
        run_threads(kernel, out.size, target, np.int64(len(out)), np.int64(of.later))


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
