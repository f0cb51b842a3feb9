"""Cross-entropy and drawn labels in CUDA; a block or a warp to a row of logits."""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.fused import PHILOX
from zerosim.backends.cuda.types import raw, run_rows
from zerosim.backends.forms import PLAIN, LogitForm
from zerosim.backends.kernels import Array

FORMED = r"""
// A logit, multiplied and capped; cap 0: not capped.
template <class W> __device__ inline W formed(W logit, double factor, double cap) {
    if (factor != 1) logit *= W(factor);
    return cap == 0 ? logit : tanh(logit / W(cap)) * W(cap);
}
"""

CROSS_ENTROPY = (
    FORMED
    + r"""
template <class T, class I, class W>
__global__ void cross_entropy(const T* logits, const I* targets, W* losses, W* lses, long long rows, int columns,
                              double factor, double cap) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    W top = wide_of(logits[0]);
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) top = larger(top, W(wide_of(logits[c])));
    top = formed(row_max(top, shared), factor, cap);  // it grows with the logit
    W total = 0;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        total += exp(formed(W(wide_of(logits[c])), factor, cap) - top);
    total = row_sum(total, shared);
    if (threadIdx.x == 0) {
        const W lse = log(total) + top;
        lses[row] = lse;
        losses[row] = targets[row] < 0 ? W(0) : lse - formed(W(wide_of(logits[targets[row]])), factor, cap);
    }
}

template <class T, class I, class W>
__global__ void cross_entropy_shares(const T* logits, const I* targets, const W* tops, W* sums, W* picked,
                                     long long rows, int columns, I first, double factor, double cap) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    const W top = tops[row];
    W total = 0;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        total += exp(formed(W(wide_of(logits[c])), factor, cap) - top);
    total = row_sum(total, shared);
    if (threadIdx.x == 0) {
        const I at = targets[row] - first;
        sums[row] = total;
        picked[row] = at >= 0 && at < columns ? formed(W(wide_of(logits[at])), factor, cap) : W(0);
        if (targets[row] < 0) {
            sums[row] = first == 0;
            picked[row] = first == 0 ? top : W(0);
        }
    }
}

template <class T, class I, class W, class O>
__global__ void cross_entropy_backward(const T* logits, const I* targets, const W* lses, double scale, double count,
                                       O* dlogits, long long rows, int columns, I first, double factor,
                                       double cap) {
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    dlogits += row * columns;
    const W lse = lses[row];
    const I target = targets[row] - first;
    #pragma unroll 4
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W z = formed(W(wide_of(logits[c])), factor, cap);
        W v = exp(z - lse);
        if (c == target) v -= W(1);
        if (targets[row] < 0) v = 0;
        v = v * W(scale) / W(count);
        if (cap != 0) v *= (W(1) - z / W(cap) * (z / W(cap))) * W(factor);
        else if (factor != 1) v *= W(factor);
        store(v, dlogits[c]);
    }
}
"""
)

LABELS = (
    PHILOX
    + FORMED
    + r"""
// A row's sums are made a tile of blockDim.x columns at a time, twice in the same order: the second time to find the
// tile in which they pass u times the total. One thread walks through that.
template <class T, class I>
__global__ void sample_labels(const T* logits, unsigned long long key0, unsigned long long key1, long long first,
                              I* labels, long long rows, int columns, double factor, double cap) {
    using W = typename wide<T>::type;
    __shared__ W tops[32];
    __shared__ double shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    logits += row * columns;
    W top = wide_of(logits[0]);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) top = larger(top, W(wide_of(logits[c])));
    top = formed(row_max(top, tops), factor, cap);
    const auto weight = [&](int c) {
        return c < columns ? double(exp(formed(W(wide_of(logits[c])), factor, cap) - top)) : 0.0;
    };
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


def cross_entropy(logits: Array, targets: Array, losses: Array, lse: Array, form: LogitForm = PLAIN) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy", (logits.dtype, targets.dtype, lse.dtype))
    with result_for(losses) as each, result_for(lse) as sums:
        run_rows(
            kernel, rows, columns, dense(logits), dense(targets), each, sums, rows, np.int32(columns), *_numbers(form)
        )


def cross_entropy_shares(
    logits: Array, targets: Array, first: int, top: Array, sums: Array, picked: Array, form: LogitForm = PLAIN
) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy_shares", (logits.dtype, targets.dtype, top.dtype))
    with result_for(sums) as totals, result_for(picked) as found:
        sources = dense(logits), dense(targets), dense(top)
        run_rows(kernel, rows, columns, *sources, totals, found, rows, np.int32(columns), first, *_numbers(form))


def cross_entropy_backward(
    logits: Array,
    targets: Array,
    lse: Array,
    scale: float,
    count: float,
    dlogits: Array,
    first: int = 0,
    form: LogitForm = PLAIN,
) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel = raw(CROSS_ENTROPY, "cross_entropy_backward", (logits.dtype, targets.dtype, lse.dtype, dlogits.dtype))
    sources = dense(logits), dense(targets), dense(lse)
    with result_for(dlogits) as target:
        sizes = float(scale), float(count), target, rows, np.int32(columns), first
        run_rows(kernel, rows, columns, *sources, *sizes, *_numbers(form))


def _numbers(form: LogitForm) -> tuple[float, float]:
    return float(form.factor), float(form.cap)


def sample_labels(logits: Array, key: tuple[int, int], first: int, labels: Array, form: LogitForm = PLAIN) -> None:
    rows, columns = logits.shape
    if not rows:
        return
    kernel, words = raw(LABELS, "sample_labels", (logits.dtype, labels.dtype)), map(np.uint64, key)
    with result_for(labels) as target:
        run_rows(kernel, rows, columns, dense(logits), *words, first, target, rows, np.int32(columns), *_numbers(form))
