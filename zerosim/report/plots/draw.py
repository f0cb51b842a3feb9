"""Draw a chart: one function for every picture. Panels get their axes and what stands around them first, then marks.

Only this module, `axes.py`, `marks.py`, `page.py` and `svg.py` need matplotlib. Nothing imports them until a picture is
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from zerosim.errors import wrong
from zerosim.report.plots.axes import end_of, fit, lines_in, name_rules, strips_in
from zerosim.report.plots.marks import draw_strip, line_color, mark_on
from zerosim.report.plots.page import (
    Page,
    Picture,
    dress,
    finish,
    frame,
    inches,
    list_looks,
    named,
    open_page,
    settle,
)
from zerosim.report.plots.page import write_figure as write_figure
from zerosim.report.plots.panel import Field, Line, Panel, Place, Rule, Sheet, Strip

_AWAY = 1.03  # of a panel's width: where the names of lines stand
_NARROWEST = 1.2  # inches of a panel beside its list


def draw(chart: Sheet, *, theme: str = "light", size: Place | None = None) -> Picture:
    """Draw a chart on a sheet of that size, in inches, width first.

    Raises: InputError for an unknown theme, and for a size that is impossible or too small for the chart.
    """
    page = open_page(size, theme, chart.size, chart.largest_type)
    frame(page, chart.title, chart.subtitle, [(words, page.look(paint)) for words, paint in chart.key], chart.notes)
    page.figure.alt = chart.alt
    across = math.lcm(*map(len, chart.rows))
    grid = page.figure.add_gridspec(
        len(chart.rows), across, height_ratios=chart.heights or None, width_ratios=chart.widths or None
    )
    drawn: list[tuple[Panel, Axes]] = []
    for number, row in enumerate(chart.rows):
        wide = across // len(row)
        for at, panel in enumerate(row):
            drawn.append((panel, page.figure.add_subplot(grid[number, at * wide : (at + 1) * wide])))
    labels = [_begin(page, axes, panel) for panel, axes in drawn]
    for _ in range(2):  # the room for words depends on the axes, and the axes' ends on the words
        settle(page)
        for panel, axes in drawn:
            end = max([panel.x.ends[1], *(end_of(page, one, on) for one, on in drawn if one.x.ends == panel.x.ends)])
            fit(page, axes, panel, end)
    finish(page)
    for (panel, axes), beside in zip(drawn, labels, strict=True):
        _spread(page, axes, beside)
        _check_list(page, axes)
        for mark in panel.marks:
            if not isinstance(mark, Strip | Field):
                mark_on(page, axes, mark)
        for at, strip in enumerate(panel.of(Strip)[: strips_in(lines_in(page, axes))]):
            draw_strip(page, axes, strip, at)
        name_rules(page, axes, panel)
    return page.figure


def write_chart(chart: Sheet, file: BinaryIO, form: str, *, theme: str = "light", size: Place | None = None) -> None:
    """Draw, and write as 'png' or 'svg'. Raises: InputError as `draw`."""
    write_figure(draw(chart, theme=theme, size=size), file, form)


# -- around the panels --------------------------------------------------------------------------
def _begin(page: Page, axes: Axes, panel: Panel) -> list[Annotation]:
    """Dress the axes; return the names beside them, each at its point's height."""
    axes.set_xlim(*panel.x.ends)
    axes.set_ylim(*panel.y.ends)
    if panel.title:
        axes.set_title(named(panel.title), loc="left", color=page.theme.text, **page.font(bold=True))
    dress(page, axes, grid=panel.grid, x=panel.x.label, y=named(panel.y.label))
    for side, axis in (("x", panel.x), ("y", panel.y)):
        if axis.log:
            (axes.set_xscale if side == "x" else axes.set_yscale)("log")
        if axis.rows or axis.hidden:
            axes.tick_params(axis=side, length=0, colors=page.theme.text)  # type: ignore[arg-type]
        if axis.hidden:
            axes.tick_params(axis=side, labelleft=False, labelbottom=False)  # type: ignore[arg-type]
    for field in panel.of(Field):
        mark_on(page, axes, field)
    if panel.bare:
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        axes.tick_params(
            bottom=False, labelbottom=False, left=False, labelleft=bool(panel.y.rows and not panel.y.hidden)
        )
    if panel.key:
        handles = [Rectangle((0, 0), 1, 1, **page.look(paint)) for _, paint in panel.key]
        axes.legend(handles, [words for words, _ in panel.key], loc="upper center", bbox_to_anchor=(0.5, -0.16),
                    ncols=4, handlelength=1.5, columnspacing=1.4, **list_looks(page))  # fmt: skip
    if panel.lists:
        _list(page, axes, panel.of(Line))
        return []
    labels = [
        _beside(page, axes, line.points[-1], line.words, line_color(page, line.number))
        for line in panel.of(Line)
        if line.words
    ]
    low, high = sorted(panel.y.ends)
    for rule in panel.of(Rule):
        if rule.y is not None and rule.words:
            words = rule.words if low <= rule.y <= high else f"{rule.words} {'↑' if rule.y > high else '↓'}"
            where = panel.x.ends[1], min(max(rule.y, low), high)
            labels.append(_beside(page, axes, where, words, page.theme.text))
    return labels


