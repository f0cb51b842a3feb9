"""Exercise 39: through the division, into the chosen columns, through the softmax."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_router(
    logits: Array,
    ids: Array,
    grad: Array,
    normed: bool,
) -> Array:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = p / p.sum(axis=1, keepdims=True)
    if normed:
        chosen = np.take_along_axis(p, ids, 1)
        total = chosen.sum(axis=1, keepdims=True)
        grad = (grad - (grad * chosen).sum(axis=1, keepdims=True) / total) / total
    dp = np.zeros_like(p)
    np.put_along_axis(dp, ids, grad, 1)
    return p * (dp - (dp * p).sum(axis=1, keepdims=True))
