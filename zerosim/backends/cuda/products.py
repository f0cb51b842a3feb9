"""Matrix products over cuBLAS: `matmul`, `linear`, and the scaled, accumulating product attention is made of.

Half types multiply on tensor cores and add in float32, float32 as true float32 (no TF32), float64 in float64;
partial sums are never rounded to a half type, and a result is rounded once. Operands that cuBLAS can read stay
in place: contiguous rows or columns, at any distance, with broadcast leading dims. Anything else (operands
of two types, every other element) passes through scratch of the operand's or the result's size.

CuPy keeps one cuBLAS handle for each thread and device, in host pointer mode, and sets its stream at every call.
One rank multiplies in one stream through one handle, so the same call gives the same bits. For cuBLAS alignment is part
of the call: addresses count modulo 512 bytes. A pool's blocks begin at multiples of that, and a parameter has
the same offset in its block at every ZeRO stage.

Source: cuBLAS library, 2.1.4 (reproducibility), 2.2.10 (math modes), 2.8.13 (cublasGemmStridedBatchedEx).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product as every
from types import MappingProxyType
from typing import Any

import cupy as cp
import numpy as np
from cupy_backends.cuda.libs import cublas

from zerosim.backends.cuda.arrays import cast
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, wide

# cudaDataType_t, library_types.h
_DATA_TYPES = MappingProxyType({FLOAT32: 0, FLOAT64: 1, FLOAT16: 2, BFLOAT16: 14})

# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, cublas_api.h, which CuPy does not name: where a sum is cut into
# parts, these are added in the compute type, not in the result's. The rest of the mode is the default one.
SUMS_STAY_WIDE = 16


# -- the contract's two ---------------------------------------------------------------------------
def matmul(a: Array, b: Array, out: Array) -> None:
    product(a, b, out)


def matmul_add(a: Array, b: Array, out: Array) -> None:
    product(a, b, out, add=True)


def linear(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    """Write the bias into every row, then add the product to it in the
    compute dtype. Scratch of out's shape if out's dtype would round the bias."""
    if bias is None:
        product(x, weight, out)
        return
    exact = out.dtype == bias.dtype or out.dtype == wide(x, weight, bias)
    result = out if exact else cp.empty(out.shape, wide(x, weight, bias))
    cast(bias, result)
    product(x, weight, result, add=True)
    if result is not out:
        cast(result, out)


# -- the product -------------------------------------------------------------------------------------
def product(a: Array, b: Array, out: Array, *, scale: float = 1.0, add: bool = False) -> None:
    """out = scale * a @ b (with `add`, out += scale * a @ b) over the last two dims; leading dims broadcast to out's.

    One cuBLAS call if the leading dims have equal distances (a batch), else one call for each index of the other dims.
    """
    if not out.size:
        return
    if not a.shape[-1]:
        if not add:
            out.fill(0)
        return
    compute = wide(a, b)
    operand = a.dtype if a.dtype == b.dtype else compute
    if not _reads_in_rows(out) or not (out.dtype == operand or (operand.itemsize == 2 and out.dtype == compute)):
        result = cp.empty(out.shape, wide(a, b, out) if add else compute)
        if add:
            cast(out, result)
        product(a, b, result, scale=scale, add=add)
        cast(result, out)
        return
    left, right = _Operand.of(a, operand), _Operand.of(b, operand)
    _gemm(left, right, out, compute, np.array([scale, float(add)], compute))


@dataclass(frozen=True, slots=True)
class _Operand:
    """Matrices in cuBLAS's terms; `array` keeps their memory alive."""

    array: Array
    transposed: bool
    pitch: int

    @classmethod
    def of(cls, a: Array, dtype: np.dtype[Any]) -> _Operand:
        """Use `a` in place if its rows or its columns are contiguous, else copy it."""
        if a.dtype == dtype:
            if _reads_in_rows(a):
                return cls(a, False, _pitch(a))
            across = a.swapaxes(-1, -2)
            if _reads_in_rows(across):
                return cls(a, True, _pitch(across))
        copy = cp.empty(a.shape, dtype)
        cast(a, copy)
        return cls(copy, False, copy.shape[-1])


