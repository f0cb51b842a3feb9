"""Experts in CUDA: a thread chooses a token's experts, a warp or a block moves a row, cuBLAS runs once an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import copy, dense, fill, result_for
from zerosim.backends.cuda.norm import column_sum
from zerosim.backends.cuda.ops import multiply
from zerosim.backends.cuda.products import product
from zerosim.backends.cuda.types import NULL, elementwise, raw, run_rows, run_threads
from zerosim.backends.forms import Choice
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import FLOAT32, FLOAT64

SCORES = ("softmax", "sigmoid", "softmax of chosen")

ROUTE = r"""
// The scores of a token's logits: all of its softmax, their sigmoids, or the logits themselves.
template <class W, class T> __device__ void scores_of(const T* logits, W* scores, int experts, int kind) {
    W top = wide_of(logits[0]), total = 0;
    for (int e = 1; e < experts; ++e) top = larger(top, W(wide_of(logits[e])));
    for (int e = 0; e < experts; ++e) {
        const W x = wide_of(logits[e]);
        scores[e] = kind == 0 ? exp(x - top) : kind == 1 ? W(1) / (W(1) + exp(-x)) : x;
        total += scores[e];
    }
    for (int e = 0; kind == 0 && e < experts; ++e) scores[e] /= total;
}

// What the k chosen ones weigh before they are divided by their sum.
template <class W, class I> __device__ void chosen_of(const W* scores, const I* ids, W* chosen, int k, int kind) {
    W top = scores[ids[0]], total = 0;
    for (int c = 0; c < k; ++c) top = larger(top, scores[ids[c]]);
    for (int c = 0; c < k; ++c) {
        chosen[c] = kind == 2 ? exp(scores[ids[c]] - top) : scores[ids[c]];
        total += chosen[c];
    }
    for (int c = 0; kind == 2 && c < k; ++c) chosen[c] /= total;
}

// room (M, 2 E): a token's scores, and those by which it chooses; taken ones become -inf.
template <class T, class O, class I, class W>
__global__ void route(const T* all, const T* bias, W* room, O* weights, I* ids, int tokens, int experts, int k,
                      int kind, int groups, int kept, int best, int normed, int given, int biased, double scale) {
    const int m = blockIdx.x * blockDim.x + threadIdx.x;
    if (m >= tokens) return;
    const W none = -1.0 / 0.0;
    W *scores = room + 2LL * m * experts, *by = scores + experts;
    I* own = ids + 1LL * m * k;
    scores_of<W>(all + 1LL * m * experts, scores, experts, kind);
    for (int e = 0; e < experts; ++e) by[e] = scores[e] + (biased ? W(wide_of(bias[e])) : W(0));
    const int each = experts / groups;
    // Groups in the order of their sums: those that come after the kept ones are left out.
    for (int g = 0; kept < groups && g < groups; ++g) {
        W sum = 0, last = 1.0 / 0.0;
        int at = -1;
        for (int b = 0; b < best; ++b) {
            W found = none;
            int place = -1;
            for (int e = 0; e < each; ++e) {
                const W s = by[g * each + e];
                const bool is_next = s < last || (s == last && e > at);
                if (is_next && (place < 0 || s > found)) { found = s; place = e; }
            }
            sum += found; last = found; at = place;
        }
        scores[g] = sum;  // in the room of the scores, which are computed again
    }
    if (kept < groups) {
        for (int g = 0; g < groups; ++g) {
            int before = 0;
            for (int o = 0; o < groups; ++o) before += scores[o] > scores[g] || (scores[o] == scores[g] && o < g);
            for (int e = 0; before >= kept && e < each; ++e) by[g * each + e] = none;
        }
        scores_of<W>(all + 1LL * m * experts, scores, experts, kind);
    }
    for (int c = 0; c < k; ++c) {
        int place = given ? int(own[c]) : 0;
        for (int e = 1; !given && e < experts; ++e) if (by[e] > by[place]) place = e;
        own[c] = place;
        by[place] = none;
    }
    chosen_of<W>(scores, own, by, k, kind);  // the choice is made: its room is free
    W total = 0;
    for (int c = 0; c < k; ++c) total += by[c];
    for (int c = 0; c < k; ++c) store((normed ? by[c] / total : by[c]) * W(scale), weights[1LL * m * k + c]);
}

