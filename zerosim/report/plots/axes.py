"""A panel's axes: their ends, with room for words, their numbers, and the names of rules across them."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from zerosim.errors import wrong
from zerosim.report.plots.marks import GAP, STRIP, after_font
from zerosim.report.plots.page import Page, inches, named
from zerosim.report.plots.panel import Axis, Box, Panel, Rule, Strip

_BETWEEN = ((10, (1, 1.5, 2, 3, 5, 7)), (300, (1, 2, 5)), (3000, (1, 3)), (math.inf, (1,)))  # marks of a decade


def fit(page: Page, axes: Axes, panel: Panel, end: float) -> None:
    """Give the axes their ends, with room above rows and curves for words, and their numbers."""
    width, height = inches(page, axes)
    if not panel.x.log:
        axes.set_xlim(panel.x.ends[0], end)
    low, high = panel.y.ends
    line = page.points * 1.5 / 72 / height
    if panel.y.rows and (above := len(_above(panel))):
        axes.set_ylim(low, low + (high - low) / max(1 - above * line, 0.3))
    if strips := panel.of(Strip):
        lines = lines_in(page, axes)
        if lines < 3.2:
            wide, tall = page.size
            raise wrong("size", f" {wide:g}x{tall:g}: too low for so many ranks: expected more inches or fewer ranks")
        axes.set_ylim(low, high / max(1 - (min(len(strips), strips_in(lines)) + 1.6) / lines, 0.25))
    for side, axis, room in (("x", panel.x, width), ("y", panel.y, height)):
        _number(page, axes, side, axis, room)


def lines_in(page: Page, axes: Axes) -> float:
    """Return the axes' height in lines of text."""
    return inches(page, axes)[1] / (page.points * STRIP / 72)


def strips_in(lines: float) -> int:
    """Return how many strips of names leave a curve its room."""
    return 2 if lines >= 9 else 1 if lines >= 5 else 0


def end_of(page: Page, panel: Panel, axes: Axes) -> float:
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


def name_rules(page: Page, axes: Axes, panel: Panel) -> None:
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
