"""Exercise 27: what is cut off is the chance, in 65,536ths, to go up."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_rounding(values: Array, drawn: Array) -> Array:
    bits = values.view(np.uint32)
    up = drawn < (bits & 0xFFFF)
    return ((bits & 0xFFFF0000) + (up.astype(np.uint32) << 16)).view(np.float32)
