"""Attention in NumPy with its probabilities stored, forward and backward, over a packed q|k|v array, or over q and the
k|v of another sequence.

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

from zerosim.backends.kernels import ALONE, Array, Beside, Heads, Probs
from zerosim.backends.numpy.cast import raised, result_for, round_into, store, wide
from zerosim.backends.numpy.products import product
from zerosim.backends.numpy.scores import QUERIES, BlockScores, blocks

SCORES = 128 * 1024
"""Scores held at a time, about: as many sequences and heads go together."""


def attention(qkv: Array, heads: Heads, kept: Probs, out: Array, beside: Beside = ALONE) -> None:
    compute, (tokens, read) = wide(qkv), kept.probs.shape[2:]
    ones, scores_of = np.ones(read, compute), BlockScores(heads, read, compute, beside.bias)
    sinks = sinks_of(heads, beside.sinks)
    for batch, group in groups(len(qkv), heads, read):
        q, k, v = split_qkv(qkv, heads, batch, group, beside.kv)
        q = q * heads.form.factor(q.shape[-1])  # here the scale costs d products a query; on the scores it would cost T
        target = by_group(out, heads)[batch, :, group]
        result = result_for(target, compute)
        y = heads_first(result)
        stored = _scores(kept.probs, heads, batch, group)
        mask, left = (None if a is None else _scores(a, heads, batch, group) for a in (kept.mask, kept.dropped))
        for rows in blocks(tokens):
            keys = scores_of.keys(rows)
            scores = scores_of.of(q, k, rows, group)
            top = larger(scores.max(axis=-1, keepdims=True), sinks, group)
            scores -= top
            np.exp(scores, out=scores)
            scores /= with_sinks(product(scores, ones[keys]), top[..., 0], sinks, group)[..., None]
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


def attention_backward(
    grad: Array,
    qkv: Array,
    heads: Heads,
    kept: Probs,
    workspace: Array,
    dqkv: Array,
    beside: Beside = ALONE,
    dbeside: Beside = ALONE,
) -> None:
    """With p the probabilities, dp = (grad @ v^T) * mask / keep and ds = p * (dp - sum(dp * p)) per query:
    dq = ds @ k * scale, dk = ds^T @ q * scale, dv = (p * mask / keep)^T @ grad; dk and dv are summed
    over the query heads that share them. A cap multiplies ds by its derivative, and computes the scores again for it.
    A bias's gradient is ds summed over the sequences.
    `workspace` is left alone: blocks need no room for all scores.
    """
    compute, (tokens, read) = wide(grad, qkv), kept.probs.shape[2:]
    scores_of, dbias = BlockScores(heads, read, compute), None
    if dbeside.bias is not None:
        dbias = np.zeros((heads.keys, heads.sharing, tokens, read), compute)
    dsinks = None if dbeside.sinks is None else np.zeros((heads.keys, heads.sharing), compute)
    for batch, group in groups(len(qkv), heads, read):
        q, k, v = split_qkv(qkv, heads, batch, group, beside.kv)
        scaled = q * heads.form.factor(q.shape[-1]) if heads.form.cap else q
        g = heads_first(raised(by_group(grad, heads)[batch, :, group]))
        if kept.mask is not None:
            g = g / kept.keep
        stored = _scores(kept.probs, heads, batch, group)
        mask, left = (None if a is None else _scores(a, heads, batch, group) for a in (kept.mask, kept.dropped))
        totals = Totals(dqkv, heads, batch, group, compute, dbeside.kv)
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
            if dbias is not None:
                dbias[group][..., rows, keys] += ds.sum(axis=0)
            if dsinks is not None:  # a row of ds adds up to the sink's probability times sum(dp * p)
                dsinks[group] -= ds.sum(axis=(0, 3, 4))
            if heads.form.cap:
                ds *= scores_of.cap_slope(scaled, k, rows)
            totals.add(rows, keys, ds, after, q, k, g)
        totals.round_into()
    if dbias is not None and dbeside.bias is not None:
        round_into(dbias.reshape(dbeside.bias.shape), dbeside.bias)
    if dsinks is not None and dbeside.sinks is not None:
        round_into(dsinks.reshape(-1), dbeside.sinks)


def sinks_of(heads: Heads, sinks: Array | None) -> Array | None:
    """(H) as (K, H/K, 1), in the compute type."""
    return None if sinks is None else raised(sinks).reshape(heads.keys, heads.sharing, 1)


def larger(top: Array, sinks: Array | None, group: slice) -> Array:
    """The largest score of each query (B, K, H/K, rows, 1), its head's sink among them."""
    return top if sinks is None else np.maximum(top, sinks[group][..., None])


