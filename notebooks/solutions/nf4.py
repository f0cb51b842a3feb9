"""Exercise 30: codes are searched for among the middles of the table, and packed two a byte."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_nf4(values: Array, table: Array) -> tuple[Array, float]:
    absmax = float(np.abs(values).max())
    unit = values / (absmax or 1.0)
    codes = np.searchsorted((table[:-1] + table[1:]) / 2, unit).astype(np.uint8)
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    return codes[::2] << 4 | codes[1::2], absmax
