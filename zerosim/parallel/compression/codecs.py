"""Codecs: what of a gradient is sent, as buffers whose bytes are counted, and what is lost.

    Blocks   every element in 8 or 4 bits, with the largest magnitude of each quantization block
    TopK     the elements of largest magnitude, and where they were
    RandomK  elements that every rank draws alike: their values alone
    Signs    one bit an element, and one scale

A codec uses NumPy's names, which are CuPy's too: `xp` is one or the other. Rows (P, n) are sent to P ranks, one row
each; all values are in the gradients' own format. Sources: arXiv 1704.05021 and 1712.01887 (top-k), 1802.06058 (signs
and their scale, as in DeepSpeed's 1-bit Adam), 2306.10209 (blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from zerosim.backends.kernels import Array
from zerosim.dtypes import DType, int32
from zerosim.placement.formats import Format, blocks


class Codec(Protocol):
    """One way to send n numbers."""

    @property
    def has_residual(self) -> bool:
        """Whether `encode` leaves unsent values in place, to be added to the next gradient."""
        ...

    def buffers(self, numel: int, dtype: DType) -> list[tuple[int, DType]]:
        """Return the elements and the format of each buffer that encodes numel numbers."""
        ...

    def encode(self, xp: Any, values: Array, *sent: Array) -> None:
        """Fill `sent`, each (P, its elements), with the code of values (P, n)."""
        ...

    def add(self, xp: Any, total: Array, *arrived: Array) -> None:
        """Add the numbers that one rank's codes stand for to total (n)."""
        ...


def added(xp: Any, codec: Codec, total: Array, *arrived: Array) -> Array:
    """Add up codes received from N ranks, each (N, its elements), in rank order: `total`, which begins as zeros."""
    for one in zip(*arrived, strict=True):
        codec.add(xp, total, *one)
    return total


def mean_of(codec: Codec) -> Callable[..., None]:
    """Return the rule that sets out (n) to the mean over N ranks of what codes from them stand for."""

    def rule(xp: Any, out: Array, *arrived: Array) -> None:
        out[...] = added(xp, codec, xp.zeros_like(out), *arrived) / len(arrived[0])

    return rule


@dataclass(frozen=True, slots=True)
class InFormat:
    """Codes of a `Format`, without a residual of their rounding."""

    format: Format
    has_residual: ClassVar[bool] = False

    def buffers(self, numel: int, dtype: DType) -> list[tuple[int, DType]]:
        """Return those of the format, whatever dtype the numbers have."""
        return self.format.arrays(numel)


class Blocks(InFormat):
    """Multiples of absmax / 127 in a byte, or of absmax / 7 in half a byte."""

    __slots__ = ()

    def encode(self, xp: Any, values: Array, *sent: Array) -> None:
        codes, scales = sent
        parts, numel = values.shape
        most = 2 ** (self.format.bits - 1) - 1
        padded = xp.zeros((parts, scales.shape[1] * self.format.block), values.dtype)
        padded[:, :numel] = values
        blocks = padded.reshape(parts, -1, self.format.block)
        scales[...] = xp.abs(blocks).max(axis=2) / most
        divisors = xp.where(scales == 0, xp.float32(1), scales)[:, :, None]
        steps = (xp.rint(blocks / divisors).reshape(parts, -1)[:, :numel] + (most + 1)).astype(xp.uint8)
        if self.format.bits == 8:
            codes[...] = steps
            return
        pairs = xp.zeros((parts, 2 * codes.shape[1]), xp.uint8)
        pairs[:, :numel] = steps
        codes[...] = pairs[:, ::2] << 4 | pairs[:, 1::2]

    def add(self, xp: Any, total: Array, *arrived: Array) -> None:
        codes, scales = arrived
        if self.format.bits == 4:
            codes = xp.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
        steps = codes[: total.size].astype(total.dtype) - 2 ** (self.format.bits - 1)
        total += steps * xp.repeat(scales, self.format.block)[: total.size].astype(total.dtype)


@dataclass(frozen=True, slots=True)
class TopK:
    """ceil(ratio n) elements, as values and int32 places; of equal ones the first. Unsent elements are the residual."""

    ratio: float
    has_residual: bool = True

    def count(self, numel: int) -> int:
        """Return how many of numel elements are sent."""
        return most_of(self.ratio, numel)

    def buffers(self, numel: int, dtype: DType) -> list[tuple[int, DType]]:
        return [(self.count(numel), dtype), (self.count(numel), int32)]

    def encode(self, xp: Any, values: Array, *sent: Array) -> None:
        kept, places = sent
        order = xp.argsort(-xp.abs(values), axis=1, kind="stable")[:, : kept.shape[1]]
        places[...] = xp.sort(order, axis=1)
        for row, at, out in zip(values, places, kept, strict=True):
            out[...] = row[at]
            row[at] = 0

    def add(self, xp: Any, total: Array, *arrived: Array) -> None:
        kept, places = arrived
        total[places] += kept


class Signs(InFormat):
    """x becomes sign(x) |x|_2 / sqrt(n), where 0 counts as positive; the difference is the residual."""

    __slots__ = ()
    has_residual: ClassVar[bool] = True

    def encode(self, xp: Any, values: Array, *sent: Array) -> None:
        bits, scales = sent
        scales[:, 0] = xp.sqrt((values * values).sum(axis=1) / values.shape[1])
        bits[...] = xp.packbits(values >= 0, axis=1)
        values -= xp.where(values >= 0, scales, -scales).astype(values.dtype)

    def add(self, xp: Any, total: Array, *arrived: Array) -> None:
        bits, scales = arrived
        total += xp.where(xp.unpackbits(bits)[: total.size] == 1, scales, -scales).astype(total.dtype)


SIGNS = Signs(blocks(1, 0))


def most_of(ratio: float, numel: int) -> int:
    """Return ceil(ratio n), at least 1."""
    return max(1, math.ceil(ratio * numel)) if numel else 0
