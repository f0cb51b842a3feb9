"""Attention's scores in NumPy: those of a block of queries and the keys that it reads, ready for the softmax.

Only the keys in a block's reach exist: up to the block's last query, and from its first query's window on. Layouts are
those of `attention.py`: q (B, K, H/K, T, d), k (B, K, 1, T, d), scores (B, K, H/K, queries, keys).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.forms import alibi_slopes
from zerosim.backends.kernels import Array, Heads
from zerosim.backends.numpy.cast import raised
from zerosim.backends.numpy.products import product

QUERIES = 64
"""Queries in a block: fewer leave out more of the future half, more keep the matrices thick."""

FUTURE = np.triu(np.ones((QUERIES, QUERIES), bool), 1)
FUTURE.flags.writeable = False
"""The keys of a block's own queries that come after them."""


class BlockScores:
    """The scores of one attention over `tokens` keys, a block of queries at a time. The scale is the caller's."""

    def __init__(self, heads: Heads, tokens: int, compute: np.dtype[Any], bias: Array | None = None) -> None:
        self.form, self.tokens = heads.form, tokens
        self.window = heads.form.reach(tokens)
        self.bias = None if bias is None else raised(bias).reshape(heads.keys, -1, *bias.shape[1:])
        self.slopes = slopes_of(heads, compute)

    def keys(self, rows: slice) -> slice:
        """Return the keys that these queries read."""
        read = self.form.read(range(rows.start, rows.stop), range(self.tokens), self.tokens)
        return slice(read.start, read.stop)

    def of(self, q: Array, k: Array, rows: slice, group: slice) -> Array:
        """Return the scores of a block, of the key-value heads `group`: -inf where a query does not read a key."""
        scores, keys, form = self._products(q, k, rows), self.keys(rows), self.form
        if form.cap:
            scores /= form.cap
            np.tanh(scores, out=scores)
            scores *= form.cap
        if self.bias is not None:
            scores += self.bias[group][..., rows, keys]
        if self.slopes is not None or self.window:
            ahead = np.arange(keys.start, keys.stop) - np.arange(rows.start, rows.stop)[:, None]
            if self.slopes is not None:
                scores += self.slopes[group] * ahead.astype(scores.dtype)
            if self.window:
                np.copyto(scores, -np.inf, where=ahead <= -self.window)
        if form.causal:
            diagonal = scores[..., rows.start - keys.start :]
            np.copyto(diagonal, -np.inf, where=FUTURE[: diagonal.shape[-2], : diagonal.shape[-1]])
        return scores

    def cap_slope(self, q: Array, k: Array, rows: slice) -> Array:
        """Return the derivative of the cap at a block's scores."""
        slope = self._products(q, k, rows)
        slope /= self.form.cap
        np.tanh(slope, out=slope)
        slope *= slope
        return np.subtract(1.0, slope, out=slope)

    def _products(self, q: Array, k: Array, rows: slice) -> Array:
        return product(q[..., rows, :], k[..., self.keys(rows), :].swapaxes(-1, -2))


def slopes_of(heads: Heads, compute: np.dtype[Any]) -> Array | None:
    """Return ALiBi's slopes of these heads, (K, H/K, 1, 1); None without it."""
    if not heads.form.alibi:
        return None
    own = alibi_slopes(heads.whole or heads.queries)[heads.first : heads.first + heads.queries]
    return np.array(own, compute).reshape(heads.keys, -1, 1, 1) * compute.type(heads.form.alibi)


def blocks(tokens: int) -> list[slice]:
    return [slice(start, min(start + QUERIES, tokens)) for start in range(0, tokens, QUERIES)]
