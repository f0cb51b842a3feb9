"""Weights in NF4 on a GPU: a thread makes two values, those of one byte, in NumPy's bits."""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.types import raw, run_threads
from zerosim.backends.kernels import QUANT_BLOCK, Array
from zerosim.backends.numpy.nf4 import NF4
from zerosim.backends.numpy.quantize import dynamic_map
from zerosim.placement import formats


def _constant(name: str, entries: Array) -> str:
    return f"__constant__ float {name}[{entries.size}] = {{{', '.join(f'{float(one).hex()}f' for one in entries)}}};\n"


DEQUANTIZE = (
    _constant("nf4_map", NF4)
    + _constant("absmax_map", dynamic_map(True))
    + f"constexpr int NF4_BLOCK = {formats.NF4.block}, ABSMAX_BLOCK = {QUANT_BLOCK};\n"
    + r"""
__device__ inline float number_at(const unsigned char* bytes) {
    float number;
    memcpy(&number, bytes, sizeof number);
    return number;
}

template <class T>
__global__ void dequantize_nf4(const unsigned char* scales, const unsigned char* stored, T* out, int mean, int absmax,
                               int codes, long long numel) {
    using W = typename wide<T>::type;
    const long long byte = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, first = 2 * byte;
    if (first >= numel) return;
    const long long block = first / NF4_BLOCK;  // both values are in one block, whose size is even
    const float quotient = absmax_map[scales[absmax + block]] * number_at(scales + 4 * (block / ABSMAX_BLOCK));
    const float largest = quotient + number_at(scales + mean);
    const unsigned char both = stored[codes + byte];
    store(W(nf4_map[both >> 4] * largest), out[first]);
    if (first + 1 < numel) store(W(nf4_map[both & 15] * largest), out[first + 1]);
}
"""
)


def dequantize_nf4(stored: Array, out: Array, scales: Array | None = None) -> None:
    numel = out.size
    with result_for(out) as target:
        kernel = raw(DEQUANTIZE, "dequantize_nf4", (target.dtype,))
        codes, absmax, mean, _ = (np.int32(place.start) for place in formats.NF4.places(numel))
        first = codes if scales is None else np.int32(0)
        apart = dense(stored if scales is None else scales)
        run_threads(kernel, -(-numel // 2), apart, dense(stored), target, mean, absmax, first, numel)
