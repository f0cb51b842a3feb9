"""Llama's own layers in NumPy: RMS norm (of rows, of heads) and rotary positions, with their backward halves.

Arranged as `fused.py` is: blocks that stay in the cache, sums as products with ones, one
rounding at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, row_blocks, store, wide
from zerosim.backends.numpy.products import product


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
    compute, weight = wide(x), _factors(weight, offset)
    for rows in row_blocks(*x.shape):
        block = raised(x[rows])
        _rstd(block, eps, rstd[rows])
        y = result_for(out[rows], compute)
        np.multiply(block, rstd[rows, None], out=y)
        y *= weight
        round_into(y, out[rows])


def _factors(weight: Array, offset: float) -> Array:
    return raised(weight) + offset if offset else raised(weight)


def rms_norm_stats(x: Array, eps: float, rstd: Array) -> None:
    for rows in row_blocks(*x.shape):
        _rstd(raised(x[rows]), eps, rstd[rows])


def _rstd(block: Array, eps: float, out: Array) -> None:
    square = np.einsum("ij,ij->i", block, block) / block.shape[1]
    np.divide(1.0, np.sqrt(square + eps), out=out)


def rms_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    offset: float = 0.0,
) -> None:
    """With n = x * rstd and g = grad * weight: dx = rstd * (g - n * average(g * n)), dweight = sum(grad * n)."""
    compute, columns = wide(x, grad), x.shape[1]
    weight = _factors(weight, offset)
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


def head_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
    compute, weight, by_head = wide(x), _factors(weight, offset), (-1, weight.size)
    for rows in row_blocks(*x.shape):
        block = raised(x[rows]).reshape(by_head)  # a copy where columns are left out
        scale = np.empty(len(block), compute)
        _rstd(block, eps, scale)
        rstd[rows] = scale.reshape(-1, rstd.shape[1])
        y = block * scale[:, None]
        y *= weight
        store(y.reshape(out[rows].shape), out[rows])


def head_norm_backward(
    grad: Array, x: Array, weight: Array, rstd: Array, dx: Array, dweight: Array | None, offset: float = 0.0
) -> None:
    """As `rms_norm_backward`, a head in place of a row."""
    compute, factors, by_head = wide(x, grad), _factors(weight, offset), (-1, weight.size)
    weight_sum = np.zeros(weight.size, compute)
    for rows in row_blocks(*x.shape):
        g, scale = raised(grad[rows]).reshape(by_head), rstd[rows].reshape(-1, 1)
        normed = raised(x[rows]).reshape(by_head) * scale
        scaled = g * normed
        if dweight is not None:
            weight_sum += product(np.ones(len(g), compute), scaled)
        normed *= (product(scaled, factors) / weight.size)[:, None]
        y = g * factors
        y -= normed
        y *= scale
        store(y.reshape(dx[rows].shape), dx[rows])
    if dweight is not None:
        store(weight_sum, dweight)


def rotary(x: Array, head_dim: int, heads: int, rope: Rope, inverse: bool, out: Array) -> None:
    batch, tokens, _ = x.shape
    compute, width, turned = wide(x), heads * head_dim, rope.turned or head_dim
    turn = Turn(rope, turned, tokens, compute, inverse)
    for row in range(batch):
        values, y = raised(x[row]), result_for(out[row], compute)
        y[:, width:] = values[:, width:]
        by_head = values[:, :width].reshape(tokens, heads, head_dim)
        result = y[:, :width].reshape(tokens, heads, head_dim)  # a view: only the last dim is split
        result[..., turned:] = by_head[..., turned:]
        turn(by_head[..., :turned], result[..., :turned])
        round_into(y, out[row])


class Turn:
    """The rotation of heads' columns, (T, heads, `turned`), from one array of the compute type into another."""

    def __init__(self, rope: Rope, turned: int, tokens: int, compute: np.dtype[Any], inverse: bool) -> None:
        rates = 1.0 / rope.base ** (np.arange(0, turned, 2).astype(compute) / turned)
        if rope.frequencies:
            rates = np.array(rope.frequencies)
        angles = np.arange(rope.first, rope.first + tokens).astype(compute)[:, None] * rates.astype(compute)
        self.cos, self.sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        if inverse:
            np.negative(self.sin, out=self.sin)
        if rope.factor != 1.0:
            self.cos *= rope.factor
            self.sin *= rope.factor
        self.one, self.other = slice(0, turned // 2), slice(turned // 2, turned)
        if rope.interleaved:
            self.one, self.other = slice(0, turned, 2), slice(1, turned, 2)

    def __call__(self, x: Array, out: Array) -> None:
        one, other = self.one, self.other
        first, second = x[..., one], x[..., other]
        np.multiply(first, self.cos, out=out[..., one])
        np.multiply(second, self.cos, out=out[..., other])
        out[..., one] -= second * self.sin
        out[..., other] += first * self.sin


def latent_heads(q: Array, kv: Array, turned: Array, heads: int, rope: Rope, out: Array) -> None:
    compute, tokens, columns = wide(q, kv, turned), q.shape[1], turned.shape[2]
    turn, keys = Turn(rope, columns, tokens, compute, False), q.shape[2]
    plain = keys // heads - columns
    for row in range(len(q)):
        y = result_for(out[row], compute)
        queries, pairs, shared = (raised(a[row]).reshape(tokens, -1, a.shape[2] // n)
                                  for a, n in ((q, heads), (kv, heads), (turned, 1)))  # fmt: skip
        to_q, to_k, to_v = (part.reshape(tokens, heads, -1) for part in _thirds(y, keys))
        to_q[..., :plain] = queries[..., :plain]
        turn(queries[..., plain:], to_q[..., plain:])
        to_k[..., :plain] = pairs[..., :plain]
        turn(shared, to_k[:, :1, plain:])
        to_k[:, 1:, plain:] = to_k[:, :1, plain:]
        to_v[...] = pairs[..., plain:]
        round_into(y, out[row])


def latent_heads_backward(grad: Array, heads: int, rope: Rope, dq: Array, dkv: Array, dturned: Array) -> None:
    compute, tokens, columns = wide(grad), grad.shape[1], dturned.shape[2]
    turn, keys = Turn(rope, columns, tokens, compute, True), dq.shape[2]
    plain = keys // heads - columns
    for row in range(len(grad)):
        of_q, of_k, of_v = (part.reshape(tokens, heads, -1) for part in _thirds(raised(grad[row]), keys))
        targets = dq[row], dkv[row], dturned[row]
        results = [result_for(target, compute) for target in targets]
        queries, pairs, shared = (y.reshape(tokens, n, -1) for y, n in zip(results, (heads, heads, 1), strict=True))
        queries[..., :plain] = of_q[..., :plain]
        turn(of_q[..., plain:], queries[..., plain:])
        pairs[..., :plain], pairs[..., plain:] = of_k[..., :plain], of_v
        turn(of_k[..., plain:].sum(axis=1, keepdims=True), shared)
        for result, target in zip(results, targets, strict=True):
            round_into(result, target)


def _thirds(packed: Array, keys: int) -> tuple[Array, Array, Array]:
    """q|k|v of a row, of which q and k have so many columns each."""
    return packed[:, :keys], packed[:, keys : 2 * keys], packed[:, 2 * keys :]
