"""Sums over ranks, norms and optimizer steps in CUDA: flat arrays, elementwise, in place.

A slice of an array gives the same bits as the whole array would give there. Every
operation is rounded by itself (--fmad=false), in the order of numpy/update.py, and no cut changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy as cp

from zerosim.backends.cuda.arrays import dense, fill, local, result_for
from zerosim.backends.cuda.ops import ROWS_TO_ONE, multiply
from zerosim.backends.cuda.types import elementwise, raw
from zerosim.backends.kernels import AdamStep, Array
from zerosim.backends.numpy.cast import FLOAT64, wide

TOGETHER = 8
"""Parts that one launch adds. More parts are added eight, then seven at a time, through scratch."""

PIECE = 8 * 1024
"""Elements in a partial sum of squares."""

SQUARES = r"""
// partial[run * pieces + piece] = the sum of squares of that piece of that run, by 256 threads.
template <class T>
__global__ void squares(const T* a, double* partial, long long size, long long run, long long pieces, long long piece) {
    __shared__ double shared[32];
    const long long index = blockIdx.x / pieces, first = index * run + blockIdx.x % pieces * piece;
    long long stop = first + piece;
    if (stop > (index + 1) * run) stop = (index + 1) * run;
    if (stop > size) stop = size;
    double total = 0;
    for (long long i = first + threadIdx.x; i < stop; i += blockDim.x) {
        const double v = static_cast<double>(wide_of(a[i]));
        total += v * v;
    }
    total = row_sum(total, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}
"""

# Kernels work on values of their own (x, ...) and write once: the compiler cannot know that arrays do not overlap.
ADAM = """
    p *= W(factor);
    if (decay != 0.0) g += W(decay) * p;
    m += (g - m) * W(beta1_rest);
    v = v * W(beta2) + g * W(beta2_rest) * g;
    p -= m * W(step_size) / (sqrt(v) / W(correction) + W(eps));
"""
"""One step on a weight p, its gradient g and averages m and v. `adam_numbers` gives the other names."""

_adam = elementwise(
    "G grad, float64 grad_scale, float64 factor, float64 decay, float64 step_size, float64 beta1_rest, "
    "float64 beta2, float64 beta2_rest, float64 correction, float64 eps",
    "T param, T exp_avg, T exp_avg_sq",
    f"""
    using W = typename wide<T>::type;
    W p = wide_of(param), m = wide_of(exp_avg), v = wide_of(exp_avg_sq), g = W(wide_of(grad)) * W(grad_scale);
    {ADAM}
    store(p, param); store(m, exp_avg); store(v, exp_avg_sq)""",
    "adam",
)


@cache
def _combine(op: str, count: int) -> Any:
    """Return the kernel that combines `count` parts, in order; "avg" divides by its first argument."""
    letters = "ABCDEFGH"[:count]
    steps = [f"using W = decltype({' + '.join(f'wide<{c}>::type()' for c in letters)}); W total = W(wide_of(p0));"]
    for k in range(1, count):
        steps.append(f"total = larger(total, W(wide_of(p{k})));" if op == "max" else f"total += W(wide_of(p{k}));")
    if op == "avg":
        steps.append("total /= W(ranks);")
    parts = ", ".join(f"{letter} p{k}" for k, letter in enumerate(letters))
    return elementwise(f"float64 ranks, {parts}", "O out", " ".join([*steps, "store(total, out)"]), f"{op}_{count}")


def reduce(parts: Sequence[Array], op: str, out: Array) -> None:
    """Scratch: out's size in the compute dtype, with more than TOGETHER parts; a copy of each part on another GPU."""
    if not out.size:
        return
    ranks, rest = float(len(parts)), [local(part) for part in parts]
    while len(rest) > TOGETHER:
        total = cp.empty(out.shape, wide(*parts))
        _combine("max" if op == "max" else "sum", TOGETHER)(ranks, *rest[:TOGETHER], total)
        rest = [total, *rest[TOGETHER:]]
    _combine(op, len(rest))(ranks, *rest, out)


def sum_squares(a: Array, run: int, out: Array) -> None:
    """Scratch: 8 bytes for each PIECE elements. A piece's threads and a run's pieces are added in a fixed order."""
    pieces = -(-min(run, a.size) // PIECE)
    if not out.size or not pieces:
        fill(out, 0.0)
        return
    partial = cp.empty((out.size, pieces), FLOAT64)
    sizes = a.size, run, pieces, PIECE
    raw(SQUARES, "squares", (a.dtype,))((out.size * pieces,), (256,), (dense(a), partial, *sizes))
    # Always 256 threads, whatever the number of pieces: pieces past a run's end are zeros and change nothing.
    with result_for(out) as target:
        add = raw(ROWS_TO_ONE, "rows_to_one", (FLOAT64, FLOAT64))
        add((out.size,), (256, 1), (partial, target, out.size, pieces, 0))


def finite_probe(a: Array, out: Array) -> None:
    """0 times the sum of squares. Scratch as there; values of fp64 whose squares overflow count as infinite."""
    sum_squares(a, a.size, out)
    multiply(out, 0.0, out)


def adam(param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, hyper: AdamStep) -> None:
    _adam(grad, *adam_numbers(hyper), param, exp_avg, exp_avg_sq)


def adam_numbers(hyper: AdamStep) -> list[float]:
    """Return a kernel's numbers: grad_scale, factor, decay, step_size, beta1_rest, beta2, beta2_rest, correction,
    eps."""
    decay, beta1, beta2 = hyper.weight_decay, hyper.beta1, hyper.beta2
    factor, decay = (1.0 - hyper.lr * decay, 0.0) if hyper.decoupled else (1.0, decay)
    rests = 1.0 - beta1, beta2, 1.0 - beta2
    return [*map(float, (hyper.grad_scale, factor, decay, hyper.step_size, *rests, hyper.correction, hyper.eps))]
