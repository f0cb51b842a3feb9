"""A step in time: for each rank a lane of compute and one of communication, and live bytes below. Modelled seconds.

The clock's seconds (`ledger/clock.py`). A lane's uninterrupted work for one microbatch is one bar. Hatched: compute
waits for another rank, which is the bubble. All streams but that of compute share the second lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerosim.device.events import COMPUTE, CPU, Event
from zerosim.errors import InputError, wrong
from zerosim.ledger.clock import Timeline
from zerosim.ledger.tracks import Track
from zerosim.report.names import kind_words, listed
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.history import InTime, live_in_time
from zerosim.report.plots.panel import Areas, Axis, Box, Panel, Place
from zerosim.report.plots.style import KIND_PAINTS, OTHER_PAINT, in_order, sheet_paint
from zerosim.report.plots.words import seconds_words, tick_bytes
from zerosim.verbs import MESSAGES

MOST_RANKS = 8
BUBBLE = "waits for other ranks"
_PAINTS = {
    "forward": KIND_PAINTS["param"].faded(0),
    "backward": KIND_PAINTS["optim"].faded(0),
    "optimizer": KIND_PAINTS["grad"].faded(0),
    "collective": KIND_PAINTS["activation"].faded(0),
    "message": KIND_PAINTS["unsharded_param"].faded(0),
    "copy": KIND_PAINTS["unsharded_grad"].faded(0),
    BUBBLE: sheet_paint("band", "////", "muted"),
}
COMMUNICATION = "communication"
LANES = (COMPUTE, CPU, COMMUNICATION)


class Bar(NamedTuple):
    """One lane's work for a while. `what` names a paint; `words` are written in it if they fit."""

    lane: str
    what: str
    words: str
    start: float
    stop: float


def streams_figure(
    timeline: Timeline, ranks: Sequence[int], *, events: Sequence[Event] = (), step: int = 0, subtitle: str = ""
) -> Chart:
    """Return the lanes of these ranks, which were simulated in detail, above the live bytes of the first of them: by
    kind with its whole record, `events`, and else in all.

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
    used = dict.fromkeys(bar.what for _, _, bars in lanes for bar in bars)
    last = timeline.last
    waits = {"for other ranks": last.bubble, **{f"for {axis}": seconds for axis, seconds in last.exposed.items()}}
    waits |= {"for copies": last.copies, "for its CPU": last.cpu}
    words = [f"{seconds_words(seconds)} {what}" for what, seconds in waits.items() if seconds]
    notes = (
        f"Rank {last.rank} ends last" + (f"; it waits {listed(words)}." if words else "."),
        "Empty stretches of compute are waits for a collective, a message, a copy or the CPU to end.",
        "Seconds are modelled, not measured.",
    )
    boxes = [
        _box(f"rank{rank}.{lane}", row, bar)
        for row, (rank, lane, bars) in enumerate(lanes)
        for bar in sorted(bars, key=lambda bar: bar.start - bar.stop)  # of simultaneous ones the shorter lies above
    ]
    shown = [(rank, "its host's CPU" if lane == CPU else lane) for rank, lane, _ in lanes]
    names = [f"rank {rank}: {lane}" if len(ranks) > 1 else lane for rank, lane in shown]
    ends = 0, timeline.seconds
    above = Panel(tuple(boxes), Axis(ends=ends, hidden=True), Axis.of_rows(names), grid="x")
    below = _memory(_live(timeline.tracks[ranks[0]], events, step), f"live bytes, rank {ranks[0]}", ends)
    title, key = f"A step of {seconds_words(timeline.seconds)}", tuple((w, p) for w, p in _PAINTS.items() if w in used)
    said = f"Live bytes of {listed([words for words, _ in below.key])}."
    size, heights = (10.0, min(4.6 + 0.5 * len(lanes), 14.0)), (max(1.3, 0.5 * len(lanes)), 1.9)
    return Chart(title, subtitle, ((above,), (below,)), key, notes, (said,), size, heights)


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


def _box(name: str, row: int, bar: Bar) -> Box:
    words = bar.words, bar.words[1:]
    return Box(f"{name}.{bar.what}", (bar.start, bar.stop), (row - 0.4, row + 0.4), _PAINTS[bar.what], words, scale=0.8)


def _live(track: Track, events: Sequence[Event], step: int) -> InTime:
    seconds, live = zip(*track.live, strict=True)
    if events:
        return live_in_time(events, seconds, step)
    return InTime(("live bytes",), np.array(seconds), np.array([live]))


def _memory(live: InTime, name: str, ends: Place) -> Panel:
    """Return the live bytes by kind over the step."""
    rows = {kind: row for kind, row in zip(live.kinds, live.live, strict=True) if row.any()}
    kinds = in_order(rows, KIND_PAINTS)
    values = [np.append(rows[kind], rows[kind][-1]) for kind in kinds]
    paints = [KIND_PAINTS.get(kind, OTHER_PAINT) for kind in kinds]
    top = 1.08 * max(int(np.sum(values, axis=0).max()), 1)
    areas = Areas(kinds, paints, np.append(live.seconds, ends[1]), values)
    key = tuple((kind_words(kind), paint) for kind, paint in zip(kinds, paints, strict=True))
    return Panel((areas,), Axis(ends=ends, words=seconds_words), Axis(name, (0, top), tick_bytes), grid="y", key=key)
