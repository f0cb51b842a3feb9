"""cuBLAS's gemmEx and gemmStridedBatchedEx, column-major, with alpha and beta behind host pointers.

Products run through NumPy in the compute type and are rounded once. What cuBLAS does not support is refused.

Source: cuBLAS documentation, tables of cublasGemmEx; cupy_backends/cuda/libs/cublas.pyx for the signatures.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
from cupy._clock import StreamClock, current_stream, launch, submit
from cupy._segments import is_device, touch
from cupy._state import LOCK, absent
from cupy.cuda.device import handle_is_mine

CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_16F_PEDANTIC = 64, 65
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC = 68, 69
CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_64F_PEDANTIC = 70, 71
CUBLAS_COMPUTE_32F_FAST_16F, CUBLAS_COMPUTE_32F_FAST_16BF, CUBLAS_COMPUTE_32F_FAST_TF32 = 74, 75, 77
CUBLAS_GEMM_DEFAULT, CUBLAS_GEMM_DEFAULT_TENSOR_OP = -1, 99
CUBLAS_DEFAULT_MATH, CUBLAS_TENSOR_OP_MATH, CUBLAS_PEDANTIC_MATH, CUBLAS_TF32_TENSOR_OP_MATH = 0, 1, 2, 3
CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE = 0, 1

R_32F, R_64F, R_16F, R_16BF = 0, 1, 2, 14
DTYPES = {
    R_32F: np.dtype(np.float32),
    R_64F: np.dtype(np.float64),
    R_16F: np.dtype(np.float16),
    R_16BF: np.dtype(ml_dtypes.bfloat16),
}
# compute type -> (type of alpha, beta and sums; the (A and B, C) pairs of the documentation's table)
SUPPORTED = {
    CUBLAS_COMPUTE_32F: (
        np.float32,
        {(R_16F, R_16F), (R_16F, R_32F), (R_16BF, R_16BF), (R_16BF, R_32F), (R_32F, R_32F)},
    ),
    CUBLAS_COMPUTE_64F: (np.float64, {(R_64F, R_64F)}),
}
SUPPORTED[CUBLAS_COMPUTE_32F_PEDANTIC] = SUPPORTED[CUBLAS_COMPUTE_32F]
SUPPORTED[CUBLAS_COMPUTE_64F_PEDANTIC] = SUPPORTED[CUBLAS_COMPUTE_64F]


class CUBLASError(RuntimeError):
    pass


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int, B: int,
    Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """C (m, n) = alpha * op(A) (m, k) @ op(B) (k, n) + beta * C, each column-major with its leading dimension."""
    _gemm("gemmEx", _stream_of(handle, "gemmEx"), transa, transb, m, n, k, alpha, (A, Atype, lda, 0),
          (B, Btype, ldb, 0), beta, (C, Ctype, ldc, 0), 1, computeType, algo)  # fmt: skip


def gemmStridedBatchedEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
    strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int, C: int, Ctype: int, ldc: int, strideC: int,
    batchCount: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """As gemmEx for batchCount products, whose matrices lie strideA, strideB and strideC elements apart."""
    _gemm("gemmStridedBatchedEx", _stream_of(handle, "gemmStridedBatchedEx"), transa, transb, m, n, k, alpha,
          (A, Atype, lda, strideA), (B, Btype, ldb, strideB), beta, (C, Ctype, ldc, strideC), batchCount, computeType,
          algo)  # fmt: skip


def _stream_of(handle: int, name: str) -> StreamClock:
    """CuPy sets the handle's stream at every call, and refuses one that is capturing, whatever cuBLAS would do."""
    if not isinstance(handle, int):
        raise TypeError(f"{name} takes integers: pointers, sizes and constants")
    if not handle_is_mine(handle):
        raise _error("CUBLAS_STATUS_NOT_INITIALIZED", name, "the handle is another thread's or another device's")
    stream = current_stream()
    if stream.capture is not None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    return stream


