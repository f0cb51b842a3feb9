"""Exercise 31: the largest of gradient and residual are sent, the rest stays."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_top_k(
    grad: Array,
    residual: Array,
    k: int,
) -> tuple[Array, Array, Array]:
    total = grad + residual
    places = np.argsort(-np.abs(total), kind="stable")[:k]
    values = total[places]
    total[places] = 0
    return places, values, total