def _beside(page: Page, axes: Axes, where: Place, words: str, color: str) -> Annotation:
    """Return a label right of the axes, tied to a point on it."""
    return axes.annotate(
        named(words), where, xycoords="data", xytext=(_AWAY, 0.5), textcoords="axes fraction", color=color, va="center",
        ha="left", annotation_clip=False, **page.font(scale=0.95),
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1,
                    "shrinkB": page.points * 0.5},
    )  # fmt: skip


def _list(page: Page, axes: Axes, lines: Sequence[Line]) -> None:
    """Write a list of lines right of the axes, where it covers nothing."""
    for line in lines:
        mark_on(page, axes, line)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.2, labelspacing=0.7, **list_looks(page))
    for artist in list(axes.lines):
        artist.remove()


def _check_list(page: Page, axes: Axes) -> None:
    """Check the room of a list. Raises: InputError for a sheet on which it overlaps, or leaves the panel no room."""
    listed = axes.get_legend()
    if listed is not None and listed.get_window_extent(page.renderer).x0 >= axes.bbox.x1:
        low = axes.xaxis.label.get_window_extent(page.renderer).y0
        if listed.get_window_extent(page.renderer).y0 < low or inches(page, axes)[0] < _NARROWEST:
            raise wrong("size", f" {page.size[0]:g}x{page.size[1]:g}: too small for these lines and their list")


def _spread(page: Page, axes: Axes, labels: Sequence[Annotation]) -> None:
    """Move each label as near to its point's height as the others let it."""
    if not labels:
        return
    height, lines = inches(page, axes)[1], max(1 + label.get_text().count("\n") for label in labels)
    pitch = min(page.points * 1.45 * lines / 72, height / len(labels)) / height
    to_axes = axes.transAxes.inverted()
    wanted = {label: float(to_axes.transform(axes.transData.transform(label.xy))[1]) for label in labels}
    order = sorted(labels, key=wanted.__getitem__)
    for label, place in zip(order, spread([wanted[label] for label in order], pitch), strict=True):
        label.set_position((_AWAY, place))


def spread(wanted: Sequence[float], pitch: float) -> list[float]:
    """Return rising places in [0, 1], at least `pitch` apart, each as near as possible to the wanted one."""
    groups: list[list[float]] = []  # the wanted places of labels that touch: they stand around their mean

    def lowest(group: list[float]) -> float:
        return sum(group) / len(group) - (len(group) - 1) * pitch / 2

    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and lowest(groups[-2]) + len(groups[-2]) * pitch > lowest(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    places = [lowest(group) + pitch * at for group in groups for at in range(len(group))]
    places = [max(place, pitch * (at + 0.5)) for at, place in enumerate(places)]
    return [min(place, 1 - pitch * (len(places) - at - 0.5)) for at, place in enumerate(places)]
