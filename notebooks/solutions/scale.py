"""Exercise 46: the largest magnitude of each block becomes 448."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_scale(values: Array, block: tuple[int, int]) -> Array:
    (rows, columns), (high, wide) = values.shape, block
    blocks = np.abs(values).reshape(rows // high, high, columns // wide, wide)
    amax = blocks.max(axis=(1, 3))
    return np.where(amax > 0, amax / 448, 1).astype(np.float32)
