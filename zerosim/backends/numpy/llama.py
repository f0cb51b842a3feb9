"""Llama's own layers in NumPy: RMS norm, rotary positions and SwiGLU, with their backward halves.

Arranged as `fused.py` is: blocks that stay in the cache, sums as products with ones, one
rounding at the end.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, row_blocks, store, wide, windows
from zerosim.backends.numpy.products import product


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array) -> None:
    compute, weight = wide(x), raised(weight)
    for rows in row_blocks(*x.shape):
        block = raised(x[rows])
        _rstd(block, eps, rstd[rows])
        y = result_for(out[rows], compute)
        np.multiply(block, rstd[rows, None], out=y)
        y *= weight
        round_into(y, out[rows])


def rms_norm_stats(x: Array, eps: float, rstd: Array) -> None:
    for rows in row_blocks(*x.shape):
        _rstd(raised(x[rows]), eps, rstd[rows])


def _rstd(block: Array, eps: float, out: Array) -> None:
    square = np.einsum("ij,ij->i", block, block) / block.shape[1]
    np.divide(1.0, np.sqrt(square + eps), out=out)


def rms_norm_backward(
    grad: Array, x: Array, weight: Array, rstd: Array, dx: Array | None, dweight: Array | None
) -> None:
    """With n = x * rstd and g = grad * weight: dx = rstd * (g - n * average(g * n)), dweight = sum(grad * n)."""
    compute, columns = wide(x, grad), x.shape[1]
    weight = raised(weight)
    weight_sum = np.zeros(columns, compute)
    for rows in row_blocks(*x.shape):
        g, scale = raised(grad[rows]), rstd[rows, None]
        normed = raised(x[rows]) * scale
        scaled = g * normed
        if dweight is not None:
            weight_sum += product(np.ones(len(g), compute), scaled)
        if dx is None:
            continue
        normed *= (product(scaled, weight) / columns)[:, None]
        result = result_for(dx[rows], compute)
        np.multiply(g, weight, out=result)
        result -= normed
        result *= scale
        round_into(result, dx[rows])
    if dweight is not None:
        store(weight_sum, dweight)


def rotary(x: Array, head_dim: int, heads: int, base: float, inverse: bool, out: Array) -> None:
    batch, tokens, _ = x.shape
    compute, half, turned = wide(x), head_dim // 2, heads * head_dim
    rates = 1.0 / base ** (np.arange(0, head_dim, 2).astype(compute) / head_dim)
    angles = np.arange(tokens).astype(compute)[:, None] * rates.astype(compute)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    if inverse:
        np.negative(sin, out=sin)
    for row in range(batch):
        values, y = raised(x[row]), result_for(out[row], compute)
        y[:, turned:] = values[:, turned:]
        pairs = values[:, :turned].reshape(tokens, heads, 2, half)
        result = y[:, :turned].reshape(tokens, heads, 2, half)  # a view: only the last dim is split
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        np.multiply(first, cos, out=result[:, :, 0])
        np.multiply(second, cos, out=result[:, :, 1])
        result[:, :, 0] -= second * sin
        result[:, :, 1] += first * sin
        round_into(y, out[row])


def swiglu(x: Array, out: Array) -> None:
    width = out.shape[1]
    for gate, up, target in windows(x[:, :width], x[:, width:], out):
        values = raised(gate)
        y = result_for(target, values.dtype)
        np.multiply(values, _sigmoid(values), out=y)
        y *= raised(up)
        round_into(y, target)


def swiglu_backward(grad: Array, x: Array, dx: Array) -> None:
    """With s = sigmoid(gate): d(gate * s) = s * (1 + gate * (1 - s)), d(up) = gate * s, each times grad."""
    width = grad.shape[1]
    halves = (x[:, :width], x[:, width:], dx[:, :width], dx[:, width:])
    for grad_piece, gate, up, dgate, dup in windows(grad, *halves):
        values, g = raised(gate), raised(grad_piece)
        s = _sigmoid(values)
        slope = 1.0 - s
        slope *= values
        slope += 1.0
        slope *= s
        slope *= raised(up)
        s *= values
        for factor, target in ((slope, dgate), (s, dup)):
            result = result_for(target, values.dtype)
            np.multiply(factor, g, out=result)
            round_into(result, target)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); far below 0 the exponential is inf and the result 0."""
    values = np.negative(x)
    np.exp(values, out=values)
    values += 1.0
    return np.divide(1.0, values, out=values)
