"""Live bytes over one step, stacked by kind, for one rank or several: the tide of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from zerosim.device.events import Event
from zerosim.errors import InputError, wrong
from zerosim.report.names import kind_words
from zerosim.report.plots.axes import EVENTS, bytes_axis, events_axis
from zerosim.report.plots.history import COLUMNS, History, Span, read_history
from zerosim.report.plots.page import Page, describe, dress, finish, frame, ground, inches, open_page, plain
from zerosim.report.plots.style import KIND_PAINTS, in_order
from zerosim.report.plots.words import limit_words
from zerosim.report.words import moment
from zerosim.units import format_bytes

MOST_PANELS = 8
_MOST_NAMED = 5  # with more microbatches their bands may be too narrow for names
_FARTHEST = 1.6  # a limit beyond this many times the peak is named below the picture, so that the curve keeps its room
_SHORT = {
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "curvature_forward": "c. fwd",
    "curvature_backward": "c. bwd",
    "curvature": "c.",
}


def timeline_figure(
    histories: Sequence[Sequence[Event]],
    ranks: Sequence[int],
    step: int | None = None,
    *,
    names: Sequence[str] | None = None,
    limit: tuple[str, int] | None = None,
    subtitle: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw one panel per rank, on the same axes; `histories` are those ranks' whole records, in the order of `ranks`.

    To compare runs, give the same rank of each, and the runs' `names`. Along x are a rank's events in their order, not
    seconds. `step` None shows everything that was recorded. Raises: InputError if the lists do not match, for more than
    8 ranks, an unknown step or theme.
    """
    names = [f"rank {rank}" for rank in ranks] if names is None else names
    if len(names) != len(ranks):
        raise InputError(f"{len(names)} names for {len(ranks)} panels: expected one for each")
    if len(histories) != len(ranks) or not ranks:
        raise InputError(f"{len(histories)} histories for {len(ranks)} ranks: expected one for each, at least one")
    if len(ranks) > MOST_PANELS:
        raise InputError(f"{len(ranks)} ranks: expected at most {MOST_PANELS} in one picture; choose fewer")
    shown = [read_history(events, step) for events in histories]
    page = open_page(size, theme, (8.0, 4.5 if len(ranks) == 1 else min(2.0 + 1.7 * len(ranks), 12.0)))
    live = [pair for history in shown for pair in zip(history.kinds, history.live, strict=True)]
    kinds = in_order(dict.fromkeys(kind for kind, nbytes in live if nbytes.any()), KIND_PAINTS)
    what = "everything recorded" if step is None else f"step {step}"
    who = f"rank {ranks[0]}" if len(set(ranks)) == 1 else f"{len(ranks)} ranks"
    key = [(kind_words(kind), page.paint(kind, KIND_PAINTS)) for kind in kinds]
    frame(page, f"Live bytes on {who}, {what}", subtitle, key, _notes(shown, limit))
    panels = page.figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    most = max(history.peak.nbytes for history in shown) or 1
    for axes, history, name in zip(panels, shown, names, strict=True):
        draw_panel(page, axes, history, kinds, most)
        if len(ranks) > 1:
            axes.set_ylabel(plain(name), color=page.theme.text, **page.font())
    panels[-1].set_xlabel(EVENTS, color=page.theme.muted, **page.font(scale=0.9))
    panels[0].set_xlim(0, max(history.num_events for history in shown))
    events_axis(page, panels[-1])
    num_strips = strips(page, panels[0])
    near = limit if limit is not None and limit[1] <= _FARTHEST * most else None
    set_heights(page, panels[0], most, near, num_strips)
    finish(page)
    for axes, history, name in zip(panels, shown, names, strict=True):
        for row, spans in enumerate((history.phases, history.units)[:num_strips]):
            draw_strip(page, axes, spans, row, banded=row == 0)
        label = mark_peak(page, axes, history, step, 0 if limit is None else limit[1])
        describe(page, f"{name}: {label.get_text()}.")
        if near is not None:
            _draw_limit(page, axes, near, label)
    return page.figure


def _notes(shown: Sequence[History], limit: tuple[str, int] | None) -> list[str]:
    notes = []
    if any(history.num_events >= len(history.at) for history in shown):
        notes.append("Each pixel column shows its minimum and maximum.")
    turns = max(sum(span.name == "forward" for span in history.phases) for history in shown)
    if turns > _MOST_NAMED:
        notes.append(f"Bands: forward and backward in turn, {turns} times, then the optimizer.")
    peak = max(history.peak.nbytes for history in shown)
    if limit is not None and limit[1] > _FARTHEST * peak:
        notes.append(f"Above this axis: {limit_words(limit)}.")
    return notes


def draw_panel(page: Page, axes: Axes, history: History, kinds: Sequence[str], most: int) -> None:
    dress(page, axes, grid="y")
    bytes_axis(axes.yaxis, most, 4)
    rows = dict(zip(history.kinds, history.live, strict=True))
    at = np.append(history.at, history.num_events)
    shown = [kind for kind in kinds if kind in rows]
    tops = np.cumsum([np.append(rows[kind], rows[kind][-1]) for kind in shown], axis=0)
    for kind, top in zip(reversed(shown), tops[::-1], strict=True):  # each area begins at 0, and the next lies on it
        paint = page.paint(kind, KIND_PAINTS) | {"linewidth": 0}
        axes.fill_between(at, 0, top, step="post", gid=f"area.{kind}", **paint)
    width = 0.7 if len(at) < COLUMNS else 0.4
    axes.step(at, tops[-1], where="post", color=page.theme.text, linewidth=width, gid="total")


