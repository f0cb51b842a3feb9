"""Codes of 8 bits: e4m3 and e5m2 for numbers (OCP OFP8, arXiv 2209.05433), e8m0 for scales (OCP MX 1.0).

    kind  sign, exponent, digits  largest  after the largest
    e4m3       1, 4, 3                448  one nan, no infinity
    e5m2       1, 5, 2             57,344  infinity, three nans
    e8m0       0, 8, 0              2^127  one nan, no zero

Every rule takes `xp`, NumPy's or CuPy's functions, and works on the bits of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array

NAN = 0x7F
"""The code of nan in both kinds. e4m3 has no other. Of e5m2's three, PyTorch writes this one."""
INFINITY32 = 0x7F800000
DIGITS32 = 23


class Kind(NamedTuple):
    """A format of numbers in 8 bits.

    digits    bits after the binary point
    bias      what is added to the exponent
    largest   the largest number, and `top`, its code
    overflow  the code of larger numbers, if they do not saturate: nan or infinity
    """

    name: str
    digits: int
    bias: int
    largest: float
    top: int
    overflow: int

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its digits."""
        return 2.0 ** (1 - self.bias)

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest number: 8 or 15."""
        return (self.top >> self.digits) - self.bias

    def value(self, code: int) -> float:
        """Return the number that a code stands for."""
        exponent, fraction = (code & 0x7F) >> self.digits, code & (1 << self.digits) - 1
        if code & 0x7F > self.top:
            size = float("inf") if code & 0x7F == self.overflow != NAN else float("nan")
        else:
            whole = fraction + (exponent > 0) * (1 << self.digits)
            size = whole * 2.0 ** (max(exponent, 1) - self.bias - self.digits)
        return -size if code & 0x80 else size


E4M3 = Kind("e4m3", 3, 7, 448.0, 0x7E, NAN)
E5M2 = Kind("e5m2", 2, 15, 57344.0, 0x7B, 0x7C)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in (E4M3, E5M2)})


@np.errstate(all="ignore")
def codes_of(xp: Any, kind: Kind, values: Array, saturate: bool) -> Array:
    """Return the codes of float32 values, rounded to nearest, half to even. nan keeps its sign."""
    bits = values.view(xp.uint32)
    size = bits & 0x7FFFFFFF
    lost = DIGITS32 - kind.digits
    # Normal: add half of the last place, less a bit if the code is even, and cut. A carry goes into the exponent.
    normal = (size + ((size >> lost) & 1) + ((1 << (lost - 1)) - 1)) >> lost
    normal -= xp.uint32((127 - kind.bias) << kind.digits)
    # Subnormal: add a power of two whose last place is the smallest code. The adder rounds.
    anchor = xp.full((1, 1), 2.0 ** (1 - kind.bias + lost), xp.float32)
    small = (size.view(xp.float32) + anchor).view(xp.uint32) - anchor.view(xp.uint32)
    codes = xp.where(size.view(xp.float32) < kind.smallest_normal, small, normal)
    codes = xp.where(codes > kind.top, xp.uint32(kind.top if saturate else kind.overflow), codes)
    codes = xp.where(size > INFINITY32, xp.uint32(NAN), codes)
    return (codes | (bits >> 24) & 0x80).astype(xp.uint8)


@cache
def _table(xp: Any, kind: Kind) -> Array:
    return xp.asarray([kind.value(code) for code in range(256)], xp.float32)


def values_of(xp: Any, kind: Kind, codes: Array) -> Array:
    """Return the float32 values of codes."""
    return _table(xp, kind)[codes]


def powers_of(xp: Any, scales: Array) -> Array:
    """Return 2^(byte - 127) of e8m0 bytes in float32, where 255 is nan."""
    bits = scales.astype(xp.uint32) << DIGITS32
    bits = xp.where(scales == 0, xp.uint32(1 << 22), bits)  # 2^-127 is subnormal
    return xp.where(scales == 255, xp.uint32(INFINITY32 | 1 << 22), bits).view(xp.float32)


def cut_to_power(xp: Any, values: Array) -> Array:
    """Return positive float32 values rounded down to a power of two: their digits are cleared."""
    return (values.view(xp.uint32) & 0xFF800000).view(xp.float32)


@np.errstate(all="ignore")
def log2_of(xp: Any, values: Array) -> Array:
    """Return log2 in float32, which rounds values just below or above a power of two to its whole exponent."""
    return xp.log2(values.astype(xp.float64)).astype(xp.float32)


def bytes_of(xp: Any, kind: Kind, amax: Array, rounding: str) -> Array:
    """Return e8m0 bytes of the scales for float32 amax values, by torchao's `floor`, `ceil` or `even`.

    The scale is the power of two below amax (above it: ceil; the nearest, if the elements' digits are kept: even),
    over the power of two below the largest number.
    """
    bits = amax.view(xp.uint32).astype(xp.int64)
    rounded = bits + (1 << (DIGITS32 - kind.digits - 1)) if rounding == "even" else bits
    exponents = rounded >> DIGITS32
    if rounding == "ceil":
        exponents = exponents + (bits & (1 << DIGITS32) - 1 > 0)
    found = xp.clip(exponents - kind.largest_exponent, 0, 255)
    return xp.where(bits > INFINITY32, 255, found).astype(xp.uint8)


def bytes_above(xp: Any, quotients: Array, exact: bool) -> Array:
    """Return e8m0 bytes of float32 amax over largest, rounded up to a power of two (`rceil`).

    exact: by the bits, as a GPU's conversion instruction does. Else by log2 in float32, as torchao does in eager mode.
    """
    if exact:
        bits = quotients.view(xp.uint32).astype(xp.int64)
        exponents, fraction = bits >> DIGITS32, bits & (1 << DIGITS32) - 1
        above = (fraction > 0) & ((exponents > 0) | (fraction > 1 << 22))
        found = xp.where(bits > INFINITY32, 255, xp.clip(exponents + above, 0, 254))
    else:
        powers = xp.clip(xp.ceil(log2_of(xp, quotients)), -127, 127) + 127
        found = xp.where(xp.isnan(quotients), 255, xp.where(xp.isinf(quotients), 254, powers))
    return found.astype(xp.uint8)
