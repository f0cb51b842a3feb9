"""8-bit Adam in CUDA: a block of threads for each block of states, with NumPy's tables and its bits.

The tables are constants in the source. Each thread has one element. It decodes the element's states and takes Adam's
step. The block finds its largest magnitudes. Then the thread finds the nearest entry of each table by bisection.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda.rules import elementwise
from zerosim.backends.cuda.types import raw
from zerosim.backends.cuda.update import ADAM, adam_numbers
from zerosim.backends.kernels import QUANT_BLOCK, AdamStep, Array, Coded, Rule, Storing
from zerosim.backends.numpy.quantize import dynamic_map


def _constant(name: str, signed: bool) -> str:
    entries = ", ".join(f"{float(entry).hex()}f" for entry in dynamic_map(signed))
    return f"__constant__ float {name}[256] = {{{entries}}};\n"


ADAM_8BIT = (
    _constant("signed_map", True)
    + _constant("unsigned_map", False)
    + r"""
// How many middles of neighbouring entries are less than x: the nearest entry, of two the lower one.
template <class W> __device__ inline unsigned char nearest(W x, const float* table) {
    int low = 0, high = 255;
    while (low < high) {
        const int at = (low + high) / 2;
        if ((static_cast<double>(table[at]) + static_cast<double>(table[at + 1])) / 2 < static_cast<double>(x)) {
            low = at + 1;
        } else {
            high = at;
        }
    }
    return static_cast<unsigned char>(low);
}

// Store one state of a block: its largest magnitude, and this thread's code, if it has an element.
template <class W> __device__ inline void encode(W value, bool has, W* shared, const float* table,
                                                 unsigned char& code, float& absmax) {
    const float largest = static_cast<float>(row_max(value < W(0) ? -value : value, shared));
    if (threadIdx.x == 0) absmax = largest;
    if (has) code = nearest(value / (largest == 0.0f ? W(1) : W(largest)), table);
}

template <class G, class W>
__global__ void adam8bit(const G* grad, W* param, unsigned char* exp_avg, unsigned char* exp_avg_sq,
                         float* exp_avg_absmax, float* exp_avg_sq_absmax, long long size, double grad_scale,
                         double factor, double decay, double step_size, double beta1_rest, double beta2,
                         double beta2_rest, double correction, double eps) {
    __shared__ W shared[32];
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool has = i < size;
    W m = W(0), v = W(0);
    if (has) {
        m = W(signed_map[exp_avg[i]] * exp_avg_absmax[blockIdx.x]);
        v = W(unsigned_map[exp_avg_sq[i]] * exp_avg_sq_absmax[blockIdx.x]);
        W p = param[i], g = W(wide_of(grad[i])) * W(grad_scale);
"""
    + ADAM
    + r"""
        param[i] = p;
    }
    __syncthreads();  // all have read the old scales
    encode(m, has, shared, signed_map, exp_avg[has ? i : 0], exp_avg_absmax[blockIdx.x]);
    encode(v, has, shared, unsigned_map, exp_avg_sq[has ? i : 0], exp_avg_sq_absmax[blockIdx.x]);
}
"""
)

CODES = (
    ADAM_8BIT[: ADAM_8BIT.index("template <class G")]
    + r"""
template <class W> __global__ void decode_both(W* m, W* v, const unsigned char* exp_avg,
                                               const unsigned char* exp_avg_sq, const float* exp_avg_absmax,
                                               const float* exp_avg_sq_absmax, long long size) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    m[i] = W(signed_map[exp_avg[i]] * exp_avg_absmax[blockIdx.x]);
    v[i] = W(unsigned_map[exp_avg_sq[i]] * exp_avg_sq_absmax[blockIdx.x]);
}

template <class W> __global__ void encode_both(const W* m, const W* v, unsigned char* exp_avg,
                                               unsigned char* exp_avg_sq, float* exp_avg_absmax,
                                               float* exp_avg_sq_absmax, long long size) {
    __shared__ W shared[32];
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool has = i < size;
    encode(has ? m[i] : W(0), has, shared, signed_map, exp_avg[has ? i : 0], exp_avg_absmax[blockIdx.x]);
    encode(has ? v[i] : W(0), has, shared, unsigned_map, exp_avg_sq[has ? i : 0], exp_avg_sq_absmax[blockIdx.x]);
}
"""
)


def adam8bit(
    param: Array, grad: Array, exp_avg: Coded, exp_avg_sq: Coded, hyper: AdamStep,
    stored: tuple[Rule, Storing] | None = None,
) -> None:  # fmt: skip
    if stored is not None:
        m, v = (cp.empty((param.size,), exp_avg.absmax.dtype) for _ in range(2))
        arrays = m, v, exp_avg.codes, exp_avg_sq.codes, exp_avg.absmax, exp_avg_sq.absmax
        grid = (exp_avg.absmax.size,), (QUANT_BLOCK,), (*arrays, param.size)
        raw(CODES, "decode_both", (m.dtype,))(*grid)
        elementwise(stored[0], grad, param, m, v, storing=stored[1])
        raw(CODES, "encode_both", (m.dtype,))(*grid)
        return
    arrays = grad, param, exp_avg.codes, exp_avg_sq.codes, exp_avg.absmax, exp_avg_sq.absmax
    kernel = raw(ADAM_8BIT, "adam8bit", (grad.dtype, param.dtype))
    kernel((exp_avg.absmax.size,), (QUANT_BLOCK,), (*arrays, param.size, *adam_numbers(hyper)))
