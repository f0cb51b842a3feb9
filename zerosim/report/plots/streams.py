"""A step in time: for each rank a lane of compute and one of communication, and live bytes below. Modelled seconds.

The clock's seconds (`ledger/clock.py`). A lane's uninterrupted work for one microbatch is one bar. Hatched: compute
waits for another rank, which is the bubble. All streams but that of compute share the second lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from zerosim.device.events import COMPUTE, CPU, Event
from zerosim.errors import InputError, wrong
from zerosim.ledger.clock import Timeline
from zerosim.ledger.tracks import Track
from zerosim.report.names import kind_words, listed
from zerosim.report.plots.axes import BLOCK, block, bytes_axis, rows_axis, ticks
from zerosim.report.plots.history import InTime, live_in_time
from zerosim.report.plots.page import Page, describe, dress, finish, frame, inches, open_page, settle
from zerosim.report.plots.style import KIND_PAINTS, in_order
from zerosim.verbs import MESSAGES

MOST_RANKS = 8
_PAINTS = {
    "forward": KIND_PAINTS["param"],
    "backward": KIND_PAINTS["optim"],
    "optimizer": KIND_PAINTS["grad"],
    "collective": KIND_PAINTS["activation"],
    "message": KIND_PAINTS["unsharded_param"],
    "copy": KIND_PAINTS["unsharded_grad"],
}
BUBBLE = "waits for other ranks"
COMMUNICATION = "communication"
LANES = (COMPUTE, CPU, COMMUNICATION)
_THINNEST = 0.02  # inches of the thinnest visible bar


class Bar(NamedTuple):
    """One lane's work for a while. `what` names a paint; `words` are written in it if they fit."""

    lane: str
    what: str
    words: str
    start: float
    stop: float


