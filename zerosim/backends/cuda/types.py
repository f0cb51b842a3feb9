"""Shared code of the CUDA kernels: types, rounding, sums over a row, and compilation.

Kernels are written once, as templates over the stored types: they read through `wide_of` (float, or double for
fp64) and write through `store`, the one place that rounds. CuPy compiles every kernel with -ftz=true: subnormal
float32 values count as zero, which NumPy keeps. Products are not fused with sums (--fmad=false): these kernels are
bound by memory, and so round as NumPy does, operation by operation.

Source: CUDA C++ Programming Guide, 7.22 (warp shuffles); CuPy, User-Defined Kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.numpy.cast import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

C_NAMES: Mapping[np.dtype[Any], str] = MappingProxyType(
    {
        FLOAT64: "double",
        FLOAT32: "float",
        FLOAT16: "__half",
        BFLOAT16: "__nv_bfloat16",
        np.dtype(np.int64): "long long",
        np.dtype(np.int32): "int",
        np.dtype(np.uint8): "unsigned char",
    }
)

PREAMBLE = r"""
// What arithmetic on a stored type runs in.
template <class T> struct wide { using type = float; };
template <> struct wide<double> { using type = double; };
template <class A, class B> struct wide_both {
    using type = decltype(typename wide<A>::type() + typename wide<B>::type());
};

template <class T> __device__ inline typename wide<T>::type wide_of(const T& x) {
    return static_cast<typename wide<T>::type>(x);
}

// double to float, rounded to odd, so that rounding once more to 16 bits gives what one rounding would.
__device__ inline float to_odd(double v) {
    const float near = static_cast<float>(v);
    const unsigned int bits = __float_as_uint(near);
    if (static_cast<double>(near) == v || v != v || (bits & 1u)) return near;
    const bool away = (v > static_cast<double>(near)) == !(bits >> 31);
    return __uint_as_float(away ? bits + 1u : bits - 1u);
}

template <class T, bool half> struct from_double {
    static __device__ inline T round(double v) { return static_cast<T>(v); }
};
template <class T> struct from_double<T, true> {
    static __device__ inline T round(double v) { return static_cast<T>(to_odd(v)); }
};
template <class T> __device__ inline void store(float v, T& out) { out = static_cast<T>(v); }
template <class T> __device__ inline void store(double v, T& out) {
    out = from_double<T, sizeof(T) == 2>::round(v);
}

// The larger one; nan if one of them is.
template <class V> __device__ inline V larger(V a, V b) { return (a > b || a != a) ? a : b; }
"""
"""The preamble of elementwise kernels, where half types are CuPy's classes. The next one is for raw kernels."""

RAW_PREAMBLE = (
    "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    + PREAMBLE
    + r"""
// What the blockDim.x threads of one row hold, combined in an order that depends on blockDim.x alone; every thread gets
// it. blockDim.x is 32, with any number of rows (threadIdx.y) in a block, or a larger multiple of 32 with one row.
// `shared` holds 32 values and may serve several rows in turn; with 32 threads it is not touched.
template <class V, class F> __device__ inline V row_fold(V v, V* shared, F combine) {
    for (int distance = 16; distance > 0; distance /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, distance));
    if (blockDim.x == 32) return v;
    __syncthreads();  // what `shared` held has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = shared[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) v = combine(v, shared[warp]);
    return v;
}
template <class V> __device__ inline V row_sum(V v, V* shared) {
    return row_fold(v, shared, [](V a, V b) { return a + b; });
}
template <class V> __device__ inline V row_max(V v, V* shared) {
    return row_fold(v, shared, [](V a, V b) { return larger(a, b); });
}
"""
)
"""The preamble of raw kernels, where half types are CUDA's __half and __nv_bfloat16."""

EXACT = ("--fmad=false",)
"""Options of kernels that round after every operation, as NumPy does."""

WARP_COLUMNS = 1024
"""The widest row for one warp. Longer rows are worth a block and its barriers."""

THREADS = 256

NULL = np.uint64(0)
"""Passed to a kernel in place of an array: 8 bytes of zeros."""


def elementwise(inputs: str, outputs: str, operation: str, name: str) -> Any:
    """Return a `cp.ElementwiseKernel` with the preamble. The caller passes outputs last; the kernel returns nothing."""
    return cp.ElementwiseKernel(
        inputs, outputs, operation, f"zerosim_{name}", preamble=PREAMBLE, no_return=True, options=EXACT
    )


@cache
def raw(source: str, name: str, types: tuple[np.dtype[Any], ...]) -> Any:
    """Return the kernel template `name` of `source` for these types; call it with (grid, block, arguments).

    A kernel is compiled the first time that it runs on a device; CuPy caches the result on disk.
    """
    expression = f"{name}<{', '.join(C_NAMES[t] for t in types)}>"
    code = RAW_PREAMBLE + source
    module = cp.RawModule(code=code, options=("--std=c++17", *EXACT), name_expressions=[expression])
    return module.get_function(expression)


def run_rows(kernel: Any, rows: int, columns: int, *arguments: Any) -> None:
    """Launch a kernel that takes a row at a time, row blockIdx.x * blockDim.y + threadIdx.y.

    A warp per row, four rows a block, up to WARP_COLUMNS columns; beyond, a block of 256 or 1024 threads.
    The order in which a row is added depends on `columns` alone.
    """
    block = (32, 4) if columns <= WARP_COLUMNS else (256 if columns <= 16 * WARP_COLUMNS else 1024, 1)
    kernel((-(-rows // block[1]),), block, arguments)


def run_threads(kernel: Any, threads: int, *arguments: Any) -> None:
    """Launch a kernel with that number of threads, in blocks of THREADS."""
    kernel((-(-threads // THREADS),), (THREADS,), arguments)
