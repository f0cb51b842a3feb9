"""Bytes per rank against the number of ranks, one line per stage, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from zerosim.errors import InputError
from zerosim.report.plots.by_stage import MOMENTS
from zerosim.report.plots.page import Page, dress, finish, frame, inches, open_page, settle, stage_name, tick_bytes
from zerosim.report.plots.style import DASHES, LINE_PAINTS, MARKERS
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
    """`points` are (ranks, bytes per rank) by stage's name; `mark` is the moment at which they were counted.

    With a limit, points that fit are filled and those that do not are hollow. `size` is in inches, width first.
    Raises: InputError for no points, points that a logarithmic axis does not have, or an unknown theme.
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
        notes.append("Whether a run fits is decided by its peak: --mark peak.")
    frame(page, f"Bytes per rank {MOMENTS[mark]}, by number of ranks", subtitle, notes=notes)
    axes = page.figure.add_subplot()
    dress(page, axes, grid="both")
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels = [_draw_line(page, axes, index, name, line, limit) for index, (name, line) in enumerate(lines.items())]
    _set_limits(axes, lines, limit)
    if limit is not None:
        labels.append(_draw_limit(page, axes, limit, max(line[-1][0] for line in lines.values())))
    axes.set_xlabel("data-parallel ranks N", color=page.theme.muted, **page.font(scale=0.9))
    settle(page)
    _set_ticks(page, axes, sorted({ranks for line in lines.values() for ranks, _ in line}))
    finish(page)
    spread_labels(page, axes, labels)
    return page.figure


def _draw_line(
    page: Page, axes: Axes, index: int, name: str, line: Points, limit: tuple[str, int] | None
) -> Annotation:
    """A line with its marks; its label beside its end."""
    color = page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])
    marker, dashes = MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)]
    size = page.points * max(0.9 - 0.12 * index, 0.5)  # lines that meet: the later marks lie inside the earlier
    xs, ys = zip(*line, strict=True)
    axes.plot(xs, ys, color=color, linestyle=dashes, linewidth=1.6, gid=f"line.{name}")
    fill = [color if limit is None or nbytes <= limit[1] else page.theme.background for nbytes in ys]
    axes.scatter(xs, ys, s=size**2, marker=marker, c=fill, edgecolors=color, linewidths=1.3, zorder=3, clip_on=False)
    return beside(page, axes, line[-1], f"{stage_name(name)}  {format_bytes(line[-1][1])}", color)


def _draw_limit(page: Page, axes: Axes, limit: tuple[str, int], last: int) -> Annotation:
    """A line across, or an arrow at the end of the axis that it lies beyond."""
    low, high = axes.get_ylim()
    words, nbytes = limit_words(limit), float(limit[1])
    if low < nbytes < high:
        axes.axhline(nbytes, color=page.theme.text, linewidth=1.2, dashes=(4, 2), gid="limit")
    else:
        words = f"{words} {'↑' if nbytes >= high else '↓'}"
    return beside(page, axes, (last, min(max(nbytes, low), high)), words, page.theme.text)


def beside(page: Page, axes: Axes, where: tuple[float, float], words: str, color: str) -> Annotation:
    """A label right of the axes, tied to a point on it."""
    return axes.annotate(
        words, where, xycoords="data", xytext=(1.03, 0.5), textcoords="axes fraction", color=color, va="center",
        ha="left", annotation_clip=False, **page.font(scale=0.95),
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1,
                    "shrinkB": page.points * 0.5},
    )  # fmt: skip


def spread_labels(page: Page, axes: Axes, labels: list[Annotation], *, lines: int = 1) -> None:
    """Put each label, of so many lines, as near to its point's height as the others let it."""
    height = inches(page, axes)[1]
    pitch = min(page.points * 1.45 * lines / 72, height / len(labels)) / height
    order = sorted(labels, key=lambda label: label.xy[1])
    wanted = [axes.transAxes.inverted().transform(axes.transData.transform(label.xy))[1] for label in order]
    for label, place in zip(order, spread(wanted, pitch), strict=True):
        label.set_position((1.03, place))


def spread(wanted: Sequence[float], pitch: float) -> list[float]:
    """Rising places in [0, 1], at least `pitch` apart, each as near as may be to the wanted one."""
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


def _set_limits(axes: Axes, lines: Mapping[str, Points], limit: tuple[str, int] | None) -> None:
    values = [nbytes for line in lines.values() for _, nbytes in line]
    low, high = min(values), max(values)
    if limit is not None and low / _FARTHEST <= limit[1] <= high * _FARTHEST:
        low, high = min(low, limit[1]), max(high, limit[1])
    axes.set_ylim(low / 1.6, high * 1.6)
    ranks = [ranks for line in lines.values() for ranks, _ in line]
    axes.set_xlim(min(ranks) / 1.15, max(ranks) * 1.15)


def _set_ticks(page: Page, axes: Axes, ranks: Sequence[int]) -> None:
    """Bytes with units upwards; along the bottom those numbers of ranks that have room."""
    low, high = axes.get_ylim()
    between = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high < 10 * low else (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(10, subs=between, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: tick_bytes(value)))
    number_ticks(page, axes, ranks, lambda number: f"{number:,}")


def number_ticks(page: Page, axes: Axes, numbers: Sequence[int], words: Callable[[int], str]) -> None:
    """Along the bottom those of the numbers that have room."""
    width, low = inches(page, axes)[0], axes.get_ylim()[0]
    kept: list[int] = []
    ends: list[float] = []
    for number in sorted(numbers, reverse=True):  # the last has its label, for the lines' labels stand at it
        x = axes.transAxes.inverted().transform(axes.transData.transform((number, low)))[0] * width
        half = page.width(words(number), **page.font(scale=0.9)) / 2 + 0.05
        if not ends or x + half < ends[-1]:
            kept.append(number)
            ends.append(x - half)
    axes.set_xticks(kept, [words(number) for number in kept])
    axes.xaxis.set_minor_locator(NullLocator())
