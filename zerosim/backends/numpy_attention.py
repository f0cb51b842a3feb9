"""Causal self-attention in NumPy, forward and backward, over the heads of a packed q|k|v array.

Works on blocks of queries, for which only the keys up to the block's end exist: the future half of
the scores is never computed, beyond the corners of the diagonal blocks. Scores live in float32
(float64) scratch of the cache's size; what is stored is `probs` and the results.

B batch, T tokens, D model, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy_cast import land, landing, raised, store, wide

QUERIES = 64
"""Queries in a block: fewer leave out more of the future half, more keep the matrices thick."""

SCORES = 128 * 1024
"""Scores held at a time, about: as many sequences and heads go together."""


def attention(qkv: Array, num_heads: int, mask: Array | None, keep: float, out: Array, probs: Array) -> None:
    compute, tokens = wide(qkv), qkv.shape[1]
    ones = np.ones(tokens, compute)
    future = np.triu(np.ones((QUERIES, QUERIES), bool), 1)
    for batch, heads in _groups(len(qkv), num_heads, tokens):
        q, k, v = _heads(raised(_split(qkv, 3, num_heads)[batch, :, :, heads]))
        q = q * q.shape[-1] ** -0.5  # here the scale costs d products a query; on the scores it would cost T
        target = _split(out, 1, num_heads)[batch, :, :, heads]
        result = landing(target, compute)
        (y,) = _heads(result)
        for rows in _blocks(tokens):
            scores = np.matmul(q[:, :, rows], k[:, :, : rows.stop].swapaxes(-1, -2))
            diagonal = scores[..., rows]
            np.copyto(diagonal, -np.inf, where=future[: diagonal.shape[-2], : diagonal.shape[-1]])
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= (scores @ ones[: rows.stop])[..., None]
            store(scores, probs[batch, heads, rows, : rows.stop])
            probs[batch, heads, rows, rows.stop :] = 0
            if mask is not None:
                scores *= mask[batch, heads, rows, : rows.stop]
            np.matmul(scores, v[:, :, : rows.stop], out=y[:, :, rows])
        if mask is not None:
            result /= keep
        land(result, target)


def attention_backward(
    grad: Array,
    qkv: Array,
    num_heads: int,
    probs: Array,
    mask: Array | None,
    keep: float,
    workspace: Array,
    dqkv: Array,
) -> None:
    """With p the probabilities, dp = (grad @ v^T) * mask / keep and ds = p * (dp - sum(dp * p)) per query:
    dq = ds @ k * scale, dk = ds^T @ q * scale, dv = (p * mask / keep)^T @ grad.

    `workspace` stands for what an unblocked kernel would hold in device memory; it is left alone.
    """
    compute, tokens = wide(grad, qkv), qkv.shape[1]
    for batch, heads in _groups(len(qkv), num_heads, tokens):
        q, k, v = _heads(raised(_split(qkv, 3, num_heads)[batch, :, :, heads]))
        (g,) = _heads(raised(_split(grad, 1, num_heads)[batch, :, :, heads]))
        if mask is not None:
            g = g / keep
        target = _split(dqkv, 3, num_heads)[batch, :, :, heads]
        result = landing(target, compute)
        dq, dk, dv = _heads(result)
        for rows in reversed(_blocks(tokens)):  # the last block has every key: it sets dk and dv, the others add
            past = slice(0, rows.stop)
            p = raised(probs[batch, heads, rows, past])
            ds = np.matmul(g[:, :, rows], v[:, :, past].swapaxes(-1, -2))
            dropped = p
            if mask is not None:
                kept = mask[batch, heads, rows, past]
                ds *= kept
                dropped = p * kept
            ds -= np.einsum("bhqk,bhqk->bhq", ds, p)[..., None]
            ds *= p
            np.matmul(ds, k[:, :, past], out=dq[:, :, rows])
            for total, left, right in ((dk, ds, q), (dv, dropped, g)):
                part = np.matmul(left.swapaxes(-1, -2), right[:, :, rows])
                if rows.stop == tokens:
                    total[...] = part
                else:
                    total[:, :, past] += part
        scale = q.shape[-1] ** -0.5
        dq *= scale
        dk *= scale
        land(result, target)


def _split(packed: Array, parts: int, num_heads: int) -> Array:
    """(B, T, parts * D) as (B, T, parts, H, d), a view."""
    return packed.reshape(*packed.shape[:2], parts, num_heads, -1)


def _heads(split: Array) -> list[Array]:
    """(B, T, parts, H, d) as `parts` views (B, H, T, d), whose matrices BLAS reads and writes in place."""
    return [split[:, :, part].transpose(0, 2, 1, 3) for part in range(split.shape[2])]


def _blocks(tokens: int) -> list[slice]:
    return [slice(start, min(start + QUERIES, tokens)) for start in range(0, tokens, QUERIES)]


def _groups(batches: int, num_heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of the heads whose scores for one block of queries number about SCORES."""
    scores = min(tokens, QUERIES) * tokens
    heads = min(num_heads, max(1, SCORES // scores))
    rows = max(1, SCORES // (scores * num_heads))
    for row in range(0, batches, rows):
        for head in range(0, num_heads, heads):
            yield slice(row, row + rows), slice(head, head + heads)