template <class G, class T, class O, class I, class W>
__global__ void route_backward(const G* grad, const T* all, const I* ids, W* room, O* dlogits, int tokens, int experts,
                               int k, int kind, int normed, double scale) {
    const int m = blockIdx.x * blockDim.x + threadIdx.x;
    if (m >= tokens) return;
    W *scores = room + 2LL * m * experts, *chosen = scores + experts;
    const I* own = ids + 1LL * m * k;
    const G* g = grad + 1LL * m * k;
    O* out = dlogits + 1LL * m * experts;
    scores_of<W>(all + 1LL * m * experts, scores, experts, kind);
    chosen_of<W>(scores, own, chosen, k, kind);
    W total = 0, sum = 0, inner = 0;
    for (int c = 0; c < k; ++c) { total += chosen[c]; sum += W(wide_of(g[c])) * W(scale) * chosen[c]; }
    // The gradient of the chosen scores, in the place of their weights; `inner` is its product with these.
    for (int c = 0; c < k; ++c) {
        const W weight = chosen[c], own_grad = W(wide_of(g[c])) * W(scale);
        chosen[c] = normed ? (own_grad - sum / total) / total : own_grad;
        inner += chosen[c] * weight;
        if (kind == 2) scores[own[c]] = weight;
    }
    for (int e = 0; e < experts; ++e) {
        W found = 0;
        bool is_chosen = false;
        for (int c = 0; c < k; ++c) if (own[c] == e) { found = chosen[c]; is_chosen = true; }
        const W s = scores[e];
        store(kind == 1 ? found * s * (W(1) - s) : kind == 0 || is_chosen ? s * (found - inner) : W(0), out[e]);
    }
}

