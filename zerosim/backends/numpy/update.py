"""Sums over ranks, norms and optimizer steps in NumPy: flat arrays, elementwise, in place.

A slice of an array gives the same bits as the whole array would give there. Every
operation is one that IEEE 754 rounds correctly (+ - * / sqrt), in an order that no cut changes. So
ZeRO's shards can be compared with `==`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.backends.kernels import QUANT_BLOCK, AdamStep, Array, Coded, Rule, Storing
from zerosim.backends.numpy.cast import BFLOAT16, FLOAT16, FLOAT64, raised, round_into, store, wide, windows
from zerosim.backends.numpy.quantize import dequantize, dynamic_map, quantize
from zerosim.backends.numpy.rounding import stored_step

SQUARES = 8 * 1024
"""Elements in a partial sum of squares: as many as fit the cache. NumPy's order of additions depends only on their
number. The order of BLAS's dot may depend on their address."""

BLOCKS = 32
"""Blocks of 8-bit states processed together: as many elements as SQUARES."""

EXPONENTS: Mapping[np.dtype[Any], np.uint16] = MappingProxyType(
    {FLOAT16: np.uint16(0x7C00), BFLOAT16: np.uint16(0x7F80)}
)
"""A half type's exponent bits: all ones in inf and nan, and nowhere else."""


def reduce(parts: Sequence[Array], op: str, out: Array) -> None:
    combine = np.maximum if op == "max" else np.add
    compute = wide(*parts)
    # Sum in `out` itself, unless `out` is one of the parts and still has to be read.
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
    step_size, correction = hyper.step_size, hyper.correction
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


def adam8bit(
    param: Array, grad: Array, exp_avg: Coded, exp_avg_sq: Coded, hyper: AdamStep,
    stored: tuple[Rule, Storing] | None = None,
) -> None:  # fmt: skip
    states = (*exp_avg, dynamic_map(True)), (*exp_avg_sq, dynamic_map(False))
    for start in range(0, param.size, BLOCKS * QUANT_BLOCK):
        here = slice(start, start + BLOCKS * QUANT_BLOCK)
        block = slice(start // QUANT_BLOCK, start // QUANT_BLOCK + BLOCKS)
        m, v = (
            dequantize(codes[here], absmax[block], table).astype(wide(param), copy=False)
            for codes, absmax, table in states
        )
        if stored is None:
            adam(param[here], grad[here], m, v, hyper)
        else:
            stored_step(stored[0], grad[here], param[here], (m, v), stored[1].within(here))
        for moment, (codes, absmax, table) in zip((m, v), states, strict=True):
            codes[here], absmax[block] = quantize(moment, table)


def elementwise(rule: Rule, grad: Array, param: Array, *states: Array, storing: Storing | None = None) -> None:
    if storing is not None:
        stored_step(rule, grad, param, states, storing)
        return
    for half, *stored in windows(grad, param, *states):
        values = [raised(array) for array in stored]
        scaled = np.multiply(raised(half), rule.grad_scale, dtype=values[0].dtype)
        rule.run(np, values[0], scaled, rule.now, *values[1:])
        for value, array in zip(values, stored, strict=True):
            round_into(value, array)
