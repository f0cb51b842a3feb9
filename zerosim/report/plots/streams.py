"""A step in time: for each rank its streams as lanes, what compute waits for, and live bytes below. Modelled seconds.

The clock's (`ledger/clock.py`). What a lane does without a break for one micro-batch is one bar. Hatched: compute waits
for a rank that is not there yet, which is the bubble.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerosim.errors import InputError, wrong
from zerosim.ledger.clock import COMPUTE, Timeline, Track
from zerosim.report.names import listed
from zerosim.report.plots.axes import BLOCK, block, bytes_axis, rows_axis, ticks
from zerosim.report.plots.page import Page, dress, finish, frame, inches, open_page, plain, settle
from zerosim.report.plots.style import KIND_PAINTS
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


class Bar(NamedTuple):
    """What one lane does for a while. `what` names a paint; `words` are written in it where they fit."""

    lane: str
    what: str
    words: str
    start: float
    stop: float


def streams_figure(
    timeline: Timeline,
    ranks: Sequence[int],
    *,
    subtitle: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """The lanes of these ranks, which were simulated in detail, above the live bytes of the first of them.

    Raises: InputError for more than 8 ranks, and for one that was not simulated.
    """
    for rank in ranks:
        if rank not in timeline.tracks:
            known = ", ".join(map(str, sorted(timeline.tracks)))
            raise wrong("rank", f" {rank} was not simulated: another one stands for it; expected one of {known}")
    if not 1 <= len(ranks) <= MOST_RANKS:
        raise InputError(f"{len(ranks)} ranks: expected 1 to {MOST_RANKS} in one picture")
    lanes = [(rank, lane, bars_of(timeline.tracks[rank], lane)) for rank in ranks for lane in _lanes(timeline, rank)]
    page = open_page(size, theme, (10.0, min(3.4 + 0.4 * len(lanes), 14.0)))
    used = dict.fromkeys(bar.what for _, _, bars in lanes for bar in bars)
    key = [(what, {"facecolor": page.theme.color(paint)}) for what, paint in _PAINTS.items() if what in used]
    key += [(BUBBLE, _hatched(page))] if BUBBLE in used else []
    last = timeline.last
    waits = {"for other ranks": last.bubble, **{f"for {axis}": seconds for axis, seconds in last.exposed.items()}}
    words = listed([f"{seconds_words(seconds)} {what}" for what, seconds in waits.items() if seconds])
    notes = [f"Rank {last.rank} ends last" + (f"; it waits {words}." if words else ".")]
    notes.append("Empty stretches of compute are waits for a collective's, a message's or a copy's own time.")
    notes.append("Seconds are modelled, not measured.")
    frame(page, f"A step of {seconds_words(timeline.seconds)}", subtitle, key, notes)
    above, below = page.figure.subplots(2, 1, sharex=True, height_ratios=[max(2, 0.45 * len(lanes)), 1.6])
    dress(page, above, grid="x")
    names = [f"{rank}: {lane}" if len(ranks) > 1 else lane for rank, lane, _ in lanes]
    rows_axis(page, above, [plain(name) for name in names], 0.9)
    above.set_xlim(0, timeline.seconds)
    _draw_memory(page, below, timeline.tracks[ranks[0]], timeline.seconds)
    below.set_ylabel(f"rank {ranks[0]}: live", color=page.theme.text, **page.font(scale=0.9))
    ticks(below.xaxis, MaxNLocator(8), seconds_words)
    settle(page)
    for row, (rank, lane, bars) in enumerate(lanes):
        _draw_lane(page, above, row, f"rank{rank}.{lane}", bars)
    return finish(page)


def bars_of(track: Track, lane: str) -> list[Bar]:
    """What a lane does, neighbours of one kind and micro-batch put together."""
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
        if span.stop == span.start or _lane(span.stream) != lane:
            continue
        phase = span.scope.phase.removeprefix("curvature_")
        if span.name == "wait":
            if span.bubble[1] > span.bubble[0]:
                yield Bar(lane, BUBBLE, "", *span.bubble)
        elif lane == COMPUTE:
            words = f"{phase[0].upper()}{span.scope.slot}" if phase in ("forward", "backward") else ""
            words = f"c{words}" if phase != span.scope.phase else words  # of an estimate of curvature
            yield Bar(lane, phase if phase in _PAINTS else "optimizer", words, span.start, span.stop)
        elif span.name in MESSAGES:
            yield Bar(lane, "message", "", span.start, span.stop)
        else:
            yield Bar(lane, "copy" if span.name == "copy" else "collective", "", span.start, span.stop)


def _lane(stream: str) -> str:
    """Messages of all pairs share a lane."""
    return stream.split(" ")[0] + " messages" if " to " in stream and "," in stream else stream


def _lanes(timeline: Timeline, rank: int) -> list[str]:
    spans = timeline.tracks[rank].spans
    return list(dict.fromkeys([COMPUTE, *(_lane(span.stream) for span in spans if span.stop > span.start)]))


def _draw_lane(page: Page, axes: Axes, row: int, gid: str, bars: Sequence[Bar]) -> None:
    width, seconds = inches(page, axes)[0], axes.get_xlim()[1]
    for bar in bars:
        length = bar.stop - bar.start
        if bar.what == BUBBLE:
            axes.barh(row, length, BLOCK, left=bar.start, gid=f"{gid}.{BUBBLE}", **_hatched(page))
            continue
        edge = 0.4 if length / seconds * width > 0.02 else 0.0  # no edge would leave anything of a thinner one
        span, color, words = (bar.start, bar.stop), page.theme.color(_PAINTS[bar.what]), (bar.words, bar.words[1:])
        block(page, axes, row, span, color, words, scale=0.8, gid=gid, linewidth=edge)


def _hatched(page: Page) -> dict[str, Any]:
    """Keywords of the bubble's area."""
    return {"facecolor": page.theme.band, "edgecolor": page.theme.muted, "hatch": "////", "linewidth": 0.0}


def _draw_memory(page: Page, axes: Axes, track: Track, seconds: float) -> None:
    dress(page, axes, grid="y")
    at = [moment for moment, _ in track.live] + [seconds]
    live = [nbytes for _, nbytes in track.live]
    most = max(live, default=1)
    bytes_axis(axes.yaxis, most, 3)
    axes.set_ylim(0, most * 1.08)
    axes.fill_between(at, [*live, live[-1] if live else 0], step="post", color=page.theme.color(KIND_PAINTS["param"]))


def seconds_words(value: float) -> str:
    """'1.31 s', '13.4 ms'."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"
