"""GELU and dropout in CUDA, with their backward halves, and dropout's random mask. Formulas as in numpy/fused.py.

Random numbers are Philox-4x64-10's, in the order that `kernels.dropout_mask` defines.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 4.3.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import result_for
from zerosim.backends.cuda.types import elementwise, raw, run_threads
from zerosim.backends.kernels import Array, Dropout, Window
from zerosim.backends.numpy.fused import GELU_CUBIC, GELU_SCALE

PHILOX = r"""
struct Words { unsigned int at[8]; };

// Words 8 * block .. 8 * block + 7 of the stream of a key.
__device__ inline Words philox_words(unsigned long long key0, unsigned long long key1, unsigned long long block) {
    unsigned long long a = block + 1, b = 0, c = 0, d = 0;
    for (int round = 0; round < 10; ++round) {
        const unsigned long long left = a * 0xD2E7470EE14C6C93ull, left_high = __umul64hi(a, 0xD2E7470EE14C6C93ull);
        const unsigned long long right = c * 0xCA5A826395121157ull, right_high = __umul64hi(c, 0xCA5A826395121157ull);
        a = right_high ^ b ^ key0;
        b = right;
        c = left_high ^ d ^ key1;
        d = left;
        key0 += 0x9E3779B97F4A7C15ull;
        key1 += 0xBB67AE8584CAA73Bull;
    }
    const unsigned long long drawn[4] = {a, b, c, d};
    Words words;
    for (int i = 0; i < 4; ++i) {
        words.at[2 * i] = static_cast<unsigned int>(drawn[i]);
        words.at[2 * i + 1] = static_cast<unsigned int>(drawn[i] >> 32);
    }
    return words;
}
"""

MASKS = (
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

// mask (rows, columns) of consecutive rows, row r of them the `columns` words from first + (r / run) * jump +
// (r % run) * step on. A thread draws one block of 8 words: `blocks` of them cover a row wherever it begins.
template <class B> __global__ void mask_rows(
    B* mask, unsigned long long key0, unsigned long long key1, unsigned long long threshold, long long first,
    long long run, long long jump, long long step, long long rows, long long columns, long long blocks) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long row = i / blocks;
    if (row >= rows) return;
    const long long begin = first + row / run * jump + row % run * step;
    const long long block = begin / 8 + i % blocks;
    const Words words = philox_words(key0, key1, block);
    for (int word = 0; word < 8; ++word) {
        const long long column = block * 8 + word - begin;
        if (column >= 0 && column < columns) mask[row * columns + column] = words.at[word] >= threshold;
    }
}
"""
)

# 1 / (1 + exp(-2u)) with u the tanh form's argument; see numpy/fused.py.
GELU_GATE = f"""
using W = typename wide<T>::type;
const W v = wide_of(x);
const W gate = W(1) / (W(1) + exp((v * v * W({-GELU_SCALE * GELU_CUBIC!r}) - W({GELU_SCALE!r})) * v));
"""
GELU_SLOPE = f"""
const W slope = ((v * v * W({3.0 * GELU_SCALE * GELU_CUBIC!r}) + W({GELU_SCALE!r})) * v * (W(1) - gate) + W(1)) * gate;
"""
_gelu = elementwise("T x", "U out", GELU_GATE + "store(v * gate, out)", "gelu")
_gelu_backward = elementwise(
    "G grad, T x", "U dx", GELU_GATE + GELU_SLOPE + "store(slope * W(wide_of(grad)), dx)", "gelu_backward"
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


def dropout_mask(key: tuple[int, int], probability: float, out: Array, window: Window | None = None) -> None:
    if not out.size:
        return
    if window is not None:
        with result_for(out) as target:
            rows = target.reshape(-1, 1, window.run)
            mask_rows(Dropout(key, probability), rows, window.first, window.stride, 0)
        return
    words, kernel = map(np.uint64, key), raw(MASKS, "dropout_mask", (out.dtype,))
    with result_for(out) as target:
        run_threads(kernel, -(-out.size // 8), *words, round(probability * 2**32), target, out.size)


def mask_rows(dropout: Dropout, mask: Array, first: int, jump: int, step: int) -> None:
    """mask (heads, queries, columns), uint8 and contiguous: 1 where word first + head * jump + query * step + column
    of the key's stream is at least chance * 2**32. So a mask's rows need not be complete."""
    heads, run, columns = mask.shape
    if not mask.size:
        return
    blocks = (columns + 6) // 8 + 1
    kernel, words = (
        raw(MASKS, "mask_rows", (mask.dtype,)),
        map(np.uint64, (*dropout.key, round(dropout.chance * 2**32))),
    )
    places = first, run, jump, step, heads * run, columns, blocks
    run_threads(kernel, heads * run * blocks, mask, *words, *places)
