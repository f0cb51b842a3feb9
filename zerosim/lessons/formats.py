"""The pictures of notebook 02: the ranges of number formats above the sizes of gradients, and single numbers as ticks.

The caller brings the numbers; the pictures know only a format's colour. Matrices there and back in 8 bits are here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerosim.dtypes import uint8
from zerosim.errors import InputError
from zerosim.lessons.sheet import THEME, Sheet
from zerosim.report.plots.page import Picture
from zerosim.report.plots.style import LINE_PAINTS, ink_on, mixed
from zerosim.tensor import float8
from zerosim.tensor.float8 import Casting

_COLORS = {"fp16": 5, "bf16": 1, "fp32": 3, "e4m3": 2, "e5m2": 4}  # places in LINE_PAINTS
_LOG_LOW, _LOG_HIGH = -152, 132
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Limits(NamedTuple):
    """A format's smallest positive number, the smallest with all its digits, the largest, and the gap after 1."""

    smallest: float
    min_normal: float
    largest: float
    gap_after_1: float


def range_figure(limits: Mapping[str, Limits], gradients: Any, scales: Sequence[float] = (1.0,)) -> Picture:
    """Draw the formats' ranges on one line of powers of two, below the sizes of gradients times each of the scales."""
    sheet = Sheet(
        (8.0, 3.2 + 0.55 * len(scales)),
        "What each format can hold, and where gradients lie",
        "Powers of two. Full colour: numbers with all their digits. Pale: subnormal, with fewer and fewer.",
        across=(_LOG_LOW - 14, _LOG_HIGH),
        up=(-0.6, 2.6 + 1.15 * len(scales) + 0.1),
        notes=["Hills: how many gradients of each size, all of one height. Left of the dashes fp16 rounds to 0."],
        grid="x",
    )
    axes = sheet.axes
    for row, (name, seen) in enumerate(reversed(list(limits.items()))):
        low, normal, high = (float(np.log2(value)) for value in seen[:3])
        color = LINE_PAINTS[_COLORS[name]].light
        axes.barh(row, high - normal, 0.6, left=normal, color=color)
        axes.barh(row, normal - low, 0.6, left=low, color=mixed(color, THEME.background))
        sheet.write(((normal + high) / 2, row), name, bold=True, color=ink_on(color))
        sheet.write((low - 3, row), _power(seen.smallest), scale=0.85, ha="right")
    exponents = np.log2(np.abs(gradients[gradients != 0]))
    for at, scale in enumerate(scales):
        powers, color = exponents + np.log2(scale), LINE_PAINTS[(0, 2, 4)[at % 3]].light
        counts, edges = np.histogram(powers, bins=np.arange(_LOG_LOW, _LOG_HIGH, 1.0))
        floor = 2.6 + 1.15 * at
        axes.stairs(floor + counts / counts.max(), edges, baseline=floor, fill=True, color=color)
        words = "gradients" if scale == 1.0 else f"gradients times {_power(scale)}"
        sheet.write((float(powers.max()) + 4, floor + 0.4), words, ha="left", color=color)
    axes.axvline(np.log2(limits["fp16"].smallest) - 1, color=THEME.muted, linewidth=1.0, dashes=(4, 2))
    axes.set_yticks([])
    ticks = [-149, -100, -50, -24, 0, 16, 50, 100, 128]
    axes.set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    return sheet.picture()


def ticks_figure(values: Mapping[str, Any], low: float, high: float) -> Picture:
    """Draw a tick for each of a format's numbers from `low` to `high`. `values` are each format's numbers.

    Raises: InputError for bounds between which a format has no two numbers.
    """
    sheet = Sheet(
        (8.0, 1.5 + 0.75 * len(values)),
        f"Every number from {low:g} to {high:g}",
        "One tick is one number. What falls between two ticks is rounded to one of them.",
        across=(low - 0.2 * (high - low), high + 0.03 * (high - low)),
        up=(-0.6, len(values) - 0.4),
    )
    for row, (name, numbers) in enumerate(reversed(list(values.items()))):
        inside = numbers[(numbers >= low) & (numbers <= high)]
        if inside.size < 2:
            raise InputError(f"{name} has {inside.size} numbers from {low:g} to {high:g}: expected a wider range")
        color = LINE_PAINTS[_COLORS[name]].light
        sheet.axes.plot([low, high], [row - 0.28] * 2, color=THEME.muted, linewidth=1.0)
        sheet.axes.vlines(inside, row - 0.28, row + 0.1, color=color, linewidth=1.6)
        sheet.write((low - 0.03 * (high - low), row - 0.05), f"{name}\n{inside.size} numbers", scale=0.9, ha="right")
        for value in (low, high):
            sheet.write((value, row - 0.45), f"{value:g}", scale=0.85, color=THEME.muted)
    return sheet.picture()


def in_8_bits(casting: Casting, values: Any) -> Any:
    """Return what is left of a float32 matrix in 8 bits: its codes' values times their scales."""
    (shape, _), (of_scales, kind) = casting.arrays(*values.shape)
    codes, scales = np.empty(shape, np.uint8), np.empty(of_scales, np.uint8 if kind is uint8 else np.float32)
    float8.quantize(np, casting, values, codes, scales)
    out = np.empty(shape, np.float32)
    float8.decode(np, casting, codes, scales, out)
    return out


def _power(value: float) -> str:
    return "2" + str(round(float(np.log2(value)))).translate(_SUPERSCRIPTS)
