"""Causal self-attention in NumPy that stores no probabilities: FlashAttention's promise, not its tiling.

Forward saves the result and the log-sum-exp of each query's scores
(Dao 2307.08691, section 3.1). Backward recomputes the probabilities, p = exp(score - lse), and with
dropout the mask from its key. A block of queries meets all its keys at once, in scratch memory of the
cache's size. A GPU kernel would iterate over keys in tiles.

Layouts are those of `attention.py`. B batch, T tokens, H heads, K key-value heads, d width of a head.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.kernels import Array, Dropout, Heads
from zerosim.backends.numpy.attention import (
    Totals,
    by_group,
    groups,
    heads_first,
    larger,
    sinks_of,
    split_qkv,
    with_sinks,
)
from zerosim.backends.numpy.cast import raised, result_for, round_into, wide
from zerosim.backends.numpy.fused import mask_run
from zerosim.backends.numpy.products import product
from zerosim.backends.numpy.scores import BlockScores, blocks


def flash_attention(
    qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, sinks: Array | None = None
) -> None:
    compute, tokens, sinks = wide(qkv), qkv.shape[1], sinks_of(heads, sinks)
    ones, scores_of = np.ones(tokens, compute), BlockScores(heads, tokens, compute)
    sums = lse.reshape(len(lse), heads.keys, -1, tokens)
    for batch, group in groups(len(qkv), heads, tokens):
        q, k, v = split_qkv(qkv, heads, batch, group)
        q = q * heads.form.factor(q.shape[-1])
        target = by_group(out, heads)[batch, :, group]
        result = result_for(target, compute)
        y = heads_first(result)
        for rows in blocks(tokens):
            keys = scores_of.keys(rows)
            scores = scores_of.of(q, k, rows, group)
            top = larger(scores.max(axis=-1, keepdims=True), sinks, group)
            scores -= top
            np.exp(scores, out=scores)
            total = with_sinks(product(scores, ones[keys]), top[..., 0], sinks, group)
            sums[batch, group, :, rows] = np.log(total) + top[..., 0]
            scores /= total[..., None]
            if dropout.chance:
                scores *= _mask(dropout, heads, tokens, len(qkv), batch, group, rows)[..., keys]
            product(scores, v[..., keys, :], out=y[..., rows, :])
        if dropout.chance:
            result /= 1.0 - dropout.chance
        round_into(result, target)


def flash_attention_backward(
    grad: Array, qkv: Array, heads: Heads, dropout: Dropout, out: Array, lse: Array, delta: Array, dqkv: Array
) -> None:
    """As `attention_backward`, with sum(dp * p) per query as sum(grad * out): `delta`, before blocks begin."""
    compute, tokens = wide(grad, qkv), qkv.shape[1]
    scores_of = BlockScores(heads, tokens, compute)
    sums, deltas = (a.reshape(len(a), heads.keys, -1, tokens) for a in (lse, delta))
    for batch, group in groups(len(qkv), heads, tokens):
        q, k, v = split_qkv(qkv, heads, batch, group)
        scaled = q * heads.form.factor(q.shape[-1])
        g, y = (heads_first(raised(by_group(a, heads)[batch, :, group])) for a in (grad, out))
        np.einsum("...d,...d->...", g, y, out=deltas[batch, group])
        if dropout.chance:
            g = g / (1.0 - dropout.chance)
        totals = Totals(dqkv, heads, batch, group, compute)
        for rows in reversed(blocks(tokens)):
            keys = scores_of.keys(rows)
            p = scores_of.of(scaled, k, rows, group)
            p -= sums[batch, group, :, rows, None]
            np.exp(p, out=p)
            ds = product(g[..., rows, :], v[..., keys, :].swapaxes(-1, -2))
            dropped = p
            if dropout.chance:
                kept = _mask(dropout, heads, tokens, len(qkv), batch, group, rows)[..., keys]
                ds *= kept
                dropped = p * kept
            ds -= deltas[batch, group, :, rows, None]
            ds *= p
            if heads.form.cap:
                ds *= scores_of.cap_slope(scaled, k, rows)
            totals.add(rows, keys, ds, dropped, q, k, g)
        totals.round_into()


def _mask(dropout: Dropout, heads: Heads, tokens: int, batches: int, batch: slice, group: slice, rows: slice) -> Array:
    """The part of `dropout_mask` over (B, H, T, T) for some sequences, heads and queries.

    Shape (B, K, H/K, rows, T), 1 where a probability is kept. Rows of one head lie one after the
    other in the stream, so each head's block is one draw, from the counter where it begins.
    """
    sequences, shared = range(batches)[batch], range(heads.keys)[group]
    kept = np.empty((len(sequences), len(shared), heads.sharing, rows.stop - rows.start, tokens), np.uint8)
    for b, sequence in enumerate(sequences):
        for h, head in enumerate(shared):
            for i in range(heads.sharing):
                first = (heads.number(sequence, head * heads.sharing + i) * tokens + rows.start) * tokens
                mask_run(dropout.key, dropout.chance, first, kept[b, h, i].reshape(-1))
    return kept
