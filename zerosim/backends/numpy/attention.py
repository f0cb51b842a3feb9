"""Causal self-attention in NumPy with its probabilities stored, forward and backward, over a packed q|k|v array.

Works on blocks of queries, for which only the keys up to the block's end exist: the future half of
the scores is never computed, beyond the corners of the diagonal blocks. Scores live in float32
(float64) scratch of the cache's size; what is stored is `probs` and the results. Attention that
stores no probabilities is in `flash.py`.

H/K neighbouring query heads share one head of keys and values (K = H: every head has its own). Arrays
are laid out (B, K, H/K, T, d), those of keys and values (B, K, 1, T, d).

B batch, T tokens, D = H d model, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerosim.backends.kernels import Array, Heads, Probs
from zerosim.backends.numpy.cast import raised, result_for, round_into, store, wide
from zerosim.backends.numpy.products import product
from zerosim.backends.numpy.scores import QUERIES, BlockScores, blocks

SCORES = 128 * 1024
"""Scores held at a time, about: as many sequences and heads go together."""


def attention(qkv: Array, heads: Heads, kept: Probs, out: Array) -> None:
    compute, tokens = wide(qkv), qkv.shape[1]
    ones, scores_of = np.ones(tokens, compute), BlockScores(heads, tokens, compute)
    for batch, group in groups(len(qkv), heads, tokens):
        q, k, v = split_qkv(qkv, heads, batch, group)
        q = q * heads.form.factor(q.shape[-1])  # here the scale costs d products a query; on the scores it would cost T
        target = by_group(out, heads)[batch, :, group]
        result = result_for(target, compute)
        y = heads_first(result)
        stored = _scores(kept.probs, heads, batch, group)
        mask, left = (None if a is None else _scores(a, heads, batch, group) for a in (kept.mask, kept.dropped))
        for rows in blocks(tokens):
            keys = scores_of.keys(rows)
            scores = scores_of.of(q, k, rows, group)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= product(scores, ones[keys])[..., None]
            _store(scores, stored, rows, keys)
            if mask is not None:
                scores *= mask[..., rows, keys]
            if left is not None:
                _store(scores, left, rows, keys)
            product(scores, v[..., keys, :], out=y[..., rows, :])
        if mask is not None:
            result /= kept.keep
        round_into(result, target)


def _store(scores: Array, out: Array, rows: slice, keys: slice) -> None:
    """Store a block's scores, and 0 for the keys that it does not read."""
    store(scores, out[..., rows, keys])
    out[..., rows, : keys.start] = 0
    out[..., rows, keys.stop :] = 0


def attention_backward(grad: Array, qkv: Array, heads: Heads, kept: Probs, workspace: Array, dqkv: Array) -> None:
    """With p the probabilities, dp = (grad @ v^T) * mask / keep and ds = p * (dp - sum(dp * p)) per query:
    dq = ds @ k * scale, dk = ds^T @ q * scale, dv = (p * mask / keep)^T @ grad; dk and dv are summed
    over the query heads that share them. A cap multiplies ds by its derivative, and computes the scores again for it.
    `workspace` is left alone: blocks need no room for all scores.
    """
    compute, tokens = wide(grad, qkv), qkv.shape[1]
    scores_of = BlockScores(heads, tokens, compute)
    for batch, group in groups(len(qkv), heads, tokens):
        q, k, v = split_qkv(qkv, heads, batch, group)
        scaled = q * heads.form.factor(q.shape[-1]) if heads.form.cap else q
        g = heads_first(raised(by_group(grad, heads)[batch, :, group]))
        if kept.mask is not None:
            g = g / kept.keep
        stored = _scores(kept.probs, heads, batch, group)
        mask, left = (None if a is None else _scores(a, heads, batch, group) for a in (kept.mask, kept.dropped))
        totals = Totals(dqkv, heads, batch, group, compute)
        for rows in reversed(blocks(tokens)):
            keys = scores_of.keys(rows)
            p = raised(stored[..., rows, keys])
            ds = product(g[..., rows, :], v[..., keys, :].swapaxes(-1, -2))
            after = p
            if mask is not None:
                ds *= mask[..., rows, keys]
                after = p * mask[..., rows, keys] if left is None else raised(left[..., rows, keys])
            ds -= np.einsum("...k,...k->...", ds, p)[..., None]
            ds *= p
            if heads.form.cap:
                ds *= scores_of.cap_slope(scaled, k, rows)
            totals.add(rows, keys, ds, after, q, k, g)
        totals.round_into()


