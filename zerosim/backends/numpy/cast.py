"""Half types in NumPy: casts from 16 bits to float32 and back, bit for bit as IEEE 754 rounds.

NumPy has no fast arithmetic for float16 and bfloat16, so every kernel reads through `raised` (float32
values), works in float32 and leaves through `store`, the one place that rounds. This module also cuts arrays
into pieces that fit the cache.

float32 -> bfloat16 and back is left to ml_dtypes. float16 goes another way than `astype`, which
takes 65 ns for an element that ends up subnormal (as small gradients do): see `_round_to_float16`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from zerosim.backends.kernels import Array

FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

BLOCK = 64 * 1024
"""Elements in a piece. A few float32 arrays of this size fit the second-level cache, and the overhead of calls is
small."""

TINY = 256
"""Elements up to which one call of astype costs less than the dozen calls that are faster per element."""

_FLOAT16_VALUES = np.arange(2**16, dtype=np.uint16).view(FLOAT16).astype(FLOAT32)
_FLOAT16_VALUES.flags.writeable = False


def wide(*arrays: Array) -> np.dtype[Any]:
    """Return the dtype for arithmetic on these arrays: float64 if one of them is, else float32."""
    return FLOAT64 if any(a.dtype == FLOAT64 for a in arrays) else FLOAT32


def raised(a: Array) -> Array:
    """Return the values of `a` to compute with: `a` itself, or a half type's values as a new float32 array.

    The copy has a's memory order, so that a transposed view stays one that BLAS can read.
    """
    if a.dtype.itemsize != 2:
        return a
    values = np.empty_like(a, dtype=FLOAT32)
    store(a, values)
    return values


def result_for(out: Array, compute: np.dtype[Any]) -> Array:
    """Return the array for a result in the `compute` type, before `round_into`: `out` itself if it has that type."""
    return out if out.dtype == compute else np.empty_like(out, dtype=compute)


def round_into(values: Array, out: Array) -> None:
    """Round what was computed in `result_for(out, ...)` into `out`."""
    if values is not out:
        store(values, out)


def store(values: Array, out: Array) -> None:
    """out = values of the same shape, rounded once (half to even, overflow to inf) where out's type is narrower."""
    source, target = values.dtype, out.dtype
    if source == FLOAT64 and target == BFLOAT16:
        values, source = _to_odd_float32(values), FLOAT32
    elif source.itemsize == 2 and target.itemsize == 2 and source != target:
        values, source = raised(values), FLOAT32
    if source == FLOAT32 and target == FLOAT16:
        _in_flat_blocks(_to_float16, values, out)
    elif source == FLOAT16 and target == FLOAT32:
        _in_flat_blocks(_from_float16, values, out)
    else:
        np.copyto(out, values, casting="unsafe")


def windows(*arrays: Array) -> Iterator[Sequence[Array]]:
    """Yield matching pieces of arrays of one shape, cut for the cache; flat pieces if all arrays are contiguous.

    For elementwise kernels only. The cuts depend on the memory layout, so results must not depend on the cuts.
    """
    if arrays[0].size <= BLOCK:
        yield arrays
        return
    if all(a.flags.c_contiguous for a in arrays):
        arrays = tuple(a.reshape(-1) for a in arrays)
    elif all(a.flags.f_contiguous for a in arrays):
        arrays = tuple(a.T for a in arrays)
    rows = arrays[0].shape[0]
    step = max(1, BLOCK * rows // arrays[0].size)
    for start in range(0, rows, step):
        yield [a[start : start + step] for a in arrays]


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Return cuts of a (rows, columns) array into blocks of whole rows. They depend on the shape alone."""
    step = max(1, BLOCK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _in_flat_blocks(convert: Callable[[Array, Array], None], values: Array, out: Array) -> None:
    """Run convert(block of values, block of out) over contiguous 1-D blocks, through a copy if necessary."""
    if values.flags.f_contiguous and out.flags.f_contiguous:
        values, out = values.T, out.T
    target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    flat_values, flat_target = np.ascontiguousarray(values).reshape(-1), target.reshape(-1)
    for start in range(0, flat_values.size, BLOCK):
        convert(flat_values[start : start + BLOCK], flat_target[start : start + BLOCK])
    if target is not out:
        out[...] = target


def _from_float16(values: Array, out: Array) -> None:
    """A table of all 65,536 values: exact by construction, and more than twice as fast as astype."""
    if values.size <= TINY:
        out[...] = values
    else:
        np.take(_FLOAT16_VALUES, values.view(np.uint16), out=out, mode="wrap")


def _to_float16(values: Array, out: Array) -> None:
    half = out.view(np.uint16)
    if values.size <= TINY:
        np.copyto(out, values, casting="unsafe")
    else:
        _round_to_float16(values, half)
    np.copyto(half, 0x7E00, where=np.isnan(values))  # both branches give the same nan


def _round_to_float16(values: Array, half: Array) -> None:
    """Let the float32 adder do the rounding, then pick float16's bits out of the sum.

    Write |x| = k * 2**(e-10) with 2**e the power of two below it, or 2**-14 if that is larger: k is
    then float16's significand, an integer up to 2048 once it is rounded. Adding 2**(e+13), whose
    last place is worth 2**(e-10), makes the adder round |x| to such an integer, half to even, and
    leaves k in the low bits of the sum. float16's bits are k + (e + 14) * 1024: the same formula for
    subnormals (e = -14), for a carry into the next exponent, and for 65536, which reads as inf.
    """
    size = np.abs(values)
    np.clip(size, 0.0, 65536.0, out=size)  # overflowing values become 65536
    power = np.bitwise_and(size.view(np.uint32), 0x7F800000)  # 2**e
    np.clip(power, 113 << 23, 0x7F800000, out=power)  # at least 2**-14, whose exponent field is 113
    np.add(power, 13 << 23, out=power)  # 2**(e + 13)
    np.add(size, power.view(FLOAT32), out=size)
    np.right_shift(power, 13, out=power)  # (e + 13 + 127) * 1024
    np.add(power, size.view(np.uint32), out=power)
    half[...] = power  # arithmetic modulo 2**16 from here: only k and e are left
    np.subtract(half, (126 << 10) & 0xFFFF, out=half)
    np.right_shift(values.view(np.uint32), 16, out=power)
    sign = power.astype(np.uint16)
    np.bitwise_and(sign, 0x8000, out=sign)
    np.bitwise_or(half, sign, out=half)


def _to_odd_float32(values: Array) -> Array:
    """float64 to float32, rounded to odd, so that rounding once more gives what one rounding would."""
    near = values.astype(FLOAT32)
    inexact_even = (near.astype(FLOAT64) != values) & (near.view(np.uint32) & 1 == 0)
    towards = np.where(values > near, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact_even, np.nextafter(near, towards), near)
