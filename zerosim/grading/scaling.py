"""Exercise on 8 bits: a scale for each block of a matrix, judged by what its codes lose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown
from zerosim.tensor.float8_codes import E4M3, codes_of, values_of

_TOP = E4M3.largest
_STEP = 2.0**-9
"""The smallest number of e4m3 above 0, and the gap between numbers that lose digits."""


def matrices(seed: int) -> list[tuple[Any, ...]]:
    random, found = np.random.default_rng(46 + seed), []
    for words, (rows, columns), (high, wide), sizes in (
        ("one block", (4, 8), (4, 8), (1.0,)),
        ("a block a row", (3, 16), (1, 16), (1.0, 1e-6, 300.0)),
        ("blocks of 1 x 8, one of zeros", (2, 24), (1, 8), (1.0, 0.0, 1e4, 1e-3, 1.0, 50.0)),
        ("blocks of 4 x 4", (8, 12), (4, 4), (1e-4, 1.0, 20.0, 0.3, 1e5, 1e-2)),
        ("blocks of 2 x 16, tiny, one of zeros", (4, 32), (2, 16), (1e-9, 0.0, 1e-12, 1e-10)),
    ):
        signs = (-1, 1) * len(sizes)
        blocks = [_block(random, high * wide, size, sign) for size, sign in zip(sizes, signs, strict=False)]
        grid = np.stack(blocks).reshape(rows // high, columns // wide, high, wide)
        values = grid.transpose(0, 2, 1, 3).reshape(rows, columns)
        found.append((f"{words}: {rows} x {columns}", np.ascontiguousarray(values), (high, wide)))
    return found


def _block(random: Any, count: int, size: float, sign: int) -> Any:
    """Draw numbers, the largest of this sign and 448 times a number of few bits, the smallest 2^-9 times that."""
    if not size:
        return np.zeros(count, np.float32)
    digits, exponent = math.frexp(size * random.uniform(1, 2))
    least = math.ldexp(round(1024 * digits), exponent - 10)
    values = (least * 0.2 * _TOP * random.uniform(-1, 1, count)).astype(np.float32)
    values[random.permutation(count)[:2]] = sign * _TOP * least, _STEP * least
    return values


def _blocks(values: Any, block: tuple[int, int]) -> Any:
    """Return a matrix's blocks: (down, across, numbers)."""
    (rows, columns), (high, wide) = values.shape, block
    cut = values.reshape(rows // high, high, columns // wide, wide)
    return cut.transpose(0, 2, 1, 3).reshape(rows // high, columns // wide, high * wide)


def wrong_scales(asked: str, values: Any, block: tuple[int, int], came: Any) -> Wrong | None:
    blocks, scales = _blocks(values, block), np.asarray(came)
    if scales.dtype.kind != "f" or scales.shape != blocks.shape[:2]:
        words = f"{asked}: {shown(came)[:40]} is {scales.dtype} {scales.shape}, expected floats {blocks.shape[:2]}"
        return words, _FLAT if scales.ndim == 1 and scales.size == blocks[..., 0].size else _SHAPE
    for at in np.ndindex(scales.shape):
        numbers, scale = blocks[at], scales[at].astype(np.float32)
        where = f"{asked}, block {at}: with a scale of {scale:.4g}"
        if not np.isfinite(scale) or scale <= 0:
            words = f"{where} the codes of its zeros are nan" if not numbers.any() else f"{where} there are no codes"
            return words, _ZEROS if not numbers.any() else _POSITIVE
        with np.errstate(over="ignore", under="ignore"):
            codes = codes_of(np, E4M3, (numbers / scale)[None], saturate=False)[0]
        beyond = np.count_nonzero(codes & 0x7F > E4M3.top)
        if beyond:
            words = f"{where} {beyond} of {numbers.size} numbers saturate: the largest is {_TOP * scale:.4g}"
            return words, _hint(float(scale), numbers, blocks, is_low=True)
        gaps = np.abs(values_of(np, E4M3, codes) * scale.astype(np.float64) - numbers)
        least = np.abs(numbers).max() / np.float64(_TOP) * _STEP
        far = np.flatnonzero((gaps > np.abs(numbers) / 16) & (gaps >= least * (1 - 1e-6)))
        if far.size:
            lost = int(far[np.abs(numbers[far]).argmin()])
            back = float(values_of(np, E4M3, codes)[lost] * scale)
            words = f"{where} {numbers[lost]:.4g} comes back as {back:.4g}"
            return words, _hint(float(scale), numbers, blocks, is_low=False)
    return None


def _hint(scale: float, numbers: Any, blocks: Any, *, is_low: bool) -> str:
    """Return what a scale is instead: one that is too low for the largest number, or too high for small ones."""
    amax = float(np.abs(numbers).max())
    means = _means(numbers)
    usual = [
        (_INVERTED, [_TOP / amax]),
        (_MEAN, [*means, *(one / _TOP for one in means)] if is_low else means),
        (_SIGN, [max(float(numbers.max()), 0.0) / _TOP] if is_low else []),
        (_ONE, [] if is_low else [amax]),
    ]
    others = (_OTHER, [float(one) / _TOP for one in np.abs(blocks).max(axis=2).ravel() if one])
    down = (_DOWN, [scale] if is_low and np.frexp(scale)[0] == 0.5 and amax / _TOP < 2 * scale else [])
    up = (_UP, [scale] if not is_low and amax / _TOP < scale < 9 * amax / _TOP else [])
    rows = [*usual, down, others, up]
    is_it = (hint for hint, wrong in rows if any(math.isclose(scale, one, rel_tol=1e-3) for one in wrong))
    return next(is_it, _LARGEST if is_low else _SMALL)


def _means(numbers: Any) -> tuple[float, ...]:
    exact = numbers.astype(np.float64)
    return tuple(map(float, (np.abs(exact).mean(), exact.std(), np.sqrt((exact**2).mean()))))


_SHAPE = "a scale for each block: as many rows as the matrix has blocks downwards, as many columns as it has across"
_FLAT = "the scale of block (i, j) is at [i, j]: return a matrix, not a flat list"
_MEAN = "a mean or a deviation is no bound: numbers may be far above it. Which number must become 448?"
_ZEROS = "0 / 0 is nan: a block of zeros needs a scale too, and any positive one will do"
_POSITIVE = "a scale is a positive, finite number: values are divided by it"
_INVERTED = "that is one over the scale: values are divided by it, and the largest must become 448"
_OTHER = "that is the scale of another block: each block has its own largest magnitude"
_SIGN = "the largest magnitude may be a negative number's: take absolute values first"
_ONE = "codes go up to 448, not to 1: of e4m3's 256 numbers you use the small ones alone"
_DOWN = "a power of two has to be rounded up: rounded down, the largest numbers are above 448"
_UP = "a power of two too high: each doubling costs small numbers a digit, and the smallest become 0"
_LARGEST = "the largest magnitude of the block must become 448: what is it divided by then?"
_SMALL = "the scale is too large, so small numbers lose digits: which number must become 448?"
