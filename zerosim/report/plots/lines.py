"""Common parts of line pictures: a line with its marks, its name beside it, and numbers below that have room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import NullLocator

from zerosim.report.plots.page import Page, Place, describe, dress, finish, inches
from zerosim.report.plots.style import DASHES, LINE_PAINTS, MARKERS

Mark = tuple[float, float, bool]
"""A point of a line, and whether its mark is filled, not hollow."""


Band = tuple[float, float]
"""The lowest and the highest value of a line at one place."""
BAND = "Band: the range of 8 of 10 measured steps of this kind. Lines whose bands overlap are not ranked."


def log_axes(page: Page, x: str, xs: Sequence[float]) -> Axes:
    """Return axes on the page, logarithmic along the bottom from the least of `xs` to the most; `x` is their label."""
    axes = dress(page, page.figure.add_subplot(), grid="both", x=x)
    axes.set_xscale("log")
    axes.set_xlim(min(xs) / 1.15, max(xs) * 1.15)
    return axes


def draw_line(
    page: Page, axes: Axes, index: int, name: str, points: Sequence[Mark], words: str, width: float = 1.6, **marks: Any
) -> Annotation:
    """Draw the line of that index through its points, with `words` beside its end; `marks` are keywords that replace
    the usual marks."""
    color = page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])
    size = page.points * max(0.9 - 0.12 * index, 0.5)  # lines that meet: later marks lie inside earlier ones
    usual = {"s": size**2, "linewidths": 1.3, "clip_on": False}
    xs, ys, is_filled = zip(*points, strict=True)
    axes.plot(xs, ys, color=color, linestyle=DASHES[index % len(DASHES)], linewidth=width, gid=f"line.{name}")
    fill = [color if one else page.theme.background for one in is_filled]
    axes.scatter(xs, ys, marker=MARKERS[index % len(MARKERS)], c=fill, edgecolors=color, zorder=3, **{**usual, **marks})
    return beside(page, axes, (xs[-1], ys[-1]), words, color)


def draw_band(page: Page, axes: Axes, index: int, name: str, xs: Sequence[float], ends: Sequence[Band | None]) -> None:
    """Draw the range of the line of that index behind it; nothing if it is unknown."""
    known = [(x, *end) for x, end in zip(xs, ends, strict=True) if end is not None]
    if known:
        places, lows, highs = (list(values) for values in zip(*known, strict=True))
        color = page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])
        axes.fill_between(places, lows, highs, color=color, alpha=0.13, linewidth=0, gid=f"band.{name}")


def beside(page: Page, axes: Axes, where: Place, words: str, color: str) -> Annotation:
    """Return a label right of the axes, tied to a point on it."""
    return axes.annotate(
        words, where, xycoords="data", xytext=(1.03, 0.5), textcoords="axes fraction", color=color, va="center",
        ha="left", annotation_clip=False, **page.font(scale=0.95),
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1,
                    "shrinkB": page.points * 0.5},
    )  # fmt: skip


def finish_lines(page: Page, axes: Axes, labels: list[Annotation], *, lines: int = 1) -> Figure:
    """Return the finished figure, each label, of so many lines, as near to its point's height as the others let it."""
    finish(page)
    describe(page, f"Lines: {'; '.join(' '.join(label.get_text().split()) for label in labels)}.")
    height = inches(page, axes)[1]
    pitch = min(page.points * 1.45 * lines / 72, height / len(labels)) / height
    order = sorted(labels, key=lambda label: label.xy[1])
    wanted = [axes.transAxes.inverted().transform(axes.transData.transform(label.xy))[1] for label in order]
    for label, place in zip(order, spread(wanted, pitch), strict=True):
        label.set_position((1.03, place))
    return page.figure


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


def number_ticks(page: Page, axes: Axes, numbers: Sequence[int], words: Callable[[int], str]) -> None:
    """Put those of the numbers along the bottom that have room."""
    width, low = inches(page, axes)[0], axes.get_ylim()[0]
    kept: list[int] = []
    ends: list[float] = []
    for number in sorted(numbers, reverse=True):  # the last has its label, because the lines' labels stand at it
        x = axes.transAxes.inverted().transform(axes.transData.transform((number, low)))[0] * width
        half = page.width(words(number), **page.font(scale=0.9)) / 2 + 0.05
        if not ends or x + half < ends[-1]:
            kept.append(number)
            ends.append(x - half)
    axes.set_xticks(kept, [words(number) for number in kept])
    axes.xaxis.set_minor_locator(NullLocator())