// A thread counts for an expert, first what comes before its rows, then writes them.
template <class I> __global__ void sort_rows(const I* ids, I* order, I* counts, long long rows, int experts) {
    const int e = blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= experts) return;
    long long at = 0;
    for (long long r = 0; r < rows; ++r) at += ids[r] < e;
    const long long first = at;
    for (long long r = 0; r < rows; ++r) if (ids[r] == e) order[at++] = r;
    counts[e] = at - first;
}
template <class I> __global__ void places(const I* order, int* at, long long rows, long long choices) {
    const long long r = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (r < rows && order[r] >= 0 && order[r] < choices) at[order[r]] = int(r);
}
// A thread keeps a row or not: `before` of its expert's rows come before it, of those that are kept.
template <class I, class V> __global__ void kept_of(const I* order, const I* counts, const V* weights, int* kept,
                                                    long long rows, int most, int weighed) {
    const long long r = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    long long start = 0, before = 0;
    int e = 0;
    for (; start + counts[e] <= r; ++e) start += counts[e];
    const long long stop = start + counts[e];
    if (!weighed) {
        kept[r] = r - start < most;
        return;
    }
    const auto own = wide_of(weights[order[r]]);
    for (long long o = start; o < stop; ++o) {
        const auto other = wide_of(weights[order[o]]);
        before += other > own || (other == own && o < r);
    }
    kept[r] = before < most;
}
template <class I> __global__ void keep_rows(const I* order, const I* counts, const int* kept, I* out, long long rows,
                                             int most, int padded) {
    const long long r = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows || !kept[r]) return;
    long long start = 0, at = 0;
    int e = 0;
    for (; start + counts[e] <= r; ++e) {
        start += counts[e];
        at += padded ? most : counts[e] < most ? counts[e] : most;
    }
    for (long long o = start; o < r; ++o) at += kept[o];
    out[at] = order[r];
}
template <class I, class O>
__global__ void count_choices(const I* ids, O* out, int runs, int experts, long long each) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, run = at / experts, e = at % experts;
    if (run >= runs) return;
    long long found = 0;
    for (long long c = 0; c < each; ++c) found += ids[run * each + c] == e;
    out[at] = O(found);
}
template <class T, class V, class O>
__global__ void router_losses_backward(const T* all, const V* loads, O* dlogits, int tokens, int experts, int each,
                                       int sigmoid, double balance, double size) {
    using W = typename wide<T>::type;
    const int m = blockIdx.x * blockDim.x + threadIdx.x;
    if (m >= tokens) return;
    const T* x = all + 1LL * m * experts;
    const V* load = loads + 1LL * (m / each) * experts;
    W top = wide_of(x[0]), total = 0, sum = 0, inner = 0;
    for (int e = 1; e < experts; ++e) top = larger(top, W(wide_of(x[e])));
    for (int e = 0; e < experts; ++e) {
        total += exp(W(wide_of(x[e])) - top);
        sum += sigmoid ? W(1) / (W(1) + exp(-W(wide_of(x[e])))) : W(0);
    }
    const W z = W(size) * (top + log(total));
    for (int e = 0; e < experts; ++e) {
        const W v = wide_of(x[e]), p = sigmoid ? W(1) / (W(1) + exp(-v)) / sum : exp(v - top) / total;
        inner += W(balance) * W(wide_of(load[e])) * p;
    }
    for (int e = 0; e < experts; ++e) {
        const W v = wide_of(x[e]), p = exp(v - top) / total, g = W(balance) * W(wide_of(load[e])) - inner;
        const W s = sigmoid ? W(1) / (W(1) + exp(-v)) : p;
        store(z * p + (sigmoid ? g / sum * s * (W(1) - s) : p * g), dlogits[1LL * m * experts + e]);
    }
}
template <class T, class I, class O>
__global__ void take_rows(const T* x, const I* order, O* out, long long rows, int columns, int each,
                          long long tokens) {
    const long long row = 1LL * blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long token = order[row] / each;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        if (token < tokens) store(wide_of(x[token * columns + c]), out[row * columns + c]);
        else out[row * columns + c] = O(0.0f);
    }
}
template <class T, class O>
__global__ void sum_rows(const T* rows, const int* at, O* out, long long tokens, int columns, int each) {
    using W = typename wide<T>::type;
    const long long t = 1LL * blockIdx.x * blockDim.y + threadIdx.y;
    if (t >= tokens) return;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        W total = 0;
        for (int k = 0; k < each; ++k) {
            const long long row = at[t * each + k];
            if (row >= 0) total += wide_of(rows[row * columns + c]);
        }
        store(total, out[t * columns + c]);
    }
}
template <class T, class V, class O>
__global__ void weigh_rows(const T* x, const V* weights, O* out, long long rows, int columns) {
    using W = typename wide_both<T, V>::type;
    const long long row = 1LL * blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const W weight = wide_of(weights[row]);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) store(W(wide_of(x[row * columns + c])) * weight,
                                                                  out[row * columns + c]);
}
template <class G, class T, class V, class O, class P>
__global__ void weigh_rows_backward(const G* grad, const T* x, const V* weights, O* dx, P* dweights, long long rows,
                                    int columns) {
    using W = typename wide_both<G, V>::type;
    __shared__ W shared[32];
    const long long row = 1LL * blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const W weight = wide_of(weights[row]);
    W total = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W g = wide_of(grad[row * columns + c]);
        total += g * W(wide_of(x[row * columns + c]));
        store(g * weight, dx[row * columns + c]);
    }
    total = row_sum<W>(total, shared);
    if (threadIdx.x == 0) store(total, dweights[row]);
}
"""


def route(logits: Array, bias: Array | None, how: Choice, weights: Array, ids: Array) -> None:
    tokens, experts = logits.shape
    compute = FLOAT64 if logits.dtype == FLOAT64 else FLOAT32
    if not tokens:
        return
    added = NULL if bias is None else dense(bias, logits.dtype)
    room = cp.empty((tokens, 2 * experts), compute)
    with result_for(weights) as out, result_for(ids) as chosen:
        if how.given:
            listed = np.repeat(np.arange(experts, dtype=chosen.dtype), how.given).reshape(ids.shape[::-1])
            chosen.set(np.ascontiguousarray(listed.T))
        kernel = raw(ROUTE, "route", (logits.dtype, out.dtype, chosen.dtype, compute))
        sizes = tokens, experts, ids.shape[1], SCORES.index(how.scores), how.groups, how.chosen, how.best
        flags = how.normed, bool(how.given), bias is not None
        numbers = [np.int32(number) for number in (*sizes, *flags)]
        run_threads(kernel, tokens, dense(logits), added, room, out, chosen, *numbers, np.float64(how.scale))


def route_backward(grad: Array, logits: Array, ids: Array, how: Choice, dlogits: Array) -> None:
    tokens, experts = logits.shape
    compute = FLOAT64 if logits.dtype == FLOAT64 else FLOAT32
    if not tokens:
        return
    room = cp.empty((tokens, 2 * experts), compute)
    with result_for(dlogits) as out:
        kernel = raw(ROUTE, "route_backward", (grad.dtype, logits.dtype, out.dtype, ids.dtype, compute))
        numbers = tokens, experts, ids.shape[1], SCORES.index(how.scores), how.normed
        arrays = dense(grad), dense(logits), dense(ids), room, out
        run_threads(kernel, tokens, *arrays, *[np.int32(number) for number in numbers], np.float64(how.scale))


def sort_rows(ids: Array, order: Array, counts: Array) -> None:
    with result_for(order) as sorted_rows, result_for(counts) as found:
        kernel = raw(ROUTE, "sort_rows", (ids.dtype,))
        run_threads(kernel, counts.size, dense(ids), sorted_rows, found, np.int64(ids.size), np.int32(counts.size))


def keep_rows(order: Array, counts: Array, weights: Array | None, most: int, padded: bool, out: Array) -> None:
    """Mark the kept rows, then write them. Scratch: 4 bytes a row."""
    rows = order.size
    if not rows:
        return
    kept, by = cp.empty((rows,), np.int32), NULL if weights is None else dense(weights)
    order, counts = dense(order), dense(counts)
    sizes = np.int64(rows), np.int32(most)
    with result_for(out) as target:
        if padded:
            target.fill(rows)
        kernel = raw(ROUTE, "kept_of", (order.dtype, FLOAT32 if weights is None else weights.dtype))
        run_threads(kernel, rows, order, counts, by, kept, *sizes, np.int32(weights is not None))
        run_threads(raw(ROUTE, "keep_rows", (order.dtype,)), rows, order, counts, kept, target, *sizes,
                    np.int32(padded))  # fmt: skip


def count_choices(ids: Array, out: Array) -> None:
    with result_for(out) as found:
        runs, experts = out.shape
        kernel = raw(ROUTE, "count_choices", (ids.dtype, found.dtype))
        each = np.int64(ids.size // runs)
        run_threads(kernel, out.size, dense(ids), found, np.int32(runs), np.int32(experts), each)


def router_losses_backward(
    logits: Array, loads: Array, scores: str, balance: float, size: float, dlogits: Array
) -> None:
    tokens, experts = logits.shape
    if not tokens:
        return
    with result_for(dlogits) as out:
        kernel = raw(ROUTE, "router_losses_backward", (logits.dtype, loads.dtype, out.dtype))
        numbers = tokens, experts, tokens // len(loads), scores == "sigmoid"
        arrays = dense(logits), dense(loads), out
        factors = np.float64(balance), np.float64(size)
        run_threads(kernel, tokens, *arrays, *[np.int32(number) for number in numbers], *factors)


def take_rows(x: Array, order: Array, each: int, out: Array) -> None:
    if not out.size:
        return
    with result_for(out) as target:
        kernel = raw(ROUTE, "take_rows", (x.dtype, order.dtype, target.dtype))
        sizes = np.int64(len(out)), np.int32(out.shape[1]), np.int32(each), np.int64(len(x))
        run_rows(kernel, *out.shape, dense(x), dense(order), target, *sizes)


def sum_rows(rows: Array, order: Array, each: int, out: Array) -> None:
    """Find the row of each choice, then add a token's. Scratch: 4 bytes a choice."""
    if not out.size:
        return
    at = cp.empty((len(out) * each,), np.int32)
    at.fill(-1)
    if order.size:
        choices = np.int64(order.size), np.int64(at.size)
        run_threads(raw(ROUTE, "places", (order.dtype,)), order.size, dense(order), at, *choices)
    with result_for(out) as target:
        kernel = raw(ROUTE, "sum_rows", (rows.dtype, target.dtype))
        sizes = np.int64(len(out)), np.int32(out.shape[1]), np.int32(each)
        run_rows(kernel, *out.shape, dense(rows), at, target, *sizes)


