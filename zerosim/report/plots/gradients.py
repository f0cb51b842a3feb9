"""The sizes of a run's gradients above the ranges of narrow formats, and the losses of a cast to each at each loss
scale.

After Figure 3 of Micikevicius et al., Mixed Precision Training (arXiv 1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

from zerosim.backends.numpy.narrow import NARROW
from zerosim.errors import InputError
from zerosim.report.plots.axes import ticks
from zerosim.report.plots.page import Page, dress, finish, frame, ground, open_page
from zerosim.report.plots.style import LINE_PAINTS, Paint, mixed
from zerosim.train.gradients import FORMATS, POWERS, Gradients
from zerosim.units import format_count

GRADIENTS = LINE_PAINTS[3]
FATES: Mapping[str, tuple[str, Paint]] = MappingProxyType(
    {
        "to_zero": ("becomes 0", Paint(LINE_PAINTS[1].light, LINE_PAINTS[1].dark, "//")),
        "overflowed": ("overflows", Paint(LINE_PAINTS[4].light, LINE_PAINTS[4].dark, "xx")),
    }
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_two(power: int) -> str:
    """Return '2⁻¹⁴'."""
    return "2" + str(power).translate(_SUPERSCRIPTS)


def gradients_figure(
    gradients: Gradients, *, subtitle: str = "", theme: str = "light", size: tuple[float, float] | None = None
) -> Figure:
    """Draw the picture. `size` is in inches, width first.

    Raises: InputError for an unknown theme, an impossible size, and gradients that are all 0.
    """
    if gradients.num == gradients.zeros:
        raise InputError(
            f"all {gradients.num:,} gradients are 0: there is nothing to draw; choose other data or weights"
        )
    page = open_page(size, theme, (9.0, 7.0))
    counted = f"{format_count(gradients.num)} gradients of {gradients.steps} steps"
    notes = [
        "Weights' gradients in fp32 as backward leaves them, before clipping. Full colour: what the format holds with "
        "all its digits. Pale: subnormal, with fewer and fewer.",
        "Below: shares of the gradients that are not 0, counted after a cast of scale times gradient. One overflow is "
        "enough for a whole step to be skipped.",
    ]
    if gradients.zeros:
        notes.append(f"{gradients.zeros:,} of {gradients.num:,} gradients are exactly 0 in fp32 too, and left out.")
    key = [(words, page.paint(name, {name: paint})) for name, (words, paint) in FATES.items()]
    frame(
        page, "Gradients against what 16 and 8 bits hold", f"{subtitle}: {counted}" if subtitle else counted, key, notes
    )
    outer = page.figure.add_gridspec(2, 1, height_ratios=(5, 3))
    upper = outer[0].subgridspec(2, 1, height_ratios=(3, 2), hspace=0.0)
    hills = page.figure.add_subplot(upper[0])
    _draw_hills(page, hills, gradients)
    _draw_ranges(page, page.figure.add_subplot(upper[1], sharex=hills), gradients)
    lower = outer[1].subgridspec(1, len(FORMATS))
    first: Axes | None = None
    for column, name in enumerate(FORMATS):
        axes = page.figure.add_subplot(lower[column], sharey=first)
        _draw_losses(page, axes, gradients, name, is_first=first is None)
        first = first or axes
    return finish(page)


def _bounds(gradients: Gradients) -> tuple[int, int]:
    """Return the powers of two along the bottom: all gradients, and both ends of every format but bf16, which goes much
    further."""
    ends = [NARROW[name] for name in FORMATS if name != "bf16"]
    low = min(min(gradients.exponents), *(_power(each.smallest) for each in ends))
    high = max(max(gradients.exponents), *(_power(each.largest) for each in ends))
    return low - 3, high + 4


def _power(value: float) -> int:
    """Return the power of two at which a value begins."""
    return int(value).bit_length() - 1 if value >= 1 else -int(1 / value).bit_length() + 1


def _draw_hills(page: Page, axes: Axes, gradients: Gradients) -> None:
    """Draw a bar for each power of two."""
    dress(page, axes, grid="both", y="share of gradients")
    total = gradients.num - gradients.zeros
    powers = sorted(gradients.exponents)
    shares = [gradients.exponents[power] / total for power in powers]
    color = page.theme.color(GRADIENTS)
    axes.bar(powers, shares, 1.0, align="edge", color=color, edgecolor=page.theme.background, linewidth=0.6)
    axes.set_xlim(*_bounds(gradients))
    axes.set_yscale("log")
    axes.set_ylim(max(min(shares) / 2, 1e-8), 2 * max(shares))
    ticks(axes.yaxis, LogLocator(10, numticks=6), lambda share: f"{100 * share:.6g}%")
    axes.tick_params(axis="x", labelbottom=False, length=0)


def _draw_ranges(page: Page, axes: Axes, gradients: Gradients) -> None:
    """Draw a bar for each format, from its smallest number to its largest."""
    dress(page, axes, grid="x")
    low, high = _bounds(gradients)
    for row, name in enumerate(FORMATS):
        limits, color = NARROW[name], page.theme.color(LINE_PAINTS[5])
        smallest, normal, largest = (_power(value) for value in limits)
        start, stop = max(smallest, low), min(largest + 1, high)
        axes.barh(row, stop - max(normal, low), 0.56, left=max(normal, low), color=color)
        if normal > low:
            axes.barh(row, normal - start, 0.56, left=start, color=mixed(color, page.theme.background))
        words = f"{power_of_two(smallest)} to {limits.largest:.5g}"
        font = page.font(scale=0.9, bold=True)
        page.write(axes, words, (max(normal, low) + 0.6, row), ha="left", color=page.theme.background, **font)
    axes.set_ylim(len(FORMATS) - 0.5, -0.5)
    axes.set_yticks(range(len(FORMATS)), FORMATS)
    axes.tick_params(axis="y", length=0)
    ticks = [power for power in range(-200, 200, 8) if low <= power <= high]
    axes.set_xticks(ticks, [power_of_two(power) for power in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_losses(page: Page, axes: Axes, gradients: Gradients, name: str, *, is_first: bool) -> None:
    """Draw one format: a bar for each loss scale, of the values that become 0 and that overflow."""
    dress(page, axes, grid="y", x="loss scale", y="lost" if is_first else "")
    for column, power in enumerate(POWERS):
        share, start = gradients.share(name, power), 0.0
        for what, (_, paint) in FATES.items():
            axes.bar(column, share[what], 0.74, bottom=start, **page.paint(what, {what: paint}))
            start += share[what]
        font, box = page.font(scale=0.68), ground(page.theme.background, 0.05)
        page.write(axes, _percent(start), (column, start + 0.015), va="bottom", bbox=box, **font)
    axes.set_ylim(0, 1.09)
    axes.set_xlim(-0.6, len(POWERS) - 0.4)
    axes.set_xticks(range(len(POWERS)), [power_of_two(power) if power else "1" for power in POWERS])
    axes.tick_params(axis="x", length=0, labelsize=page.points * 0.75)
    axes.set_title(name, color=page.theme.text, **page.font(bold=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(axis="y", labelleft=is_first, length=3 if is_first else 0)


def _percent(share: float) -> str:
    """Return '84', '0.9', '<.1', '0': percent, with few digits."""
    percent = 100 * share
    if percent == 0:
        return "0"
    return "<.1" if percent < 0.05 else f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"
