"""Arrays and primitive ops in CUDA: allocation, copies between arrays and GPUs, arithmetic, reductions, masks.

Elementwise kernels take strides and mixed types as they come; kernels that go by rows want contiguous
rows and get them by way of `packed` and `unpacked`. Uploads and downloads are host.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy as cp

from zerosim.backends.cuda.types import CUDA_TYPES, elementwise, raw, row_launch
from zerosim.backends.kernels import Array
from zerosim.dtypes import DType

_fill = elementwise("float64 value", "T out", "store(value, out)", "fill")
_move = elementwise("T x", "T out", "out = x", "move")
_convert = elementwise("T x", "U out", "store(wide_of(x), out)", "convert")
_mask_future = elementwise(
    "T x, float64 value, int64 rows, int64 columns",
    "U out",
    "if (i % columns > i / columns % rows) store(value, out); else store(wide_of(x), out)",
    "mask_future",
)


def _binary(symbol: str, name: str) -> tuple[Any, Any]:
    """Kernels for array with array, and array with number: the number takes the array's compute type."""
    body = f"using W = typename wide_both<T, U>::type; store(static_cast<W>(a) {symbol} static_cast<W>(b), out)"
    number = f"using W = typename wide<T>::type; store(wide_of(a) {symbol} static_cast<W>(b), out)"
    with_number = elementwise("T a, float64 b", "V out", number, f"{name}_number")
    return elementwise("T a, U b", "V out", body, name), with_number


def _unary(function: str) -> Any:
    return elementwise("T a", "V out", f"store({function}(wide_of(a)), out)", function)


_add, _subtract = _binary("+", "add"), _binary("-", "subtract")
_multiply, _divide = _binary("*", "multiply"), _binary("/", "divide")
_exp, _log, _sqrt, _tanh = _unary("exp"), _unary("log"), _unary("sqrt"), _unary("tanh")

ROWS_TO_ONE = r"""
// out[row] = the sum, or the maximum, of a's row; `run` columns.
template <class T, class O>
__global__ void rows_to_one(const T* a, O* out, long long rows, long long run, long long largest) {
    using W = typename wide<T>::type;
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const T* values = a + row * run;
    W total = largest ? wide_of(values[0]) : W(0);
    for (long long c = threadIdx.x; c < run; c += blockDim.x) {
        const W v = wide_of(values[c]);
        total = largest ? larger(total, v) : total + v;
    }
    total = largest ? row_max(total, shared) : row_sum(total, shared);
    if (threadIdx.x == 0) store(total, out[row]);
}
"""


# -- arrays ---------------------------------------------------------------------------------------
def empty(shape: tuple[int, ...], dtype: DType) -> Array:
    return cp.empty(shape, CUDA_TYPES[dtype.name])


def fill(out: Array, value: float) -> None:
    _fill(float(value), out)


def copy(source: Array, out: Array) -> None:
    """Arrays of another GPU are copied whole to scratch on this one, unless bytes can go straight to out."""
    if not out.size:
        return
    straight = source.dtype == out.dtype and source.flags.c_contiguous and out.flags.c_contiguous
    if straight:
        _copy_bytes(source, out, out.nbytes)
    elif source.dtype == out.dtype:
        _move(local(source), out)
    else:
        _convert(local(source), out)


def local(array: Array) -> Array:
    """`array` itself, or, where it lies on another GPU, a copy of it in scratch on this one.

    Raises: ValueError for a strided array of more than one dim on another GPU: nothing sends one.
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


def packed(array: Array) -> Array:
    """`array` itself if it is contiguous, else a contiguous copy in scratch."""
    if array.flags.c_contiguous:
        return array
    scratch = cp.empty(array.shape, array.dtype)
    _move(array, scratch)
    return scratch


@contextmanager
def unpacked(out: Array) -> Iterator[Array]:
    """`out` itself if it is contiguous, else contiguous scratch that is copied to `out` at the end."""
    if out.flags.c_contiguous:
        yield out
        return
    scratch = cp.empty(out.shape, out.dtype)
    yield scratch
    _move(scratch, out)


# -- elementwise ops ------------------------------------------------------------------------------
def add(a: Array, b: Array | float, out: Array) -> None:
    _apply(_add, a, b, out)


def subtract(a: Array, b: Array | float, out: Array) -> None:
    _apply(_subtract, a, b, out)


def multiply(a: Array, b: Array | float, out: Array) -> None:
    _apply(_multiply, a, b, out)


def divide(a: Array, b: Array | float, out: Array) -> None:
    _apply(_divide, a, b, out)


def _apply(kernels: tuple[Any, Any], a: Array, b: Array | float, out: Array) -> None:
    with_array, with_number = kernels
    if isinstance(b, cp.ndarray):
        with_array(a, b, out)
    else:
        with_number(a, float(b), out)


def exp(a: Array, out: Array) -> None:
    _exp(a, out)


def log(a: Array, out: Array) -> None:
    _log(a, out)


def sqrt(a: Array, out: Array) -> None:
    _sqrt(a, out)


def tanh(a: Array, out: Array) -> None:
    _tanh(a, out)


# -- reductions, masks ----------------------------------------------------------------------------
def sum_to(a: Array, out: Array) -> None:
    """Scratch of a's size where the dims added over are not its last ones."""
    _reduce_to(a, out, largest=False)


def max_to(a: Array, out: Array) -> None:
    """Scratch as in `sum_to`."""
    _reduce_to(a, out, largest=True)


def _reduce_to(a: Array, out: Array, largest: bool) -> None:
    if a.size == out.size:
        copy(a.reshape(out.shape), out)
        return
    if not a.size:
        fill(out, float("-inf") if largest else 0.0)
        return
    lacking = a.ndim - out.ndim
    gone = [*range(lacking), *(lacking + d for d, size in enumerate(out.shape) if size == 1)]
    kept = [d for d in range(a.ndim) if d not in gone]
    rows = packed(a.transpose(*kept, *gone))
    run = a.size // out.size
    kernel = raw(ROWS_TO_ONE, "rows_to_one", (a.dtype, out.dtype))
    grid, block = row_launch(out.size, run)
    with unpacked(out) as target:
        kernel(grid, block, (rows, target, out.size, run, int(largest)))


def mask_future(scores: Array, value: float, out: Array) -> None:
    _mask_future(scores, float(value), *out.shape[-2:], out)
