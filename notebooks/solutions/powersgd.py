"""Exercise 32: two thin products, each averaged, in place of a matrix."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_powersgd(m: list[Array], q: Array) -> tuple[Array, Array]:
    p = np.mean([one @ q for one in m], axis=0)
    p, _ = np.linalg.qr(p)
    q = np.mean([one.T @ p for one in m], axis=0)
    return p @ q.T, q
