"""The axes of pictures: bytes, events, names of rows; and the blocks of Gantt pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import Locator, MaxNLocator, NullLocator

from zerosim.report.plots.page import Page, Place, inches, settle
from zerosim.report.plots.style import ink_on

BLOCK = 0.8  # of a row: the thickness of a block of a Gantt picture
EVENTS = "events in their order (not seconds)"
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")


def bytes_axis(axis: Axis, most: int, intervals: int) -> None:
    """Put round numbers of bytes with units along an axis that goes to `most`."""
    ticks(axis, MaxNLocator(intervals, steps=[1, 2, 2.5, 5, 10], integer=most < 10), tick_bytes)


def ticks(axis: Axis, locator: Locator, words: Callable[[float], str] | None = None) -> None:
    """Put ticks of one size along an axis, each in `words`."""
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    if words is not None:
        axis.set_major_formatter(lambda value, _: words(value))


def events_axis(page: Page, axes: Axes) -> None:
    """Put whole numbers along the bottom, as many as have room. Places the axes."""
    settle(page)
    most = max(2, int(inches(page, axes)[0] / 0.9))
    ticks(axes.xaxis, MaxNLocator(most, integer=True), lambda number: f"{number:,.0f}")


def rows_axis(page: Page, axes: Axes, names: Sequence[str], scale: float = 1.0) -> None:
    """Put a row for each name, the first one highest."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, colors=page.theme.text, labelsize=page.points * scale)


def block(
    page: Page, axes: Axes, row: int, span: Place, color: str, words: Iterable[str], *, scale: float, **looks: Any
) -> None:
    """Draw a bar of a Gantt picture over a span, with the first of the words that fit in it at this scale of the body's
    font."""
    (start, stop), font = span, page.font(scale=scale)
    axes.barh(row, stop - start, BLOCK, left=start, color=color, edgecolor=page.theme.background, **looks)
    room = (stop - start) / axes.get_xlim()[1] * inches(page, axes)[0] - 0.03
    fitting = next((text for text in words if text and page.width(text, **font) <= room), "")
    if fitting:
        page.write(axes, fitting, ((start + stop) / 2, row), color=ink_on(color), **font)


def tick_bytes(value: float) -> str:
    """Return '20 GB', '2.5 MB', '0': a tick's round number in decimal units."""
    scaled, at = float(value), 0
    while abs(scaled) >= 999.9995 and at < len(_UNITS) - 1:
        scaled, at = scaled / 1000, at + 1
    return f"{scaled:.4g} {_UNITS[at]}" if scaled else "0"
