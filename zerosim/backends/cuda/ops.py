"""Primitive ops in CUDA: broadcasting arithmetic, reductions, the causal mask."""

from __future__ import annotations

from collections.abc import Callable

import cupy as cp

from zerosim.backends.cuda.arrays import copy, dense, fill, result_for
from zerosim.backends.cuda.types import elementwise, raw, run_rows
from zerosim.backends.kernels import Array

_mask_future = elementwise(
    "T x, float64 value, int64 rows, int64 columns",
    "U out",
    "if (i % columns > i / columns % rows) store(value, out); else store(wide_of(x), out)",
    "mask_future",
)

Binary = Callable[[Array, Array | float, Array], None]
Unary = Callable[[Array, Array], None]


def _binary(name: str, symbol: str) -> Binary:
    """Make the kernel out = a (symbol) b, of arrays, or of an array and a number in the array's compute dtype."""
    body = f"using W = typename wide_both<T, U>::type; store(static_cast<W>(a) {symbol} static_cast<W>(b), out)"
    with_array = elementwise("T a, U b", "V out", body, name)
    body = f"using W = typename wide<T>::type; store(wide_of(a) {symbol} static_cast<W>(b), out)"
    with_number = elementwise("T a, float64 b", "V out", body, f"{name}_number")

    def kernel(a: Array, b: Array | float, out: Array) -> None:
        if isinstance(b, cp.ndarray):
            with_array(a, b, out)
        else:
            with_number(a, float(b), out)

    kernel.__name__ = name
    return kernel


def _unary(name: str) -> Unary:
    """Make the kernel that applies the function of that name in CUDA's library to each element."""
    run = elementwise("T a", "V out", f"store({name}(wide_of(a)), out)", name)

    def kernel(a: Array, out: Array) -> None:
        run(a, out)

    kernel.__name__ = name
    return kernel


add, subtract = _binary("add", "+"), _binary("subtract", "-")
multiply, divide = _binary("multiply", "*"), _binary("divide", "/")
exp, log, sqrt, tanh = _unary("exp"), _unary("log"), _unary("sqrt"), _unary("tanh")

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


def sum_to(a: Array, out: Array) -> None:
    """Sum. Scratch of a's size if the summed dims are not its last ones."""
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
    rows, run = dense(a.transpose(*kept, *gone)), a.size // out.size
    with result_for(out) as target:
        kernel = raw(ROWS_TO_ONE, "rows_to_one", (a.dtype, out.dtype))
        run_rows(kernel, out.size, run, rows, target, out.size, run, int(largest))


def mask_future(scores: Array, value: float, out: Array) -> None:
    _mask_future(scores, float(value), *out.shape[-2:], out)
