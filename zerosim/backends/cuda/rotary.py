"""Rotary positions on the device: of all or some columns of a head, by a base or a table of frequencies."""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.types import raw, run_threads
from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Array

RATE_OF_BASE = r"""
template <class V> __device__ inline V rate_of(long long pair, long long half, double base) {
    const V exponent = V(2 * pair) / V(2 * half);
    return V(1) / V(pow(double(V(base)), double(exponent)));
}
"""

_RATE_OF_TABLE = r"""
template <class V> __device__ inline V rate_of(long long pair, long long, double) { return V(RATES[pair]); }
"""

_ROTARY = (
    RATE_OF_BASE
    + r"""
// A thread turns one pair of columns in every head of one token: their angle is made once. As on the host, the angle
// is rounded to the compute dtype; its power, cosine and sine are taken in double. Heads have `width` columns, of which
// 2 * half turn.
template <class T, class U> __global__ void rotary(
    const T* x, U* out, long long first, long long tokens, long long rows, long long columns, long long heads,
    long long width, long long half, double base, double factor, int interleaved, int inverse) {
    using V = typename wide<T>::type;
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long row = i / half, pair = i % half;
    if (row >= rows) return;
    const V rate = rate_of<V>(pair, half, base);
    const double angle = V(first + row % tokens) * rate;
    const V c = V(cos(angle)) * V(factor), s = (inverse ? -V(sin(angle)) : V(sin(angle))) * V(factor);
    const T* from = x + row * columns;
    U* to = out + row * columns;
    for (long long head = 0; head < heads; ++head) {
        const long long one = head * width + (interleaved ? 2 * pair : pair), other = one + (interleaved ? 1 : half);
        const V a = wide_of(from[one]), b = wide_of(from[other]);
        store(a * c - b * s, to[one]);
        store(b * c + a * s, to[other]);
        for (long long j = head * width + 2 * half + pair; j < (head + 1) * width; j += half)
            store(wide_of(from[j]), to[j]);
    }
    for (long long j = heads * width + pair; j < columns; j += half) store(wide_of(from[j]), to[j]);
}
"""
)


def rotary_source(frequencies: tuple[float, ...]) -> str:
    return with_rates(_ROTARY, frequencies)


def with_rates(source: str, frequencies: tuple[float, ...]) -> str:
    """A table of frequencies is part of the source: a model has one or two, and no kernel waits for an upload."""
    table = f"__device__ const double RATES[] = {{{', '.join(map(repr, frequencies))}}};\n"
    return source.replace(RATE_OF_BASE, table + _RATE_OF_TABLE) if frequencies else source


def rotary(x: Array, head_dim: int, heads: int, rope: Rope, inverse: bool, out: Array) -> None:
    batch, tokens, columns = x.shape
    if not x.size:
        return
    rows, half, source = batch * tokens, (rope.turned or head_dim) // 2, rotary_source(rope.frequencies)
    sizes = rope.first, tokens, rows, columns, heads, head_dim, half
    numbers = float(rope.base), float(rope.factor), np.int32(rope.interleaved), np.int32(inverse)
    with result_for(out) as result:
        kernel = raw(source, "rotary", (x.dtype, out.dtype))
        run_threads(kernel, rows * half, dense(x), result, *sizes, *numbers)
