"""Dropout's random numbers on the device: Philox-4x64-10, the words of `kernels.dropout_mask`.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 4.3.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.types import raw, run_threads
from zerosim.backends.kernels import Array

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

_MASK_ROWS = (
    PHILOX
    + r"""
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


def mask_rows(key: tuple[int, int], dropout: float, mask: Array, first: int, jump: int, step: int) -> None:
    """mask (heads, queries, columns), uint8 and contiguous: 1 where word first + head * jump + query * step + column
    of key's stream is at least dropout * 2**32, so that a mask's rows need not be whole."""
    heads, run, columns = mask.shape
    if not mask.size:
        return
    blocks = (columns + 6) // 8 + 1
    kernel, words = raw(_MASK_ROWS, "mask_rows", (mask.dtype,)), map(np.uint64, (*key, round(dropout * 2**32)))
    places = first, run, jump, step, heads * run, columns, blocks
    run_threads(kernel, heads * run * blocks, mask, *words, *places)
