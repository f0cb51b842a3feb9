"""Self-attention in NumPy by blocks of keys and values that arrive one after the other, merged by log-sum-exp.

Each query has a running result and the log-sum-exp of the scores that it has seen. A block's result is merged with them
(Liu et al., arXiv 2310.01889; the arithmetic is FlashAttention's, 2307.08691). A few queries of a block meet all its
keys at once, in scratch memory of the cache's size.

Layouts are those of `attention.py`. B batch, T queries, U keys, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array, Dropout, Heads, Met, Tile
from zerosim.backends.numpy.attention import by_group, groups, heads_first, keys_and_values
from zerosim.backends.numpy.cast import raised
from zerosim.backends.numpy.fused import mask_run
from zerosim.backends.numpy.products import product
from zerosim.backends.numpy.scores import QUERIES, slopes_of


def attention_block(q: Array, kv: Array, heads: Heads, met: Met, dropout: Dropout, out: Array, lse: Array) -> None:
    results, sums, factor = heads_first(by_group(out, heads)), _by_group(lse, heads), _factor(q, heads)
    for at in _parts(q, kv, heads, met):
        queries, k, v = at.operands(q, kv, heads)
        scores = at.scores(queries * factor, k, heads, out.dtype)
        top = scores.max(axis=-1, keepdims=True)
        np.copyto(top, 0.0, where=np.isneginf(top))  # a query that reads no key here
        scores -= top
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1)
        before, new = sums[at.queries], np.log(total) + top[..., 0]
        both = np.logaddexp(before, new)
        finite = np.where(np.isneginf(both), 0.0, both).astype(both.dtype)
        if dropout.chance:
            scores *= at.mask(dropout, heads)
            total *= 1.0 - dropout.chance
        result = product(scores, v)
        result *= (np.exp(new - finite) / np.where(total == 0.0, 1.0, total).astype(total.dtype))[..., None]
        target = results[at.queries]
        target *= np.exp(before - finite)[..., None]
        target += result
        sums[at.queries] = both


def attention_delta(grad: Array, out: Array, heads: Heads, delta: Array) -> None:
    g, y = (heads_first(raised(by_group(a, heads))) for a in (grad, out))
    np.einsum("...d,...d->...", g, y, out=_by_group(delta, heads))


def attention_block_backward(
    grad: Array,
    q: Array,
    kv: Array,
    heads: Heads,
    met: Met,
    dropout: Dropout,
    lse: Array,
    delta: Array,
    dq: Array,
    dkv: Array,
) -> None:
    """As `flash_attention_backward`, for the keys of a block."""
    sums, deltas, into = _by_group(lse, heads), _by_group(delta, heads), heads_first(by_group(dq, heads))
    pairs, factor = keys_and_values(dkv, heads, heads.cuts(q.shape[-1], q_alone=True)[1]), _factor(q, heads)
    for at in _parts(q, kv, heads, met):
        queries, k, v = at.operands(q, kv, heads)
        g = at.of(grad, heads)
        p = at.scores(queries * factor, k, heads, dq.dtype)
        p -= sums[at.queries][..., None]
        np.exp(p, out=p)
        after = p
        if dropout.chance:
            g = g / (1.0 - dropout.chance)
        ds = product(g, v.swapaxes(-1, -2))
        if dropout.chance:
            kept = at.mask(dropout, heads)
            ds *= kept
            after = p * kept
        ds -= deltas[at.queries][..., None]
        ds *= p
        if heads.form.cap:
            slope = np.tanh(product(queries * factor, k.swapaxes(-1, -2)) / heads.form.cap)
            ds *= 1.0 - slope * slope
        ds *= factor
        into[at.queries] += product(ds, k)
        for total, left, right in ((pairs[0], ds, queries), (pairs[1], after, g)):
            part = product(left.swapaxes(-1, -2), right).sum(axis=2)
            total[at.batch, at.tile.keys, at.group] += part.swapaxes(1, 2)


class _Part(NamedTuple):
    """Queries and keys that go together, of some sequences and key-value heads."""

    batch: slice
    group: slice
    tile: Tile
    tokens: int

    @property
    def queries(self) -> tuple[slice, slice, slice, slice]:
        """The place in (B, K, H/K, T, ...)."""
        return self.batch, self.group, slice(None), self.tile.rows

    def of(self, a: Array, heads: Heads) -> Array:
        """Return the queries' rows of (B, T, H d), (B, K, H/K, rows, d)."""
        return heads_first(raised(by_group(a, heads)[self.batch, self.tile.rows, self.group]))

    def operands(self, q: Array, kv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        """Return q (B, K, H/K, rows, d), and k and v (B, K, 1, U, d)."""
        pairs = keys_and_values(kv, heads, heads.cuts(q.shape[-1], q_alone=True)[1])
        k, v = (heads_first(raised(x[self.batch, self.tile.keys, self.group])[:, :, :, None]) for x in pairs)
        return self.of(q, heads), k, v

    def scores(self, q: Array, k: Array, heads: Heads, compute: np.dtype[Any]) -> Array:
        """Return the scores of queries that are scaled already: -inf where a query does not read a key."""
        form, scores = heads.form, product(q, k.swapaxes(-1, -2))
        if form.cap:
            scores /= form.cap
            np.tanh(scores, out=scores)
            scores *= form.cap
        ahead = np.arange(k.shape[-2]) - np.arange(q.shape[-2])[:, None] + (self.tile.key - self.tile.query)
        if (slopes := slopes_of(heads, compute)) is not None:
            scores += slopes[self.group] * ahead.astype(compute)
        if window := form.reach(self.tokens):
            np.copyto(scores, -np.inf, where=ahead <= -window)
        if form.causal:
            np.copyto(scores, -np.inf, where=ahead > 0)
        return scores

    def mask(self, dropout: Dropout, heads: Heads) -> Array:
        """Return this part of `dropout_mask` over (B, H, tokens, tokens), 1 where a probability is kept."""
        sequences, shared, rows, keys = (
            range(part.start, part.stop) for part in (self.batch, self.group, self.tile.rows, self.tile.keys)
        )
        sizes = len(sequences), len(shared), heads.sharing, len(rows)
        kept = np.empty((*sizes, len(keys)), np.uint8)
        for at in np.ndindex(*sizes):
            head = heads.number(sequences[at[0]], shared[at[1]] * heads.sharing + at[2])
            first = (head * self.tokens + self.tile.query + at[3]) * self.tokens + self.tile.key
            mask_run(dropout.key, dropout.chance, first, kept[at])
        return kept


def _parts(q: Array, kv: Array, heads: Heads, met: Met) -> Iterator[_Part]:
    """Yield the parts of a block, in an order that the shapes decide."""
    for batch, group in groups(len(q), heads, kv.shape[1]):
        batch, group = slice(batch.start, min(batch.stop, len(q))), slice(group.start, min(group.stop, heads.keys))
        for tile in met.tiles(heads.form, QUERIES):
            yield _Part(batch, group, tile, met.tokens)


def _factor(q: Array, heads: Heads) -> float:
    return heads.form.factor(q.shape[-1] // heads.queries)


def _by_group(a: Array, heads: Heads) -> Array:
    """View (B, H, T) as (B, K, H/K, T)."""
    return a.reshape(len(a), heads.keys, -1, a.shape[-1])
