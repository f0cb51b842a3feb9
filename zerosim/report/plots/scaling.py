"""Bytes per rank against the number of ranks, one line per ZeRO stage, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator

from zerosim.errors import InputError
from zerosim.report.plots.axes import tick_bytes, ticks
from zerosim.report.plots.by_stage import MOMENTS
from zerosim.report.plots.lines import beside, draw_line, finish_lines, log_axes, number_ticks
from zerosim.report.plots.page import Page, frame, open_page, settle, stage_name
from zerosim.report.plots.words import limit_words
from zerosim.units import format_bytes

Points = Sequence[tuple[int, int]]
_FARTHEST = 300  # a limit beyond this many times the data is named, not drawn to scale


def scaling_figure(
    points: Mapping[str, Points],
    *,
    limit: tuple[str, int] | None = None,
    mark: str = "end_of_backward",
    subtitle: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `points`, (ranks, bytes per rank) by stage's name; `mark` is the moment at which they were counted.

    With a limit, points that fit are filled and the others are hollow. `size` is in inches, width first. Raises:
    InputError for no points, points that a logarithmic axis does not have, or an unknown theme.
    """
    lines = {name: sorted(line) for name, line in points.items() if line}
    if not lines:
        raise InputError("no points: there is nothing to draw; give at least one number of ranks")
    for name, line in lines.items():
        for ranks, nbytes in line:
            if ranks < 1 or nbytes < 1:
                raise InputError(f"{name}: {nbytes} bytes on {ranks} ranks: expected both to be at least 1")
    page = open_page(size, theme)
    whose = "the peak" if mark == "peak" else f"what is held {MOMENTS[mark]}"
    notes = [f"Filled: {whose} is within the limit. Hollow: it is not."] if limit else []
    if limit and mark != "peak":
        notes.append("The peak decides whether a run fits: --mark peak.")
    frame(page, f"Bytes per rank {MOMENTS[mark]}, by number of ranks", subtitle, notes=notes)
    sizes = sorted({ranks for line in lines.values() for ranks, _ in line})
    axes = log_axes(page, "data-parallel ranks N", sizes)
    axes.set_yscale("log")
    labels = []
    for index, (name, line) in enumerate(lines.items()):
        marks = [(ranks, nbytes, limit is None or nbytes <= limit[1]) for ranks, nbytes in line]
        words = f"{stage_name(name)}  {format_bytes(line[-1][1])}"
        labels.append(draw_line(page, axes, index, name, marks, words))
    _set_limits(axes, lines, limit)
    if limit is not None:
        labels.append(_draw_limit(page, axes, limit, sizes[-1]))
    settle(page)
    _set_ticks(page, axes, sizes)
    return finish_lines(page, axes, labels)


def _draw_limit(page: Page, axes: Axes, limit: tuple[str, int], last: int) -> Annotation:
    """Draw a line across, or an arrow at the end of the axis that it lies beyond."""
    low, high = axes.get_ylim()
    words, nbytes = limit_words(limit), float(limit[1])
    if low < nbytes < high:
        axes.axhline(nbytes, color=page.theme.text, linewidth=1.2, dashes=(4, 2), gid="limit")
    else:
        words = f"{words} {'↑' if nbytes >= high else '↓'}"
    return beside(page, axes, (last, min(max(nbytes, low), high)), words, page.theme.text)


def _set_limits(axes: Axes, lines: Mapping[str, Points], limit: tuple[str, int] | None) -> None:
    values = [nbytes for line in lines.values() for _, nbytes in line]
    low, high = min(values), max(values)
    if limit is not None and low / _FARTHEST <= limit[1] <= high * _FARTHEST:
        low, high = min(low, limit[1]), max(high, limit[1])
    axes.set_ylim(low / 1.6, high * 1.6)


def _set_ticks(page: Page, axes: Axes, ranks: Sequence[int]) -> None:
    """Put bytes with units upwards; along the bottom those numbers of ranks that have room."""
    low, high = axes.get_ylim()
    between = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high < 10 * low else (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    ticks(axes.yaxis, LogLocator(10, subs=between, numticks=12), tick_bytes)
    number_ticks(page, axes, ranks, lambda number: f"{number:,}")
