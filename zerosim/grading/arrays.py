"""Arrays that an answer returns, each compared with the right one and with those of usual mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown


class Output(NamedTuple):
    """An array of a reply: its name, the right values, a hint for others, and the values of usual mistakes with the
    hint for each."""

    name: str
    right: Any
    hint: str
    usual: Sequence[tuple[str, Any]] = ()


def wrong_arrays(asked: str, came: Any, outputs: Sequence[Output], missing: str, not_finite: str = "") -> Wrong | None:
    """Return the first array that is not the right one. `missing` is the hint where arrays are missing or have another
    shape, `not_finite` where numbers are inf or nan."""
    found, words = arrays_of(came, [(one.name, one.right.shape) for one in outputs])
    if words:
        return f"{asked}: {words}", missing
    for one, got in zip(outputs, found, strict=True):
        if off := gap_of(one.name, got, one.right):
            if not_finite and not np.isfinite(got).all():
                return f"{asked}: {off}", not_finite
            alike = (hint for hint, wrong in one.usual if not gap_of("", got, wrong))
            return f"{asked}: {off}", next(alike, one.hint)
    return None


def arrays_of(pair: Any, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[list[Any], str]:
    """Return a reply's arrays in float64; or what is missing, in words."""
    names = ", ".join(name for name, _ in shapes)
    if not isinstance(pair, tuple | list) or len(pair) != len(shapes):
        return [], f"{shown(pair)[:80]}, expected {names}"
    found = [np.asarray(one) for one in pair]
    for (name, shape), array in zip(shapes, found, strict=True):
        if array.dtype.kind not in "fiu" or array.shape != shape:
            return [], f"{name} is {array.dtype} {array.shape}, expected {shape}"
    return [array.astype(np.float64) for array in found], ""


def gap_of(name: str, got: Any, wanted: Any) -> str:
    """Return where two arrays differ by more than rounding, in words; '' if nowhere."""
    gaps = np.abs(got - wanted)
    if np.isfinite(got).all() and gaps.max(initial=0) <= 1e-5 * max(1.0, np.abs(wanted).max(initial=0)):
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.nan_to_num(gaps, nan=np.inf).argmax(), gaps.shape))
    words = f"{name}{list(at)} is {got[at]:.6g}, expected {wanted[at]:.6g}"
    ratio = got[at] / wanted[at] if wanted[at] else 0.0
    is_multiple = ratio and np.isfinite(ratio) and np.allclose(got, ratio * wanted, rtol=1e-6, atol=1e-9)
    return f"{words}: all of {name} is {ratio:.4g} times the expected" if is_multiple else words


def wrong_nearest(
    asked: str, values: Any, table: Any, codes: Any, scale: float, of: str, hint: str, least: float = 0.0
) -> Wrong | None:
    """Return the first value whose table entry is further away than another one, by more than rounding: 1e-7 of the
    value, or of `least`."""
    unit = values.astype(np.float64) / (scale or 1.0)
    gaps = np.abs(unit[:, None] - table.astype(np.float64))
    slack = 1e-7 * np.maximum(np.abs(unit), least)
    far = np.flatnonzero(gaps[np.arange(len(unit)), codes] > gaps.min(axis=1) + slack)
    if not far.size:
        return None
    at = int(far[0])
    words = f"{asked}: value {at} is {unit[at]:.4g} of {of} and became {table[codes[at]]:.4g}, nearest is "
    hint = hint if scale else "0/0 has no nearest entry: treat a block of zeros separately"
    return f"{words}{table[gaps[at].argmin()]:.4g}", hint


def wrong_codes(asked: str, values: Any, pair: Any, count: int, of: str, packed: str) -> Wrong | None:
    """Return the error in a reply of codes and the largest magnitude, the codes' own values aside."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int | float)):
        return f"{asked}: {shown(pair)[:80]}, expected codes and {of}", f"return an array and a number: codes, {of}"
    codes, largest = np.asarray(pair[0]), float(np.abs(values).max())
    if codes.dtype != np.uint8 or codes.shape != (count,):
        return f"{asked}: codes of {codes.dtype} {codes.shape}, expected uint8 ({count},)", packed
    if float(pair[1]) != largest:
        words = f"{asked}: {of} is {float(pair[1]):.9g}, expected {largest:.9g}"
        return words, f"{of} is the largest magnitude: a block's most negative value counts as well"
    return None