def weigh_rows(rows: Array, weights: Array, out: Array) -> None:
    if not out.size:
        return
    with result_for(out) as target:
        kernel = raw(ROUTE, "weigh_rows", (rows.dtype, weights.dtype, target.dtype))
        run_rows(kernel, *out.shape, dense(rows), dense(weights), target, np.int64(len(out)), np.int32(out.shape[1]))


def weigh_rows_backward(grad: Array, rows: Array, weights: Array, drows: Array, dweights: Array) -> None:
    if not drows.size:
        return
    with result_for(drows) as dx, result_for(dweights) as dw:
        kernel = raw(ROUTE, "weigh_rows_backward", (grad.dtype, rows.dtype, weights.dtype, dx.dtype, dw.dtype))
        arrays = dense(grad), dense(rows), dense(weights), dx, dw
        run_rows(kernel, *drows.shape, *arrays, np.int64(len(drows)), np.int32(drows.shape[1]))


def _each(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    for expert, stop in enumerate(accumulate(counts)):
        yield expert, slice(stop - counts[expert], stop)


def grouped(rows: Array, stack: Array, counts: Sequence[int], out: Array) -> None:
    for expert, of in _each(counts):
        product(rows[of], stack[expert], out[of])


def grouped_wgrad(left: Array, right: Array, counts: Sequence[int], scale: float, dstack: Array) -> None:
    for expert, of in _each(counts):
        product(left[of].T, right[of], dstack[expert], scale=scale)


def move_rows(rows: Array, chunks: Sequence[int], order: Sequence[int], out: Array) -> None:
    runs, at = [of for _, of in _each(chunks)], 0
    for chunk in order:
        if chunks[chunk]:
            copy(rows[runs[chunk]], out[at : at + chunks[chunk]])
        at += chunks[chunk]


_add_biases = elementwise("T bias", "U row", "store(wide_of(row) + wide_of(bias), row)", "add_biases")
_CLAMPED = (
    "using V = typename wide<T>::type; const V top = V(limit), a = V(alpha);"
    "const V g = wide_of(gate) > top ? top : wide_of(gate), w = wide_of(up);"
    "const V u = w > top ? top : w < -top ? -top : w, share = V(1) / (V(1) + exp(-a * g));"
)
_clamped = elementwise(
    "T gate, T up, float64 alpha, float64 limit", "U y", _CLAMPED + "store(g * share * (u + V(1)), y)", "clamped_swiglu"
)
_clamped_backward = elementwise(
    "G grad, T gate, T up, float64 alpha, float64 limit",
    "U dgate, U dup",
    _CLAMPED
    + "const V s = wide_of(grad);"
    + "store(wide_of(gate) > top ? V(0) : s * (u + V(1)) * share * (V(1) + a * g * (V(1) - share)), dgate);"
    + "store(w > top || w < -top ? V(0) : s * g * share, dup)",
    "clamped_swiglu_backward",
)


def add_biases(rows: Array, bias: Array, counts: Sequence[int]) -> None:
    for expert, of in _each(counts):
        if of.stop > of.start:
            _add_biases(bias[expert][None], rows[of])


def sum_biases(rows: Array, counts: Sequence[int], scale: float, dbias: Array) -> None:
    for expert, of in _each(counts):
        if of.stop > of.start:
            column_sum(rows[of], dbias[expert])
        else:
            fill(dbias[expert], 0.0)
    if scale != 1.0:
        multiply(dbias, scale, dbias)


def clamped_swiglu(x: Array, alpha: float, limit: float, out: Array) -> None:
    _clamped(x[:, ::2], x[:, 1::2], float(alpha), float(limit), out)


def clamped_swiglu_backward(grad: Array, x: Array, alpha: float, limit: float, dx: Array) -> None:
    _clamped_backward(grad, x[:, ::2], x[:, 1::2], float(alpha), float(limit), dx[:, ::2], dx[:, 1::2])