class Totals:
    """dq, dk and dv of one group of heads in the compute type, until `round_into` rounds them once into dqkv."""

    def __init__(self, dqkv: Array, heads: Heads, batch: slice, group: slice, compute: np.dtype[Any]) -> None:
        queries, pairs = _parts(dqkv, heads)
        self.targets = queries[batch, :, group], pairs[batch, :, :, group]
        self.results = tuple(result_for(target, compute) for target in self.targets)
        self.dq = heads_first(self.results[0])
        self.dk, self.dv = (self.results[1][:, :, part].swapaxes(1, 2) for part in (0, 1))  # (B, K, T, d)
        self.tokens = dqkv.shape[1]
        self.scale = heads.form.factor(self.dq.shape[-1])
        self.is_set = heads.form.reach(self.tokens) > 0  # with a window no block has every key
        if self.is_set:
            self.results[1][...] = 0

    def add(self, rows: slice, keys: slice, ds: Array, dropped: Array, q: Array, k: Array, g: Array) -> None:
        """The contribution of one block of queries; blocks come from the last to the first. Without a window the last
        has every key: it sets dk and dv, the others add."""
        product(ds, k[..., keys, :], out=self.dq[..., rows, :])
        for total, left, right in ((self.dk, ds, q), (self.dv, dropped, g)):
            part = product(left.swapaxes(-1, -2), right[..., rows, :])
            part = part[:, :, 0] if part.shape[2] == 1 else part.sum(axis=2)
            if self.is_set:
                total[:, :, keys] += part
            else:
                total[...] = part
        self.is_set = True

    def round_into(self) -> None:
        self.dq *= self.scale
        self.dk *= self.scale
        for result, target in zip(self.results, self.targets, strict=True):
            round_into(result, target)


def split_qkv(qkv: Array, heads: Heads, batch: slice, group: slice) -> tuple[Array, Array, Array]:
    """q (B, K, H/K, T, d), k and v (B, K, 1, T, d) of some sequences and heads, in the compute type."""
    queries, pairs = _parts(qkv, heads)
    k, v = (heads_first(x[:, :, :, None]) for x in np.moveaxis(raised(pairs[batch, :, :, group]), 2, 0))
    return heads_first(raised(queries[batch, :, group])), k, v


def _parts(qkv: Array, heads: Heads) -> tuple[Array, Array]:
    """(B, T, (H + 2K) d) as queries (B, T, K, H/K, d) and pairs of keys and values (B, T, 2, K, d), views."""
    width = qkv.shape[2] // heads.packed
    queries, pairs = qkv[..., : heads.queries * width], qkv[..., heads.queries * width :]
    return by_group(queries, heads), pairs.reshape(*qkv.shape[:2], 2, heads.keys, width)


def by_group(packed: Array, heads: Heads) -> Array:
    """(B, T, H d) as (B, T, K, H/K, d), a view."""
    return packed.reshape(*packed.shape[:2], heads.keys, heads.sharing, -1)


def heads_first(x: Array) -> Array:
    """(B, T, K, H/K, d) as (B, K, H/K, T, d), a view whose matrices BLAS reads and writes in place."""
    return x.transpose(0, 2, 3, 1, 4)


def _scores(a: Array, heads: Heads, batch: slice, group: slice) -> Array:
    """(B, H, T, T) as (B, K, H/K, T, T), a view of some sequences and heads."""
    return a.reshape(len(a), heads.keys, -1, *a.shape[2:])[batch, group]


def groups(batches: int, heads: Heads, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of the key-value heads whose scores for one block of queries number about SCORES."""
    scores = min(tokens, QUERIES) * tokens * heads.sharing
    together = min(heads.keys, max(1, SCORES // scores))
    rows = max(1, SCORES // (scores * heads.keys))
    for row in range(0, batches, rows):
        for head in range(0, heads.keys, together):
            yield slice(row, row + rows), slice(head, head + together)
