"""Sums over ranks, norms and optimizer steps in NumPy: flat arrays, elementwise, in place.

What a slice of an array gives is, bit for bit, what the whole array would have given there: every
operation is one that IEEE 754 rounds correctly (+ - * / sqrt), in an order that no cut changes. That
is what lets ZeRO's shards be compared with `==`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.backends.kernels import AdamStep, Array
from zerosim.backends.numpy.cast import BFLOAT16, FLOAT16, FLOAT64, raised, store, wide, windows

SQUARES = 8 * 1024
"""Elements in a partial sum of squares: what stays in the cache. NumPy adds them in an order that their number decides,
where BLAS's dot may go by where in memory they start."""

EXPONENTS: Mapping[np.dtype[Any], np.uint16] = MappingProxyType(
    {FLOAT16: np.uint16(0x7C00), BFLOAT16: np.uint16(0x7F80)}
)
"""A half type's exponent bits: all ones in inf and nan, and nowhere else."""


def reduce(parts: Sequence[Array], op: str, out: Array) -> None:
    combine = np.maximum if op == "max" else np.add
    compute = wide(*parts)
    # Sums gather in `out` itself, unless it is a part that is still to be read by then.
    in_out = out.dtype == compute and not any(np.may_share_memory(out, part) for part in parts[2:])
    for *pieces, target in windows(*parts, out):
        sums = target if in_out else np.empty_like(target, dtype=compute)
        total = raised(pieces[0])
        for piece in pieces[1:]:
            total = combine(total, raised(piece), out=sums)
        if op == "avg":
            total = np.divide(total, len(parts), out=sums)
        if total is not target:
            store(total, target)


def sum_squares(a: Array, run: int, out: Array) -> None:
    for index in range(out.size):
        total = 0.0
        stop = min((index + 1) * run, a.size)
        for start in range(index * run, stop, SQUARES):
            piece = raised(a[start : min(start + SQUARES, stop)]).astype(FLOAT64, copy=False)
            total += float(np.add.reduce(np.square(piece)))
        out[index] = total


def finite_probe(a: Array, out: Array) -> None:
    """Half types by their bits, which NumPy reads ten times as fast as their values."""
    ones = EXPONENTS.get(a.dtype)
    if ones is None:
        finite = np.isfinite(a).all()
    else:
        finite = (np.bitwise_and(a.view(np.uint16), ones) != ones).all()
    out[0] = 0.0 if finite else np.nan


def adam(param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, hyper: AdamStep) -> None:
    step_size = hyper.lr / (1.0 - hyper.beta1**hyper.step)
    correction = math.sqrt(1.0 - hyper.beta2**hyper.step)
    for p, half, m, v in windows(param, grad, exp_avg, exp_avg_sq):
        g = np.multiply(raised(half), hyper.grad_scale, dtype=p.dtype)
        if hyper.decoupled:
            p *= 1.0 - hyper.lr * hyper.weight_decay
        elif hyper.weight_decay:
            g += hyper.weight_decay * p
        scratch = g - m
        scratch *= 1.0 - hyper.beta1
        m += scratch
        v *= hyper.beta2
        np.multiply(g, 1.0 - hyper.beta2, out=scratch)
        scratch *= g
        v += scratch
        np.sqrt(v, out=scratch)
        scratch /= correction
        scratch += hyper.eps
        np.multiply(m, step_size, out=g)
        g /= scratch
        p -= g


def elementwise(
    rule: Callable[..., None], now: object, grad_scale: float, grad: Array, param: Array, *states: Array
) -> None:
    for p, half, *kept in windows(param, grad, *states):
        rule(np, p, np.multiply(raised(half), grad_scale, dtype=p.dtype), now, *kept)