def set_heights(page: Page, axes: Axes, most: int, near: tuple[str, int] | None, num_strips: int) -> None:
    """Make room above the highest peak, and above a limit near it, for a label and the strips."""
    most = most if near is None else max(most, near[1])
    axes.set_ylim(0, most / max(1 - _row(page, axes) * (num_strips + 1.6), 0.25))
    bytes_axis(axes.yaxis, most, max(2, min(6, int(inches(page, axes)[1] / 0.45))))


def strips(page: Page, axes: Axes) -> int:
    """Return how many strips of names leave the curve its room. Raises: InputError if one label has none."""
    lines = 1 / _row(page, axes)
    if lines < 3.2:
        width, height = page.size
        raise wrong("size", f" {width:g}x{height:g}: too low for so many ranks: expected more inches or fewer ranks")
    return 2 if lines >= 9 else 1 if lines >= 5 else 0


def _row(page: Page, axes: Axes) -> float:
    """Return a line of text as a share of the axes' height."""
    return page.points * 1.3 / 72 / inches(page, axes)[1]


def draw_strip(page: Page, axes: Axes, spans: Sequence[Span], row: int, *, banded: bool) -> None:
    """Write names above the curve, each at its events; one that does not fit is left out."""
    pitch, width = _row(page, axes), inches(page, axes)[0]
    low, high = 1 - pitch * (row + 1), 1 - pitch * row
    events = axes.get_xlim()[1]
    font, across = page.font(scale=0.85 if banded else 0.75), axes.get_xaxis_transform()
    for index, span in enumerate(spans):
        room = (span.end - span.start) / events * width
        if room < 0.02:
            continue
        if banded:
            color = page.theme.band if index % 2 else page.theme.grid
            axes.axvspan(span.start, span.end, low, high, facecolor=color, linewidth=0, gid=f"phase.{span.name}")
            axes.axvline(span.start, color=page.theme.grid, linewidth=0.8, zorder=0.5)
        words = (span.name, _SHORT.get(span.name, ""))
        fitting = next((word for word in words if word and page.width(word, **font) + 0.06 <= room), "")
        if fitting:
            color = page.theme.text if banded else page.theme.muted
            place = (span.start + span.end) / 2, (low + high) / 2
            page.write(axes, plain(fitting), place, color=color, xycoords=across, **font)


def mark_peak(page: Page, axes: Axes, history: History, step: int | None, limit: int) -> Annotation:
    """Draw a dot where the most bytes are live, with how many and where: inside the axes' width, not across the
    limit."""
    peak, font = history.peak, page.font(scale=0.9, bold=True)
    events, width = axes.get_xlim()[1], inches(page, axes)[0]
    scope = peak.scope
    when = moment(scope.step, scope.phase, scope.unit)
    if step is not None and scope.step == step:
        when = when.removeprefix(f"in step {step}, ")
    x = peak.index + 1.0
    axes.plot([x], [peak.nbytes], marker="o", markersize=page.points * 0.45, color=page.theme.text,
              markeredgecolor=page.theme.background, clip_on=False, zorder=6, gid="peak")  # fmt: skip
    words = f"peak {format_bytes(peak.nbytes)}"
    for longer in (f"{words}, {when}", f"{words}, {scope.phase}", words):
        if page.width(longer, **font) <= width - 0.1:
            words = longer
            break
    half = page.width(words, **font) / 2
    place = min(max(x / events * width, half + 0.05), width - half - 0.05) / width * events
    reach = peak.nbytes + 1.4 * _row(page, axes) * axes.get_ylim()[1]
    height = limit if peak.nbytes <= limit < reach else peak.nbytes
    above = 0, page.points * 0.45
    return page.write(axes, plain(words), (place, height), above, va="bottom", zorder=6, gid="peak label", **font)


def _draw_limit(page: Page, axes: Axes, limit: tuple[str, int], peak: Annotation) -> None:
    """Draw a line across, its label at either end above or below it, one line of text away or two: off the peak's."""
    axes.axhline(limit[1], color=page.theme.background, linewidth=2.8, zorder=4)
    axes.axhline(limit[1], color=page.theme.text, linewidth=1.3, dashes=(4, 2), zorder=4, gid="limit")
    words, font, box = limit_words(limit), page.font(scale=0.9), ground(page.theme.background)
    taken, line, across = page.extent(peak), page.points * 1.3, axes.get_yaxis_transform()
    for offset, (x, ha) in product((3, -3, 3 + line, -3 - line), ((1.0, "right"), (0.0, "left"))):
        away = -4 if ha == "right" else 4, offset
        looks = {"ha": ha, "va": "bottom" if offset > 0 else "top", "zorder": 5, "gid": "limit label"} | font
        label = page.write(axes, words, (x, limit[1]), away, xycoords=across, bbox=box, **looks)
        if not page.extent(label).overlaps(taken):
            return
        label.remove()
