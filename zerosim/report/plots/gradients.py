"""The sizes of a run's gradients above the ranges of narrow formats, and the losses of a cast to each at each loss
scale.

After Figure 3 of Micikevicius et al., Mixed Precision Training (arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.backends.numpy.narrow import NARROW
from zerosim.errors import InputError
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Box, Boxes, Mark, Note, Panel, Place
from zerosim.report.plots.style import LINE_PAINTS, Paint
from zerosim.report.plots.words import percent
from zerosim.train.gradients import FORMATS, POWERS, Gradients
from zerosim.units import format_count

FATES: Mapping[str, tuple[str, Paint]] = MappingProxyType(
    {
        "to_zero": ("becomes 0", Paint(LINE_PAINTS[1].light, LINE_PAINTS[1].dark, "//")),
        "overflowed": ("overflows", Paint(LINE_PAINTS[4].light, LINE_PAINTS[4].dark, "xx")),
    }
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_two(power: float) -> str:
    """Return '2⁻¹⁴'."""
    return "2" + f"{power:.0f}".translate(_SUPERSCRIPTS)


def gradients_figure(gradients: Gradients, *, subtitle: str = "") -> Chart:
    """Return the picture. Raises: InputError for gradients that are all 0."""
    if gradients.num == gradients.zeros:
        raise InputError(
            f"all {gradients.num:,} gradients are 0: there is nothing to draw; choose other data or weights"
        )
    counted = f"{format_count(gradients.num)} gradients of {gradients.steps} steps"
    notes = [
        "Weights' gradients in fp32 as backward leaves them, before clipping. Full colour: what the format holds with "
        "all its digits. Pale: subnormal, with fewer and fewer.",
        "Below: shares in percent of the gradients that are not 0, counted after a cast of scale times gradient. One "
        "overflow is enough for a whole step to be skipped.",
    ]
    if gradients.zeros:
        notes.append(f"{gradients.zeros:,} of {gradients.num:,} gradients are exactly 0 in fp32 too, and left out.")
    # All gradients, and both ends of every format but bf16, which goes much further.
    ends = [NARROW[name] for name in FORMATS if name != "bf16"]
    low = min(min(gradients.exponents), *(_power(each.smallest) for each in ends)) - 3
    high = max(max(gradients.exponents), *(_power(each.largest) for each in ends)) + 4
    casts = tuple(_losses(gradients, name) for name in FORMATS)
    rows = (_hills(gradients, (low, high)),), (_ranges((low, high)),), casts
    return Chart(
        "Gradients against what 16 and 8 bits hold", f"{subtitle}: {counted}" if subtitle else counted, rows,
        tuple(FATES.values()), tuple(notes), size=(9.0, 7.0), heights=(3, 2, 3),
    )  # fmt: skip


def _power(value: float) -> int:
    """Return the power of two at which a value begins."""
    return int(value).bit_length() - 1 if value >= 1 else -int(1 / value).bit_length() + 1


def _hills(gradients: Gradients, ends: Place) -> Panel:
    """Return a bar for each power of two."""
    total = gradients.num - gradients.zeros
    shares = {power: count / total for power, count in sorted(gradients.exponents.items())}
    least = max(min(shares.values()) / 2, 1e-8)
    bars = Boxes("gradients", LINE_PAINTS[3], [(power + 0.04, least, power + 0.96, s) for power, s in shares.items()])
    y = Axis("share of gradients", (least, 2 * max(shares.values())), lambda s: f"{100 * s:.6g}%", log=True)
    return Panel((bars,), Axis(ends=ends, hidden=True), y)


def _ranges(ends: Place) -> Panel:
    """Return a bar for each format, from its smallest number to its largest: subnormal numbers, then normal ones."""
    marks, paint = list[Mark](), LINE_PAINTS[5]
    for row, name in enumerate(FORMATS):
        limits, thick = NARROW[name], (row - 0.28, row + 0.28)
        smallest, normal, largest = (_power(value) for value in limits)
        middle = max(normal, ends[0])
        words = f"{power_of_two(smallest)} to {limits.largest:.5g}"
        marks.append(Box(name, (middle, min(largest + 1, ends[1])), thick, paint, (words,)))
        if normal > ends[0]:
            marks.append(Box(f"{name}, subnormal", (max(smallest, ends[0]), normal), thick, paint.faded(0.5)))
    powers = tuple(float(power) for power in range(-200, 200, 8) if ends[0] <= power <= ends[1])
    return Panel(tuple(marks), Axis(ends=ends, words=power_of_two, among=powers), Axis.of_rows(FORMATS), grid="x")


def _losses(gradients: Gradients, name: str) -> Panel:
    """Return one format: a bar for each loss scale, of the values that become 0 and that overflow."""
    marks = list[Mark]()
    for column, power in enumerate(POWERS):
        share, start = gradients.share(name, power), 0.0
        for what, (_, paint) in FATES.items():
            if share[what]:
                marks.append(Box(what, (column - 0.37, column + 0.37), (start, start + share[what]), paint))
            start += share[what]
        marks.append(Note(percent(start, 0.1), (column, start + 0.015), "center bottom", scale=0.68))
    x = Axis("loss scale", (-0.6, len(POWERS) - 0.4), rows=tuple(power_of_two(p) if p else "1" for p in POWERS))
    y = Axis("" if name != FORMATS[0] else "lost", (0, 1.09), lambda s: f"{100 * s:.0f}%", hidden=name != FORMATS[0])
    return Panel(tuple(marks), x, y, name, "y")
