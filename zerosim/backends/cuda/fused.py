"""GELU and dropout in CUDA, with their backward halves, and dropout's random mask. Formulas as in numpy/fused.py."""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import landing
from zerosim.backends.cuda.philox import PHILOX
from zerosim.backends.cuda.types import elementwise, raw, run_threads
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.fused import GELU_CUBIC, GELU_SCALE

DROPOUT_MASK = (
    PHILOX
    + r"""
// Eight words, so eight bytes of the mask, to a thread.
template <class B> __global__ void dropout_mask(
    unsigned long long key0, unsigned long long key1, long long threshold, B* out, long long size) {
    const long long j = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (8 * j >= size) return;
    const Words words = philox_words(key0, key1, j);
    unsigned long long bytes = 0;
    for (int k = 0; k < 8; ++k) {
        const unsigned long long kept = static_cast<long long>(words.at[k]) >= threshold;
        bytes |= kept << (8 * k);
    }
    if (8 * j + 8 <= size && reinterpret_cast<unsigned long long>(out) % 8 == 0) {
        reinterpret_cast<unsigned long long*>(out)[j] = bytes;  // little-endian: the first byte is the lowest
    } else {
        for (int k = 0; k < 8 && 8 * j + k < size; ++k) out[8 * j + k] = static_cast<B>(bytes >> (8 * k) & 1ull);
    }
}
"""
)

# 1 / (1 + exp(-2u)) with u the tanh form's argument; see numpy/fused.py.
_GATE = f"""
using W = typename wide<T>::type;
const W v = wide_of(x);
const W gate = W(1) / (W(1) + exp((v * v * W({-GELU_SCALE * GELU_CUBIC!r}) - W({GELU_SCALE!r})) * v));
"""
_gelu = elementwise("T x", "U out", _GATE + "store(v * gate, out)", "gelu")
_gelu_backward = elementwise(
    "G grad, T x",
    "U dx",
    _GATE
    + f"""
const W slope = (v * v * W({3.0 * GELU_SCALE * GELU_CUBIC!r}) + W({GELU_SCALE!r})) * v * (W(1) - gate) + W(1);
store(slope * gate * W(wide_of(grad)), dx)""",
    "gelu_backward",
)
_dropout = elementwise(
    "T x, M mask, float64 keep",
    "U out",
    "using W = typename wide<T>::type; store(wide_of(x) * W(mask) / W(keep), out)",
    "dropout",
)


def gelu(x: Array, out: Array) -> None:
    _gelu(x, out)


def gelu_backward(grad: Array, x: Array, dx: Array) -> None:
    _gelu_backward(grad, x, dx)


def dropout(x: Array, mask: Array, keep: float, out: Array) -> None:
    _dropout(x, mask, float(keep), out)


def dropout_mask(key: tuple[int, int], probability: float, out: Array) -> None:
    if not out.size:
        return
    words, kernel = map(np.uint64, key), raw(DROPOUT_MASK, "dropout_mask", (out.dtype,))
    with landing(out) as target:
        run_threads(kernel, -(-out.size // 8), *words, round(probability * 2**32), target, out.size)
