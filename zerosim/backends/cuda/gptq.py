"""Weights in GPTQ's format on a GPU: a thread makes two values, those of one byte, in NumPy's bits."""

from __future__ import annotations

import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.types import raw, run_threads
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.gptq import GROUP, form_of

DEQUANTIZE = (
    f"constexpr int GROUP = {GROUP};\n"
    + r"""
__device__ inline float half_at(const unsigned char* bytes) {
    __half number;
    memcpy(&number, bytes, sizeof number);
    return static_cast<float>(number);
}

template <class T>
__global__ void dequantize_gptq(
    const unsigned char* apart, const unsigned char* stored, T* out, int scales, int zeros, int codes,
    long long numel) {
    using W = typename wide<T>::type;
    const long long byte = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, first = 2 * byte;
    if (first >= numel) return;
    const long long group = first / GROUP;  // both values are in one group, whose size is even
    const float scale = half_at(apart + scales + 2 * group);
    const int zero = stored[zeros + group / 2] >> 4 * (group % 2) & 15;
    const int both = stored[codes + byte];
    store(W(static_cast<float>((both & 15) - zero) * scale), out[first]);
    if (first + 1 < numel) store(W(static_cast<float>((both >> 4) - zero) * scale), out[first + 1]);
}
"""
)


def dequantize_gptq(stored: Array, out: Array, scales: Array | None = None) -> None:
    numel, size = out.size, 0 if scales is None else scales.size
    apart = stored if scales is None else scales
    with result_for(out) as target:
        kernel = raw(DEQUANTIZE, "dequantize_gptq", (target.dtype,))
        codes, zeros, scale = (place.start for place in form_of(stored.size + size, numel).places(numel)[:3])
        starts = np.int32(scale), np.int32(zeros - size), np.int32(codes - size)
        run_threads(kernel, -(-numel // 2), dense(apart), dense(stored), target, *starts, numel)