def streams_figure(
    timeline: Timeline,
    ranks: Sequence[int],
    *,
    events: Sequence[Event] = (),
    step: int = 0,
    subtitle: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw the lanes of these ranks, which were simulated in detail, above the live bytes of the first of them: by kind
    with its whole record, `events`, and else in all.

    Raises: InputError for more than 8 ranks, and for one that was not simulated.
    """
    for rank in ranks:
        if rank not in timeline.tracks:
            known = ", ".join(map(str, sorted(timeline.tracks)))
            raise wrong("rank", f" {rank} was not simulated: another one stands for it; expected one of {known}")
    if not 1 <= len(ranks) <= MOST_RANKS:
        raise InputError(f"{len(ranks)} ranks: expected 1 to {MOST_RANKS} in one picture")
    every = [(rank, lane, bars_of(timeline.tracks[rank], lane)) for rank in ranks for lane in LANES]
    lanes = [(rank, lane, bars) for rank, lane, bars in every if bars]
    live = _live(timeline.tracks[ranks[0]], events, step)
    page = open_page(size, theme, (10.0, min(4.6 + 0.5 * len(lanes), 14.0)))
    used = dict.fromkeys(bar.what for _, _, bars in lanes for bar in bars)
    key = [(what, {"facecolor": page.theme.color(paint)}) for what, paint in _PAINTS.items() if what in used]
    key += [(BUBBLE, _hatched(page))] if BUBBLE in used else []
    seen = dict.fromkeys(kind for kind, row in zip(live.kinds, live.live, strict=True) if row.any())
    kinds = in_order(seen, KIND_PAINTS)
    last = timeline.last
    waits = {"for other ranks": last.bubble, **{f"for {axis}": seconds for axis, seconds in last.exposed.items()}}
    waits |= {"for copies": last.copies, "for its CPU": last.cpu}
    words = [f"{seconds_words(seconds)} {what}" for what, seconds in waits.items() if seconds]
    notes = [f"Rank {last.rank} ends last" + (f"; it waits {listed(words)}." if words else ".")]
    notes.append("Empty stretches of compute are waits for a collective, a message, a copy or the CPU to end.")
    notes.append("Seconds are modelled, not measured.")
    frame(page, f"A step of {seconds_words(timeline.seconds)}", subtitle, key, notes)
    above, below = page.figure.subplots(2, 1, sharex=True, height_ratios=[max(1.3, 0.5 * len(lanes)), 1.9])
    dress(page, above, grid="x")
    shown = [(rank, "its host's CPU" if lane == CPU else lane) for rank, lane, _ in lanes]
    names = [f"rank {rank}: {lane}" if len(ranks) > 1 else lane for rank, lane in shown]
    rows_axis(page, above, names, 0.9)
    above.set_xlim(0, timeline.seconds)
    _draw_memory(page, below, live, kinds, timeline.seconds)
    below.set_ylabel(f"live bytes, rank {ranks[0]}", color=page.theme.text, **page.font(scale=0.9))
    ticks(below.xaxis, MaxNLocator(8), seconds_words)
    handles = [Rectangle((0, 0), 1, 1, **page.paint(kind, KIND_PAINTS)) for kind in kinds]
    below.legend(
        handles, [kind_words(kind) for kind in kinds], loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False,
        ncols=4, labelcolor=page.theme.text, prop=_legend_font(page), handlelength=1.5, columnspacing=1.4,
    )  # fmt: skip
    describe(page, f"Live bytes of {listed([kind_words(kind) for kind in kinds])}.")
    settle(page)
    for row, (rank, lane, bars) in enumerate(lanes):
        _draw_lane(page, above, row, f"rank{rank}.{lane}", bars)
    return finish(page)


def bars_of(track: Track, lane: str) -> list[Bar]:
    """Return a lane's bars, neighbours of one kind and microbatch joined."""
    bars: list[Bar] = []
    for bar in sorted(_pieces(track, lane), key=lambda bar: bar.start):
        before = bars[-1] if bars else None
        if before is not None and (before.what, before.words) == (bar.what, bar.words) and bar.start <= before.stop:
            bars[-1] = before._replace(stop=max(before.stop, bar.stop))
        else:
            bars.append(bar)
    return bars


def _pieces(track: Track, lane: str) -> Iterator[Bar]:
    for span in track.spans:
        if span.stop == span.start or lane != (span.stream if span.stream in (COMPUTE, CPU) else COMMUNICATION):
            continue
        phase = span.scope.phase.removeprefix("curvature_")
        if span.name == "wait":
            if span.bubble[1] > span.bubble[0]:
                yield Bar(lane, BUBBLE, "", *span.bubble)
        elif lane in (COMPUTE, CPU):
            words = f"{phase[0].upper()}{span.scope.slot}" if phase in ("forward", "backward") else ""
            words = f"c{words}" if phase != span.scope.phase else words  # of an estimate of curvature
            yield Bar(lane, phase if phase in _PAINTS else "optimizer", words, span.start, span.stop)
        elif span.name in MESSAGES:
            yield Bar(lane, "message", "", span.start, span.stop)
        else:
            yield Bar(lane, "copy" if span.name == "copy" else "collective", "", span.start, span.stop)


def _draw_lane(page: Page, axes: Axes, row: int, gid: str, bars: Sequence[Bar]) -> None:
    width, seconds = inches(page, axes)[0], axes.get_xlim()[1]
    thinnest = _THINNEST / width * seconds
    for bar in sorted(bars, key=lambda bar: bar.start - bar.stop):  # of simultaneous ones the shorter lies above
        length = bar.stop - bar.start
        if bar.what == BUBBLE:
            axes.barh(row, length, BLOCK, left=bar.start, gid=f"{gid}.{BUBBLE}", **_hatched(page))
            continue
        edge = 0.4 if length > 2 * thinnest else 0.0  # no edge hides a thin bar
        span, color = (bar.start, max(bar.stop, bar.start + thinnest)), page.theme.color(_PAINTS[bar.what])
        block(page, axes, row, span, color, (bar.words, bar.words[1:]), scale=0.8, gid=gid, linewidth=edge)


def _hatched(page: Page) -> dict[str, Any]:
    """Return keywords of the bubble's area."""
    return {"facecolor": page.theme.band, "edgecolor": page.theme.muted, "hatch": "////", "linewidth": 0.0}


def _live(track: Track, events: Sequence[Event], step: int) -> InTime:
    seconds, live = zip(*track.live, strict=True)
    if events:
        return live_in_time(events, seconds, step)
    return InTime(("live bytes",), np.array(seconds), np.array([live]))


def _draw_memory(page: Page, axes: Axes, live: InTime, kinds: Sequence[str], seconds: float) -> None:
    dress(page, axes, grid="y")
    at, rows = np.append(live.seconds, seconds), dict(zip(live.kinds, live.live, strict=True))
    tops = np.cumsum([np.append(rows[kind], rows[kind][-1]) for kind in kinds], axis=0)
    most = max(int(tops[-1].max()), 1)
    bytes_axis(axes.yaxis, most, 4)
    axes.set_ylim(0, most * 1.08)
    for kind, top in zip(reversed(kinds), tops[::-1], strict=True):
        axes.fill_between(
            at, 0, top, step="post", gid=f"area.{kind}", **page.paint(kind, KIND_PAINTS) | {"linewidth": 0}
        )


def _legend_font(page: Page) -> dict[str, Any]:
    font = page.font(scale=0.9)
    return {"family": font["fontfamily"], "size": font["fontsize"]}


def seconds_words(value: float) -> str:
    """Return '1.31 s', '13.4 ms'."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"
