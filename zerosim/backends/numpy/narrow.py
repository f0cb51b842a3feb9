"""Narrow number formats on the host: casts of float32 values to 16 or 8 bits.

e4m3 and e5m2 are those of the Open Compute Project's 8-bit formats (OCP OFP8, arXiv 2209.05433): e4m3 has no infinity
and reaches 448, e5m2 is fp16 with two digits. ml_dtypes has both, and turns what is too large into e4m3's only
non-number. A cast that saturates would clip it, which is no less wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import BFLOAT16, FLOAT16, FLOAT32, store

_TYPES = {
    "fp16": FLOAT16,
    "bf16": BFLOAT16,
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


class Limits(NamedTuple):
    """A format's smallest positive number, the smallest with all its digits, and the largest."""

    smallest: float
    min_normal: float
    largest: float


def _limits(kind: np.dtype[np.generic]) -> Limits:
    known = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    return Limits(float(known.smallest_subnormal), float(known.smallest_normal), float(known.max))


NARROW: Mapping[str, Limits] = MappingProxyType({name: _limits(kind) for name, kind in _TYPES.items()})
"""The formats by name, and what they can hold."""


class Fates(NamedTuple):
    """Counts of values that a format holds with all digits, with fewer, as 0, and that overflow."""

    full: int
    fewer_digits: int
    to_zero: int
    overflowed: int


def cast(values: Array, name: str) -> Array:
    """Round float32 values to the format, and return them in float32."""
    narrow = np.empty(values.shape, _TYPES[name])
    with np.errstate(over="ignore", invalid="ignore"):
        store(values, narrow)
        return narrow.astype(FLOAT32)


def fates(values: Array, name: str) -> Fates:
    """Count the fates of float32 values in a cast. None may be 0. Counted on the result of the cast."""
    held = np.abs(cast(values, name))
    to_zero = int(np.count_nonzero(held == 0))
    overflowed = held.size - int(np.count_nonzero(np.isfinite(held)))
    below = int(np.count_nonzero(held < NARROW[name].min_normal))
    return Fates(held.size - below - overflowed, below - to_zero, to_zero, overflowed)


def exponents(values: Array) -> dict[int, int]:
    """Count the float32 values in each [2^e, 2^(e+1)), by e. None may be 0."""
    found, counts = np.unique(np.frexp(values)[1] - 1, return_counts=True)
    return {int(exponent): int(count) for exponent, count in zip(found, counts, strict=True)}
