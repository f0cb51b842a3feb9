"""Exercise 36: each block's result counts by its share of the sum of exp(score)."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_merge(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
) -> tuple[Array, Array]:
    lse = np.logaddexp(lse_a, lse_b)
    weight_a, weight_b = np.exp(lse_a - lse), np.exp(lse_b - lse)
    return weight_a[:, None] * out_a + weight_b[:, None] * out_b, lse
