"""Arrays on GPUs: allocation, copies and casts, within a GPU and between two; uploads and downloads are host.py's.

Elementwise kernels accept strided arrays and mixed types. Row kernels need contiguous arrays of
certain types: `dense` makes such an operand, and `result_for` makes room for such a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.types import elementwise
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.ops import NUMPY_TYPES
from zerosim.dtypes import DType

_fill = elementwise("float64 value", "T out", "store(value, out)", "fill")
_move = elementwise("T x", "T out", "out = x", "move")
_convert = elementwise("T x", "U out", "store(wide_of(x), out)", "convert")


def empty(shape: tuple[int, ...], dtype: DType) -> Array:
    return cp.empty(shape, NUMPY_TYPES[dtype.name])


def fill(out: Array, value: float) -> None:
    _fill(float(value), out)


def cast(source: Array, out: Array) -> None:
    """Write source, an array of this GPU, to out: broadcast, and rounded once if the types differ."""
    if out.size:
        (_move if source.dtype == out.dtype else _convert)(source, out)


def copy(source: Array, out: Array) -> None:
    """Copy. An array of another GPU is first copied whole to scratch on this one, unless its bytes can go straight to
    out."""
    if not out.size:
        return
    if source.dtype == out.dtype and source.flags.c_contiguous and out.flags.c_contiguous:
        _copy_bytes(source, out, out.nbytes)
    else:
        cast(local(source), out)


def local(array: Array) -> Array:
    """Return `array` itself, or a copy in scratch on this GPU if it lies on another one.

    Raises: ValueError for a strided array of more than one dim on another GPU, which no caller sends.
    """
    here = cp.cuda.Device().id
    if array.device.id == here or not array.size:
        return array
    if array.flags.c_contiguous:
        scratch = cp.empty(array.shape, array.dtype)
        _copy_bytes(array, scratch, array.nbytes)
        return scratch
    if array.ndim != 1 or array.strides[0] <= 0:
        raise ValueError(f"a strided array of shape {array.shape} lies on GPU {array.device.id}, not {here}")
    step = array.strides[0] // array.itemsize
    span = cp.empty(((array.size - 1) * step + 1,), array.dtype)
    _copy_bytes(array, span, span.nbytes)
    return span[::step]


def _copy_bytes(source: Array, out: Array, nbytes: int) -> None:
    """Copy memory in the current stream, within a GPU or from one to another."""
    runtime, stream = cp.cuda.runtime, cp.cuda.get_current_stream()
    here, there = out.device.id, source.device.id
    if here == there:
        runtime.memcpyAsync(out.data.ptr, source.data.ptr, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
    else:
        runtime.memcpyPeerAsync(out.data.ptr, here, source.data.ptr, there, nbytes, stream.ptr)


def dense(a: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Return `a` itself if it is C-contiguous and of that dtype, else a copy that is."""
    dtype = dtype or a.dtype
    if a.flags.c_contiguous and a.dtype == dtype:
        return a
    scratch = cp.empty(a.shape, dtype)
    cast(a, scratch)
    return scratch


def room_like(out: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Return `out` itself if it is C-contiguous and of that dtype, else scratch of its shape that is."""
    dtype = dtype or out.dtype
    return out if out.flags.c_contiguous and out.dtype == dtype else cp.empty(out.shape, dtype)


@contextmanager
def result_for(out: Array, dtype: np.dtype[Any] | None = None) -> Iterator[Array]:
    """Yield `room_like(out, dtype)` for a result, and cast the result into `out` at the end if necessary."""
    result = room_like(out, dtype)
    yield result
    if result is not out:
        cast(result, out)
