"""Draw a chart: one function for every picture. Panels get their axes and what stands around them first, then marks.

Only this module, `marks.py`, `page.py` and `svg.py` need matplotlib, and nothing imports them until a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from zerosim.errors import wrong
from zerosim.report.plots.marks import GAP, STRIP, after_font, draw_strip, line_color, mark_on
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
from zerosim.report.plots.panel import Axis, Box, Field, Line, Panel, Place, Rule, Sheet, Strip

_AWAY = 1.03  # of a panel's width: where the names of lines stand
_BETWEEN = ((10, (1, 1.5, 2, 3, 5, 7)), (300, (1, 2, 5)), (3000, (1, 3)), (math.inf, (1,)))  # marks of a decade
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
            end = max([panel.x.ends[1], *(_end(page, one, on) for one, on in drawn if one.x.ends == panel.x.ends)])
            _fit(page, axes, panel, end)
    finish(page)
    for (panel, axes), beside in zip(drawn, labels, strict=True):
        _spread(page, axes, beside)
        _check_list(page, axes)
        for mark in panel.marks:
            if not isinstance(mark, Strip | Field):
                mark_on(page, axes, mark)
        for at, strip in enumerate(panel.of(Strip)[: _strips_in(_lines(page, axes))]):
            draw_strip(page, axes, strip, at)
        _name_rules(page, axes, panel)
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


# -- the axes -----------------------------------------------------------------------------------
def _fit(page: Page, axes: Axes, panel: Panel, end: float) -> None:
    """Give the axes their ends, with room above rows and curves for words, and their numbers."""
    width, height = inches(page, axes)
    if not panel.x.log:
        axes.set_xlim(panel.x.ends[0], end)
    low, high = panel.y.ends
    line = page.points * 1.5 / 72 / height
    if panel.y.rows and (above := len(_above(panel))):
        axes.set_ylim(low, low + (high - low) / max(1 - above * line, 0.3))
    if strips := panel.of(Strip):
        lines = _lines(page, axes)
        if lines < 3.2:
            wide, tall = page.size
            raise wrong("size", f" {wide:g}x{tall:g}: too low for so many ranks: expected more inches or fewer ranks")
        axes.set_ylim(low, high / max(1 - (min(len(strips), _strips_in(lines)) + 1.6) / lines, 0.25))
    for side, axis, room in (("x", panel.x, width), ("y", panel.y, height)):
        _number(page, axes, side, axis, room)


def _lines(page: Page, axes: Axes) -> float:
    """Return the axes' height in lines of text."""
    return inches(page, axes)[1] / (page.points * STRIP / 72)


def _strips_in(lines: float) -> int:
    """Return how many strips of names leave a curve its room."""
    return 2 if lines >= 9 else 1 if lines >= 5 else 0


def _end(page: Page, panel: Panel, axes: Axes) -> float:
    """Return the axis's end that leaves room for the words behind boxes."""
    width, ends = inches(page, axes)[0], [panel.x.ends[1]]
    for box in panel.of(Box):
        if box.after:
            share = (page.width(named(box.after), **after_font(page, box)) + 2 * GAP) / width
            ends.append(box.x[1] / max(1 - share, 0.2))
    return max(ends)


def _number(page: Page, axes: Axes, side: str, axis: Axis, room: float) -> None:
    """Put names or round numbers along one side, as many as have room."""
    of = axes.xaxis if side == "x" else axes.yaxis
    if axis.rows:
        line = page.points / 72
        is_low = side == "y" and room / len(axis.rows) < 2.9 * line
        of.set_ticks(range(len(axis.rows)), [named(name.replace("\n", " ") if is_low else name) for name in axis.rows])
        least = 0.75 if side == "x" and room / len(axis.rows) < 4 * line else 1.0
        axes.tick_params(axis=side, labelsize=page.points * least)  # type: ignore[arg-type]
        return
    low, high = sorted(axis.ends)
    most = max(2, int(room / 0.9)) if side == "x" else max(2, min(6, int(room / 0.35)))
    if axis.among:
        of.set_major_locator(FixedLocator(_fitting(page, axes, axis, room)))
    elif axis.log:
        many = next(steps for most_of, steps in _BETWEEN if high / low < most_of)
        of.set_major_locator(LogLocator(10, subs=many, numticks=most + 2 if high / low > 1e4 else 12))
    else:
        is_whole = axis.whole or (axis.words is not None and 2 < high < 10 and low == 0)
        of.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=is_whole))
    of.set_minor_locator(NullLocator())
    if (words := axis.words) is not None:
        of.set_major_formatter(lambda value, _: named(words(value)))


def _fitting(page: Page, axes: Axes, axis: Axis, room: float) -> list[float]:
    """Return those of an axis's numbers that have room along the bottom. The last is one of them, because lines' names
    stand at it."""
    kept: list[float] = []
    left = math.inf
    for number in sorted(axis.among, reverse=True):
        x = float(axes.transAxes.inverted().transform(axes.transData.transform((number, axes.get_ylim()[0])))[0]) * room
        words = axis.words(number) if axis.words else f"{number:g}"
        half = page.width(words, **page.font(scale=0.9)) / 2 + 0.05
        if x + half < left:
            kept.append(number)
            left = x - half
    return kept


# -- names of rules -----------------------------------------------------------------------------
def _above(panel: Panel) -> list[Rule]:
    """Return the upright rules whose names stand above rows, from left to right."""
    rules = [rule for rule in panel.of(Rule) if rule.x is not None and rule.words and panel.y.rows]
    return sorted(rules, key=lambda rule: rule.x or 0)


def _name_rules(page: Page, axes: Axes, panel: Panel) -> None:
    """Write the names of upright rules: above rows, each in a line of its own; else at the bottom."""
    low, end = axes.get_xlim()
    width, height = inches(page, axes)
    font, rules = page.font(scale=0.9), _above(panel) or [r for r in panel.of(Rule) if r.x is not None and r.words]
    for number, rule in enumerate(rules):
        assert rule.x is not None
        is_inside = rule.x <= end
        words = named(rule.words if is_inside else f"{rule.words}, beyond this axis \N{RIGHTWARDS ARROW}")
        x = min(rule.x, end)
        fits_right = is_inside and (x - low) / (end - low) * width + page.width(words, **font) + 0.08 <= width
        looks = {"ha": "left" if fits_right else "right", "bbox": page.ground(0.3), "zorder": 6} | font
        away = 4 if fits_right else -4
        if panel.y.rows:
            y = 1 - page.points * 1.5 / 72 / height * (number + 0.5)
            page.write(axes, words, (x, y), (away, 0), xycoords=axes.get_xaxis_transform(), **looks)
        else:
            at_bottom = looks | {"va": "bottom", "xycoords": axes.get_xaxis_transform()}
            page.write(axes, words, (x, 0), (away, 5), **at_bottom)
