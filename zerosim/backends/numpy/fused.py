"""Fused layers in NumPy: linear, layer norm, GELU and dropout, with their backward halves.

The elementwise chains run block by block, in place: a block stays in the cache while a dozen NumPy
calls pass over it, which is worth a factor of three against whole arrays. Sums over rows or columns
are products with a vector of ones, since BLAS adds faster than `sum`.
"""

from __future__ import annotations

import math

import numpy as np

from zerosim.backends.kernels import Array, Window
from zerosim.backends.numpy.cast import raised, result_for, round_into, row_blocks, store, wide, windows
from zerosim.backends.numpy.products import product

# Python floats: they take an array's type, where NumPy's own float64 numbers would raise it.
GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
PHILOX_WORDS = 64 * 1024


def linear(x: Array, weight: Array, bias: Array | None, out: Array) -> None:
    y = result_for(out, wide(x, weight))
    product(raised(x), raised(weight), out=y)
    if bias is not None:
        y += raised(bias)
    round_into(y, out)


def column_sum(grad: Array, out: Array) -> None:
    compute = wide(grad)
    if grad.dtype == compute:  # nothing to convert: one product reads it in place
        store(product(np.ones(len(grad), compute), grad), out)
        return
    total = np.zeros(out.shape, compute)
    for rows in row_blocks(*grad.shape):
        block = raised(grad[rows])
        total += product(np.ones(len(block), compute), block)
    store(total, out)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, out: Array, mean: Array, rstd: Array) -> None:
    compute = wide(x)
    ones = np.ones(x.shape[1], compute)
    weight, added = raised(weight), None if bias is None else raised(bias)
    for rows in row_blocks(*x.shape):
        block = raised(x[rows])
        y = result_for(out[rows], compute)
        _center(block, ones, eps, mean[rows], rstd[rows], y)
        y *= rstd[rows, None]
        y *= weight
        if added is not None:
            y += added
        round_into(y, out[rows])


def layer_norm_stats(x: Array, eps: float, mean: Array, rstd: Array) -> None:
    ones = np.ones(x.shape[1], wide(x))
    for rows in row_blocks(*x.shape):
        _center(raised(x[rows]), ones, eps, mean[rows], rstd[rows], None)


def _center(block: Array, ones: Array, eps: float, mean: Array, rstd: Array, out: Array | None) -> None:
    """Fill mean, rstd and, where it is wanted, out = block - mean."""
    np.divide(product(block, ones), len(ones), out=mean)
    centered = np.subtract(block, mean[:, None], out=out)
    variance = np.einsum("ij,ij->i", centered, centered) / len(ones)
    np.divide(1.0, np.sqrt(variance + eps), out=rstd)


def layer_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    dbias: Array | None,
) -> None:
    """With n = (x - mean) * rstd and g = grad * weight: dx = rstd * (g - average(g) - n * average(g * n))."""
    compute, columns = wide(x, grad), x.shape[1]
    weight = raised(weight)
    weight_sum, bias_sum = np.zeros(columns, compute), np.zeros(columns, compute)
    for rows in row_blocks(*x.shape):
        g, scale = raised(grad[rows]), rstd[rows, None]
        normed = np.subtract(raised(x[rows]), mean[rows, None])
        normed *= scale
        scaled = g * normed
        ones = np.ones(len(g), compute)
        if dweight is not None:
            weight_sum += product(ones, scaled)
        if dbias is not None:
            bias_sum += product(ones, g)
        if dx is None:
            continue
        # Averages of g * weight and of g * weight * normed, as products with the vector `weight`.
        average, slope = product(g, weight) / columns, product(scaled, weight) / columns
        normed *= slope[:, None]
        result = result_for(dx[rows], compute)
        np.multiply(g, weight, out=result)
        result -= normed
        result -= average[:, None]
        result *= scale
        round_into(result, dx[rows])
    for total, into in ((weight_sum, dweight), (bias_sum, dbias)):
        if into is not None:
            store(total, into)


def gelu_gate(x: Array) -> Array:
    """0.5 * (1 + tanh(u)) as 1 / (1 + exp(-2u)): cheaper, and exact in the tail, where 1 + tanh(u) cancels."""
    gate = x * x
    gate *= -GELU_SCALE * GELU_CUBIC
    gate -= GELU_SCALE
    gate *= x  # -2u
    np.exp(gate, out=gate)
    gate += 1.0
    return np.divide(1.0, gate, out=gate)


def gelu(x: Array, out: Array) -> None:
    for piece, target in windows(x, out):
        values = raised(piece)
        y = result_for(target, values.dtype)
        np.multiply(values, gelu_gate(values), out=y)
        round_into(y, target)


def gelu_backward(grad: Array, x: Array, dx: Array) -> None:
    for grad_piece, piece, target in windows(grad, x, dx):
        values = raised(piece)
        slope = gelu_slope(values, gelu_gate(values))
        result = result_for(target, values.dtype)
        np.multiply(slope, raised(grad_piece), out=result)
        round_into(result, target)


def gelu_slope(x: Array, gate: Array) -> Array:
    """d/dx (x * gate) = gate * (1 + x * (1 - gate) * 2u'), with 2u' = scale * (1 + 3 * cubic * x * x)."""
    slope = x * x
    slope *= 3.0 * GELU_SCALE * GELU_CUBIC
    slope += GELU_SCALE
    slope *= x
    slope *= 1.0 - gate
    slope += 1.0
    slope *= gate
    return slope


def dropout(x: Array, mask: Array, keep: float, out: Array) -> None:
    for piece, kept, target in windows(x, mask, out):
        values = raised(piece)
        y = result_for(target, values.dtype)
        np.multiply(values, kept, out=y)
        y /= keep
        round_into(y, target)


def dropout_mask(key: tuple[int, int], probability: float, out: Array, window: Window | None = None) -> None:
    flat = np.empty(out.size, np.uint8)
    first, run, stride = window or (0, max(flat.size, 1), 0)
    for number, start in enumerate(range(0, flat.size, run)):
        mask_run(key, probability, first + number * stride, flat[start : start + run])
    out[...] = flat.reshape(out.shape)


def mask_run(key: tuple[int, int], probability: float, first: int, out: Array) -> None:
    """out, one byte an element: words `first` and on of the stream of `kernels.dropout_mask`; a counter makes 8."""
    words = np.random.Philox(key=np.array(key, np.uint64), counter=first // 8)
    threshold, start, skip = round(probability * 2**32), 0, first % 8
    while start < out.size:
        part = out[start : start + PHILOX_WORDS - skip]
        drawn = words.random_raw((skip + part.size + 1) // 2).astype("<u8", copy=False).view("<u4")
        np.greater_equal(drawn[skip : skip + part.size], threshold, out=part.view(np.bool_))
        start, skip = start + part.size, 0
