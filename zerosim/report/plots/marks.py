"""How each kind of mark is drawn on a panel's axes, which have their place and their ends by now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap

from zerosim.report.plots.page import Page, inches, named
from zerosim.report.plots.panel import Areas, Arrow, Box, Boxes, Field, Line, Mark, Note, Peak, Place, Rule, Strip
from zerosim.report.plots.style import DASHES, LINE_PAINTS, MARKERS, ink_on, mixed

GAP = 0.055  # inches, left and right of a text
_THINNEST = 0.02  # inches of the thinnest visible box
_LEAST = 0.12 / 72  # inches: of many boxes, those thinner than an eighth of a point are not drawn
STRIP = 1.3  # of the font's size: the height of a strip
_LEVELS = 14  # lines of equal value


def line_color(page: Page, index: int) -> str:
    return page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])


def mark_on(page: Page, axes: Axes, mark: Mark) -> None:
    """Draw one mark. Strips have their place by number (`draw_strip`)."""
    _DRAWN[type(mark)](page, axes, mark)


def after_font(page: Page, box: Box) -> dict[str, Any]:
    """Return keywords of the words behind a box."""
    return page.font(scale=box.scale / 0.85, bold=box.scale >= 0.85)


def _places(axes: Axes, *places: Place) -> Any:
    """Return places in inches of the sheet."""
    return axes.transData.transform(places) / axes.figure.dpi


def _box(page: Page, axes: Axes, box: Box) -> None:
    (left, _), (right, _) = _places(axes, (box.x[0], box.y[0]), (box.x[1], box.y[0]))
    start, wide, looks = box.x[0], box.x[1] - box.x[0], page.look(box.paint)
    if 0 < right - left < 2 * _THINNEST:  # no edge hides a thin box
        looks |= {"linewidth": 0}
        wide *= max(1.0, _THINNEST / (right - left))
    if wide:
        axes.bar(start, box.y[1] - box.y[0], wide, box.y[0], align="edge", gid=box.name, **looks)
    middle, color, font = (box.y[0] + box.y[1]) / 2, page.theme.color(box.paint), page.font(scale=box.scale)
    if fitting := _fitting(page, box.words, right - left - GAP, font):
        page.write(axes, named(fitting), ((box.x[0] + box.x[1]) / 2, middle), color=ink_on(color), zorder=4,
                   bbox=page.ground(0.1, color), gid=f"{box.name} label", **font)  # fmt: skip
    if box.after:
        page.write(axes, named(box.after), (box.x[1], middle), (72 * GAP, 0), ha="left", bbox=page.ground(), zorder=5,
                   gid=f"{box.name} total", **after_font(page, box))  # fmt: skip


def _fitting(page: Page, words: Iterable[str], room: float, font: Mapping[str, Any]) -> str:
    """Return the first of the words that fits, or none."""
    return next((word for word in words if word and page.width(named(word), **font) <= room), "")


def _boxes(page: Page, axes: Axes, boxes: Boxes) -> None:
    width, height = inches(page, axes)
    wide, high = (abs(b - a) / room * _LEAST for (a, b), room in ((axes.get_xlim(), width), (axes.get_ylim(), height)))
    corners = [
        [(left, low), (right, low), (right, high_), (left, high_)]
        for left, low, right, high_ in boxes.corners
        if right - left >= wide and (high_ - low >= high or axes.get_yscale() == "log")
    ]
    looks = page.look(boxes.paint) | {"linewidth": 0.0}
    axes.add_collection(PolyCollection(corners, gid=boxes.name, zorder=2, **looks), autolim=False)


def _line(page: Page, axes: Axes, line: Line) -> None:
    color, index = line_color(page, line.number), line.number
    xs, ys = zip(*line.points, strict=True)
    if line.band:
        at, lows, highs = zip(*line.band, strict=True)
        axes.fill_between(at, lows, highs, color=color, alpha=0.13, linewidth=0, gid=f"band.{line.name}")
    marker, dashes = MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)]
    looks: dict[str, Any] = {"marker": ""}
    if line.filled is None and line.style != "-":  # where lines overlap, the earlier ones show at the edges
        looks = {"marker": marker, "markersize": 0.6 * page.points, "markevery": None if line.style else [-1],
                 "markeredgecolor": page.theme.background, "markeredgewidth": 0.6}  # fmt: skip
    axes.plot(xs, ys, color=color, linestyle="none" if line.style == "o" else dashes, linewidth=2.0 - 0.1 * index,
              label=named(line.words or line.name), clip_on=False, gid=f"line.{line.name}", zorder=3 + index / 100,
              **looks)  # fmt: skip
    if line.filled is not None:  # of lines that meet, later marks lie inside earlier ones
        fill = [color if is_filled else page.theme.background for is_filled in line.filled]
        size = page.points * max(0.9 - 0.12 * index, 0.5) * (0.6 if len(xs) > 12 else 1)
        axes.scatter(xs, ys, s=size**2, marker=marker, c=fill, edgecolors=color, linewidths=1.3, zorder=4,
                     clip_on=False)  # fmt: skip


def _areas(page: Page, axes: Axes, areas: Areas) -> None:
    stack = zip(areas.names, areas.paints, np.cumsum(areas.values, axis=0), strict=True)
    for name, paint, top in reversed(list(stack)):  # each begins at 0, and the next lies on it
        looks = page.look(paint) | {"linewidth": 0}
        axes.fill_between(areas.at, 0, top, step="post", gid=f"area.{name}", **looks)
    width = 0.7 if len(areas.at) < 1200 else 0.4
    axes.step(areas.at, np.sum(areas.values, axis=0), where="post", color=page.theme.text, linewidth=width, gid="total")


def _rule(page: Page, axes: Axes, rule: Rule) -> None:
    across = axes.axvline if rule.y is None else axes.axhline
    at, ends = (rule.x, axes.get_xlim()) if rule.y is None else (rule.y, axes.get_ylim())
    if at is not None and min(ends) <= at <= max(ends):
        across(at, color=page.theme.background, linewidth=2.8, zorder=3)  # visible on every paint
        across(at, color=page.theme.text, linewidth=1.3, dashes=(4, 2), zorder=3, gid="rule")


def _note(page: Page, axes: Axes, note: Note) -> None:
    ha, va = note.align.split()
    looks: dict[str, Any] = {"ha": ha, "va": va, "zorder": 6, **page.font(scale=note.scale, bold=note.bold)}
    looks["color"] = page.theme.color(note.paint) if note.paint else page.theme.text
    looks["bbox"] = page.ground(0.05)
    if note.card is not None:
        fill = page.theme.color(note.card)
        looks |= {"color": ink_on(fill), "bbox": page.ground(0.45, fill) | {"boxstyle": "round,pad=0.45"}}
    away = note.away[0] * page.points, note.away[1] * page.points
    page.write(axes, named(note.words), note.where, away, **looks)


def _peak(page: Page, axes: Axes, peak: Peak) -> None:
    axes.plot(*peak.where, marker="o", markersize=page.points * 0.45, color=page.theme.text,
              markeredgecolor=page.theme.background, clip_on=False, zorder=6, gid="peak")  # fmt: skip
    font, width, (low, end) = page.font(scale=0.9, bold=True), inches(page, axes)[0], axes.get_xlim()
    words = _fitting(page, peak.words, width - 0.1, font) or peak.words[-1]
    half = (page.width(named(words), **font) / 2 + 0.05) / width * (end - low)
    place = min(max(peak.where[0], low + half), end - half)
    page.write(axes, named(words), (place, peak.where[1]), (0, page.points * 0.45), va="bottom", zorder=6,
               bbox=page.ground(0.05), gid="peak label", **font)  # fmt: skip


def draw_strip(page: Page, axes: Axes, strip: Strip, row: int) -> None:
    """Write names above the curve, each at its stretch; one that does not fit is left out."""
    width, height = inches(page, axes)
    pitch = page.points * STRIP / 72 / height
    low, high, end = 1 - pitch * (row + 1), 1 - pitch * row, axes.get_xlim()[1]
    font = page.font(scale=0.85 if strip.banded else 0.75)
    for index, (*names, start, stop) in enumerate(strip.spans):
        room = (stop - start) / end * width
        if room < 0.02:
            continue
        if strip.banded:
            color = page.theme.band if index % 2 else page.theme.grid
            axes.axvspan(start, stop, low, high, facecolor=color, linewidth=0, gid=f"phase.{names[0]}")
            axes.axvline(start, color=page.theme.grid, linewidth=0.8, zorder=0.5)
        if fitting := _fitting(page, names, room - 0.06, font):
            color, place = page.theme.text if strip.banded else page.theme.muted, ((start + stop) / 2, (low + high) / 2)
            page.write(axes, named(fitting), place, color=color, xycoords=axes.get_xaxis_transform(), **font)


def _arrow(page: Page, axes: Axes, arrow: Arrow) -> None:
    shrink = (1.5 if arrow.both else 1.75) * page.points
    looks = {
        "arrowstyle": f"{'<|-|>' if arrow.both else '-|>'},head_width=0.28,head_length=0.6", "shrinkA": shrink,
        "shrinkB": shrink, "color": page.theme.color(arrow.paint), "linewidth": 0.6 + 1.6 * arrow.weight,
        "mutation_scale": page.points * (0.45 if arrow.both else 0.8), "connectionstyle": f"arc3,rad={arrow.bend}",
    }  # fmt: skip
    axes.annotate("", arrow.end, xytext=arrow.start, arrowprops=looks, annotation_clip=False)


def _field(page: Page, axes: Axes, field: Field) -> None:
    theme = page.theme
    if field.paint is not None:
        shades = LinearSegmentedColormap.from_list("shades", [theme.background, theme.color(field.paint)])
        drawn = axes.imshow(field.values, aspect="auto", cmap=shades, vmin=0.0, interpolation="nearest", zorder=2)
        bar = page.figure.colorbar(drawn, ax=axes, pad=0.02)
        bar.ax.tick_params(colors=theme.text, labelsize=page.points * 0.85)
        return
    axes.grid(visible=False)  # levels follow from the areas below them, so that fields of any scale have as many
    levels = np.unique(np.quantile(field.values, np.linspace(0, 1, _LEVELS + 2) ** 1.5))
    ground = LinearSegmentedColormap.from_list("ground", [theme.background, theme.band])
    shades_ = [ground(at) for at in np.linspace(0, 1, len(levels) - 1)]
    axes.contourf(field.xs, field.ys, field.values, levels=levels, colors=shades_, zorder=0)
    axes.contour(field.xs, field.ys, field.values, levels=levels[1:-1], colors=mixed(theme.grid, theme.muted),
                 linewidths=0.5, linestyles="solid", zorder=1)  # fmt: skip


_DRAWN: Mapping[type, Callable[[Page, Axes, Any], None]] = {
    Box: _box, Boxes: _boxes, Line: _line, Areas: _areas, Rule: _rule, Note: _note, Peak: _peak, Arrow: _arrow,
    Field: _field,
}  # fmt: skip
