"""8-bit states: blocks of numbers as codes of one byte, and the largest magnitude of each block.

A block is divided by its largest magnitude (absmax), and each quotient becomes the number of the nearest entry of a
table of 256, the dynamic map: its spacing grows with the magnitude, like that of floats. Seven decades, 1e-6 to 1; each
has twice as many entries as the one below it. The functions are pure: they change no array.

Sources: Dettmers and others, 2110.02861, section 2; bitsandbytes 0.50, functional.py, create_dynamic_map,
whose tables these are, to the bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from zerosim.backends.kernels import QUANT_BLOCK, Array
from zerosim.backends.numpy.cast import FLOAT32, FLOAT64

DECADES = 7


@cache
def dynamic_map(signed: bool) -> Array:
    """Return the table: 256 fp32 numbers in rising order, from -1 or 0 to 1; read only.

    Decade e from the smallest, e = 0..6, is 10^(e-6) times the means of neighbours among 2^e + 1 points that cut
    [0.1, 1] evenly, and their negatives; unsigned there are 2^(e+1) + 1 points. Beside them stand 0 and 1.
    """
    low, one = np.float32(0.1), np.float32(1)
    entries = [np.array([0, 1], FLOAT32)]
    for decade in range(DECADES):
        cuts = 2 ** (decade if signed else decade + 1)
        step, point = float((one - low) / np.float32(cuts)), np.arange(cuts + 1)
        # As torch.linspace does: counted from the nearer end, each rounded once.
        points = np.where(2 * point < cuts, float(low) + step * point, 1 - step * (cuts - point)).astype(FLOAT32)
        means = np.float32(10.0 ** (decade - DECADES + 1)) * ((points[:-1] + points[1:]) / np.float32(2))
        entries += [means, -means] if signed else [means]
    table = np.sort(np.concatenate(entries))
    table.flags.writeable = False
    return table


def nearest(values: Array, table: Array) -> Array:
    """Return the code of the entry nearest to each value, uint8; halfway between two, the lower one."""
    wide = table.astype(FLOAT64)  # where the middle of two fp32 numbers is exact
    return np.searchsorted((wide[:-1] + wide[1:]) / 2, values).astype(np.uint8)


def quantize(values: Array, table: Array, block: int = QUANT_BLOCK) -> tuple[Array, Array]:
    """Return codes (n) and absmax (ceil(n / block)), fp32, of finite values (n), n >= 1. A block of zeros has absmax
    0."""
    absmax = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, block)).astype(FLOAT32)
    divisors = np.where(absmax == 0, np.float32(1), absmax)
    return nearest(values / _each(divisors, block, values.size), table), absmax


def dequantize(codes: Array, absmax: Array, table: Array, block: int = QUANT_BLOCK) -> Array:
    """Return the values (n), fp32, of codes: an entry of the table times its block's absmax."""
    return table[codes] * _each(absmax, block, codes.size)


def _each(numbers: Array, block: int, size: int) -> Array:
    """A number for each element, from one for each block."""
    return np.repeat(numbers, block)[:size]
