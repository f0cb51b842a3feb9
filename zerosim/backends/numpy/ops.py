"""Arrays and primitive ops in NumPy: allocation, copies, broadcasting arithmetic, reductions, matmul.

Every op computes in float32 (float64 for fp64) and rounds once, when it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    raised,
    result_for,
    round_into,
    store,
    wide,
    windows,
)
from zerosim.backends.numpy.products import product
from zerosim.dtypes import DType

NUMPY_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "fp64": FLOAT64,
        "fp32": FLOAT32,
        "fp16": FLOAT16,
        "bf16": BFLOAT16,
        "int64": np.dtype(np.int64),
        "int32": np.dtype(np.int32),
        "uint8": np.dtype(np.uint8),
    }
)


# -- arrays ---------------------------------------------------------------------------------------
def empty(shape: tuple[int, ...], dtype: DType) -> Array:
    return np.empty(shape, NUMPY_TYPES[dtype.name])


def array_over(memory: Any, dtype: DType) -> Array:
    """Return a flat array over these bytes, in memory that another library owns: MPI's buffers, while MPI adds."""
    return np.frombuffer(memory, NUMPY_TYPES[dtype.name])


def from_host(values: Any, out: Array) -> None:
    store(np.asarray(values), out)


def to_host(array: Array) -> Any:
    array = np.asarray(array)  # a file is read
    values = raised(array)
    return values.copy() if values is array else values


def to_host_later(array: Array) -> Callable[[], Any]:
    return partial(to_host, array)


def fill(out: Array, value: float) -> None:
    rounded = np.empty(1, out.dtype)
    store(np.array([value]), rounded)
    out[...] = rounded[0]


def copy(source: Array, out: Array) -> None:
    store(source, out)


# -- elementwise ops ------------------------------------------------------------------------------
def _apply(ufunc: np.ufunc, *operands: Array | float, out: Array) -> None:
    """out = ufunc(*operands). Half types pass through float32 piece by piece, in the cache."""
    # A Python float takes the arrays' type; np.float64, its subclass, would raise everything to float64.
    numbers = [float(x) for x in operands if not isinstance(x, np.ndarray)]
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    compute = wide(*arrays)
    if out.dtype == compute and all(x.dtype.itemsize != 2 for x in arrays):
        ufunc(*arrays, *numbers, out=out)
        return
    pieces = windows(*arrays, out) if all(x.shape == out.shape for x in arrays) else [(*arrays, out)]
    for *parts, target in pieces:
        result = result_for(target, compute)
        ufunc(*(raised(part) for part in parts), *numbers, out=result)
        round_into(result, target)


def _binary(name: str) -> Callable[[Array, Array | float, Array], None]:
    """out = NumPy's function of that name of a and b, arrays, or an array and a number."""
    ufunc = getattr(np, name)

    def kernel(a: Array, b: Array | float, out: Array) -> None:
        _apply(ufunc, a, b, out=out)

    kernel.__name__ = name
    return kernel


def _unary(name: str) -> Callable[[Array, Array], None]:
    ufunc = getattr(np, name)

    def kernel(a: Array, out: Array) -> None:
        _apply(ufunc, a, out=out)

    kernel.__name__ = name
    return kernel


add, subtract, multiply, divide = _binary("add"), _binary("subtract"), _binary("multiply"), _binary("divide")
exp, log, sqrt, tanh = _unary("exp"), _unary("log"), _unary("sqrt"), _unary("tanh")


# -- reductions, masks, products ----------------------------------------------------------------------
def sum_to(a: Array, out: Array) -> None:
    _reduce_to(np.add, a, out)


def max_to(a: Array, out: Array) -> None:
    _reduce_to(np.maximum, a, out)


def _reduce_to(ufunc: np.ufunc, a: Array, out: Array) -> None:
    lacking = a.ndim - out.ndim
    kept = tuple(lacking + i for i, size in enumerate(out.shape) if size == 1 and a.shape[lacking + i] != 1)
    axes = (*range(lacking), *kept)
    if axes:
        store(ufunc.reduce(raised(a), axis=axes, keepdims=True).reshape(out.shape), out)
    else:
        copy(a, out)


def mask_future(scores: Array, value: float, out: Array) -> None:
    copy(scores, out)
    future = np.triu(np.ones(out.shape[-2:], bool), 1)
    filler = np.empty((), out.dtype)
    fill(filler, value)
    np.copyto(out, filler, where=future)


def matmul(a: Array, b: Array, out: Array) -> None:
    result = result_for(out, wide(a, b)) if _blas_reads(out) else np.empty(out.shape, wide(a, b))
    product(_for_blas(raised(a)), _for_blas(raised(b)), out=result)
    round_into(result, out)


def matmul_add(a: Array, b: Array, out: Array) -> None:
    result = product(_for_blas(raised(a)), _for_blas(raised(b)))
    round_into(result + raised(out), out)


def _for_blas(a: Array) -> Array:
    return a if _blas_reads(a) else np.ascontiguousarray(a)


def _blas_reads(a: Array) -> bool:
    """Whether rows or columns of the matrices in `a` are contiguous; np.matmul is 100 times slower otherwise."""
    (rows, columns), (down, across) = a.shape[-2:], a.strides[-2:]
    size = a.itemsize
    return bool((across == size and down >= columns * size) or (down == size and across >= rows * size))