def _reads_in_rows(a: Array) -> bool:
    """Return whether each matrix consists of rows of contiguous elements."""
    (rows, columns), (down, across), size = a.shape[-2:], a.strides[-2:], a.itemsize
    contiguous = columns == 1 or across == size
    return bool(contiguous and (rows == 1 or (down >= columns * size and down % size == 0)))


def _pitch(a: Array) -> int:
    """Return the elements from one row to the next; the stride of a single row is meaningless."""
    return int(a.strides[-2]) // int(a.itemsize) if a.shape[-2] > 1 else int(a.shape[-1])


def _gemm(left: _Operand, right: _Operand, out: Array, compute: np.dtype[Any], factors: Any) -> None:
    """Row-major out = left @ right is column-major out^T = right^T @ left^T: the operands change places."""
    arrays = (left.array, right.array, out)
    starts, batch, steps = _batches(out.shape[:-2], tuple((a.shape[:-2], a.strides[:-2]) for a in arrays))
    sizes = out.shape[-1], out.shape[-2], left.array.shape[-1]
    kind, out_kind = _DATA_TYPES[left.array.dtype], _DATA_TYPES[out.dtype]
    mode = cublas.CUBLAS_COMPUTE_64F if compute == FLOAT64 else cublas.CUBLAS_COMPUTE_32F
    transposes = [cublas.CUBLAS_OP_T if side.transposed else cublas.CUBLAS_OP_N for side in (right, left)]
    multiply = _gemm_here()
    scale, add = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    across = [s // a.itemsize for s, a in zip(steps, arrays, strict=True)]
    for offsets in starts:
        x, y, z = (a.data.ptr + offset for a, offset in zip(arrays, offsets, strict=True))
        first, second = (y, kind, right.pitch, across[1]), (x, kind, left.pitch, across[0])
        result = z, out_kind, _pitch(out), across[2]
        how = batch, mode, cublas.CUBLAS_GEMM_DEFAULT
        multiply(*transposes, *sizes, scale, *first, *second, add, *result, *how)


def _gemm_here() -> Callable[..., None]:
    """Return cuBLAS's product through CuPy, or through the current stream's own handle if it has one."""
    own = getattr(cp.cuda.get_current_stream(), "blas", None)
    if own is not None:
        product: Callable[..., None] = own.gemm
        return product
    handle = cp.cuda.device.get_cublas_handle()
    cublas.setMathMode(handle, SUMS_STAY_WIDE)
    return partial(cublas.gemmStridedBatchedEx, handle)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides, in bytes, of an array's leading dims."""


@lru_cache(maxsize=4096)
def _batches(
    lead: tuple[int, ...], layouts: tuple[Layout, ...]
) -> tuple[tuple[tuple[int, ...], ...], int, tuple[int, ...]]:
    """Return the start of each call's matrices in bytes, the size of a batch, and the bytes between its matrices.

    Merge neighbouring dims if all three arrays step through them evenly; the longest dim is the batch. The result is
    cached: a model uses few layouts, often, and computing one takes the host as long as several launches.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in zip(lead, *(_lead_strides(layout, len(lead)) for layout in layouts), strict=True):
        if size == 1:
            continue
        if dims and all(before == step * size for before, step in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, tuple(steps))
        else:
            dims.append((size, tuple(steps)))
    dims = dims or [(1, (0,) * len(layouts))]
    batch = dims.pop(max(range(len(dims)), key=lambda i: dims[i][0]))
    places = every(*(range(size) for size, _ in dims))
    starts = (
        tuple(sum(i * d[1][n] for i, d in zip(at, dims, strict=True)) for n in range(len(layouts))) for at in places
    )
    return tuple(starts), *batch


def _lead_strides(layout: Layout, count: int) -> list[int]:
    """Return the bytes from one matrix to the next along each of `count` leading dims; 0 along broadcast dims."""
    own = [0 if size == 1 else stride for size, stride in zip(*layout, strict=True)]
    return [0] * (count - len(own)) + own