def _gemm(
    name: str, stream: StreamClock, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: tuple[int, ...],
    b: tuple[int, ...], beta: int, c: tuple[int, ...], batch: int, compute: int, algo: int,
    workspace: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """`workspace`: the address and bytes of a handle's own, which the product may write."""
    every = (transa, transb, m, n, k, alpha, *a, beta, *b, *c, batch, compute, algo)
    if any(not isinstance(value, int | np.integer) for value in every):
        raise TypeError(f"{name} takes integers: pointers, sizes and constants")
    if min(m, n, k, batch) < 0 or max(m, n, k, batch, a[2], b[2], c[2]) >= 2**31:
        raise _error("CUBLAS_STATUS_INVALID_VALUE", name, f"m, n, k, batch = {m}, {n}, {k}, {batch}")
    if transa not in (0, 1, 2) or transb not in (0, 1, 2) or not (-1 <= algo <= 23 or 99 <= algo <= 115):
        raise _error("CUBLAS_STATUS_INVALID_VALUE", name, f"ops {transa}, {transb}, algorithm {algo}")
    if a[1] != b[1] or compute not in SUPPORTED or (a[1], c[1]) not in SUPPORTED[compute][1]:
        types = f"A {a[1]}, B {b[1]}, C {c[1]} with compute type {compute}"
        raise _error("CUBLAS_STATUS_NOT_SUPPORTED", name, f"{types} (or not what zerosim wants)")
    rows = (k if transa else m, n if transb else k, m)
    for matrix, leading, least in zip("ABC", (a[2], b[2], c[2]), rows, strict=True):
        if leading < max(1, least):
            raise _error("CUBLAS_STATUS_INVALID_VALUE", name, f"ld{matrix.lower()} = {leading}, less than {least} rows")
    if c[3] < c[2] * (n - 1) + m and batch > 1 and c[3] != 0 and not _apart(c, m, n, batch):
        raise _error("CUBLAS_STATUS_INVALID_VALUE", name, f"strideC = {c[3]} makes the products overlap")
    if batch > 1 and c[3] == 0:
        raise _error("CUBLAS_STATUS_INVALID_VALUE", name, "strideC = 0 makes the products overlap")
    if 0 in (m, n, batch):
        return
    scalar = SUPPORTED[compute][0]
    alpha_value, beta_value = (_host_scalar(pointer, scalar, name) for pointer in (alpha, beta))

    def multiply(stream: StreamClock) -> None:
        with LOCK:
            work = launch(stream, name)
            left = _matrix(work, a, (k, m) if transa else (m, k), batch, False)
            right = _matrix(work, b, (n, k) if transb else (k, n), batch, False)
            if beta_value != 0:
                _matrix(work, c, (m, n), batch, False)
            out = _matrix(work, c, (m, n), batch, True)
            if workspace[1]:
                touch(work, workspace[0], (workspace[1],), (1,), 1, True)
        left, right = (x.astype(scalar) for x in (left, right))
        left = left.swapaxes(1, 2) if transa else left
        right = right.swapaxes(1, 2) if transb else right
        with np.errstate(all="ignore"):
            result = np.matmul(left, right) * alpha_value
            if beta_value != 0:
                result = result + beta_value * out.astype(scalar)
            out[...] = result.astype(out.dtype)

    submit(stream, multiply)


def _apart(c: tuple[int, ...], m: int, n: int, batch: int) -> bool:
    """Whether interleaved products (columns of one between those of another) share no element."""
    _, _, ld, stride = c
    return stride >= m and (batch - 1) * stride + m <= ld


def _host_scalar(pointer: int, kind: Any, name: str) -> Any:
    if is_device(pointer):
        raise _error("CUBLAS_STATUS_INVALID_VALUE", name, "alpha and beta are read on the host (pointer mode)")
    ctype = ctypes.c_float if kind is np.float32 else ctypes.c_double
    return kind(ctypes.cast(int(pointer), ctypes.POINTER(ctype))[0])


def _matrix(work: Any, matrix: tuple[int, ...], dims: tuple[int, int], batch: int, writes: bool) -> np.ndarray:
    """(batch, rows, columns) over device memory: element (i, j) at pointer + i + j * leading dimension."""
    pointer, kind, leading, stride = (int(value) for value in matrix)
    dtype = DTYPES[kind]
    if pointer % dtype.itemsize:
        raise _error("CUBLAS_STATUS_INVALID_VALUE", work.name, f"pointer {pointer:#x} is not aligned to its elements")
    if 0 in dims:
        return np.zeros((batch, *dims), dtype)
    if stride < 0:
        raise _error("CUBLAS_STATUS_INVALID_VALUE", work.name, f"stride {stride}")
    shape = (batch, *dims)
    strides = (stride * dtype.itemsize, dtype.itemsize, leading * dtype.itemsize)
    memory = touch(work, pointer, shape, strides, dtype.itemsize, writes)
    assert memory is not None
    return np.ndarray(shape, dtype, memory, strides=strides)


def _error(status: str, name: str, why: str) -> CUBLASError:
    return CUBLASError(f"{status}: {name}: {why}")


def getVersion(handle: int) -> int:
    return 130000


def setStream(handle: int, stream: int) -> None:
    raise absent("cublas", "setStream (CuPy sets the current stream at every call)")


def setMathMode(handle: int, mode: int) -> None:
    if not handle_is_mine(handle):
        raise _error(
            "CUBLAS_STATUS_NOT_INITIALIZED", "setMathMode", "the handle is another thread's or another device's"
        )
    if mode & ~CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION:  # the fast modes are not fp32, nor zerosim's
        raise absent("cublas", f"setMathMode({mode})")


def __getattr__(name: str) -> Any:
    raise absent("cublas", name)


def _load() -> Any:
    """The library itself, which CuPy has loaded once this module is imported: other callers find it by its name."""
    from cupy_backends.cuda.libs import _libcublas

    return _libcublas.load(_gemm)


LIBRARY = _load()