def with_sinks(total: Array, top: Array, sinks: Array | None, group: slice) -> Array:
    """The sum of the exponentials of scores - top, (B, K, H/K, rows), with the sink's."""
    return total if sinks is None else total + np.exp(sinks[group] - top)


def add_sinks(out: Array, lse: Array, sinks: Array) -> None:
    both = np.logaddexp(lse, raised(sinks)[:, None])
    by_head = out.reshape(*out.shape[:2], lse.shape[1], -1)
    by_head *= np.exp(lse - both).swapaxes(1, 2)[..., None]
    lse[...] = both


def sinks_backward(lse: Array, delta: Array, sinks: Array, dsinks: Array) -> None:
    round_into(-(np.exp(raised(sinks)[:, None] - lse) * delta).sum(axis=(0, 2)), dsinks)


class Totals:
    """dq, dk and dv of one group of heads in the compute type, until `round_into` rounds them once into dqkv."""

    def __init__(
        self,
        dqkv: Array,
        heads: Heads,
        batch: slice,
        group: slice,
        compute: np.dtype[Any],
        dkv: Array | None = None,
    ) -> None:
        self.targets = tuple(part[batch, :, group] for part in _parts(dqkv, heads, dkv))
        self.results = tuple(result_for(target, compute) for target in self.targets)
        self.dq = heads_first(self.results[0])
        self.dk, self.dv = (result.swapaxes(1, 2) for result in self.results[1:])  # (B, K, T, d)
        self.tokens = dqkv.shape[1]
        self.scale = heads.form.factor(self.dq.shape[-1])
        self.is_set = heads.form.reach(self.tokens) > 0  # with a window no block has every key
        for result in self.results[1:] if self.is_set else ():
            result[...] = 0

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


def split_qkv(
    qkv: Array, heads: Heads, batch: slice, group: slice, kv: Array | None = None
) -> tuple[Array, Array, Array]:
    """q (B, K, H/K, T, d), k and v (B, K, 1, T, d) of some sequences and heads, in the compute type."""
    queries, *pairs = _parts(qkv, heads, kv)
    k, v = (heads_first(raised(x[batch, :, group])[:, :, :, None]) for x in pairs)
    return heads_first(raised(queries[batch, :, group])), k, v


def _parts(qkv: Array, heads: Heads, kv: Array | None = None) -> tuple[Array, Array, Array]:
    """(B, T, (H + 2K) d) as queries (B, T, K, H/K, d), keys and values (B, T, K, d), views; or q and the `kv` of S
    tokens."""
    first, keys = heads.cuts(qkv.shape[2], q_alone=kv is not None)
    queries, pairs = (qkv[..., :first], qkv[..., first:]) if kv is None else (qkv, kv)
    return by_group(queries, heads), *keys_and_values(pairs, heads, keys)


def keys_and_values(pairs: Array, heads: Heads, keys: int) -> tuple[Array, Array]:
    """k|v, of which the first `keys` columns are k, as two views (B, T, K, d)."""
    k, v = (x.reshape(*x.shape[:2], heads.keys, -1) for x in (pairs[..., :keys], pairs[..., keys:]))
    return k, v


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
