"""Exercise 26: codes are searched for among the middles between neighbouring entries."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_quantiser(values: Array, table: Array) -> tuple[Array, float]:
    scale = float(np.abs(values).max())
    unit = values / (scale or 1.0)
    middles = (table[:-1] + table[1:]) / 2
    return np.searchsorted(middles, unit).astype(np.uint8), scale
