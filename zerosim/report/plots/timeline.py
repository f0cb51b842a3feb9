"""Live bytes over one step, stacked by kind, for one rank or several: the tide of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.device.events import Event
from zerosim.errors import InputError
from zerosim.report.names import kind_words
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.history import History, Span, read_history
from zerosim.report.plots.panel import Areas, Axis, Mark, Panel, Peak, Rule, Strip
from zerosim.report.plots.style import KIND_PAINTS, Paint, in_order
from zerosim.report.plots.words import EVENTS, limit_words, tick_bytes, whole_words
from zerosim.report.words import moment
from zerosim.units import format_bytes

MOST_PANELS = 8
_MOST_NAMED = 5  # with more microbatches their bands may be too narrow for names
_FARTHEST = 1.6  # a limit beyond this many times the peak is named below, and the curve keeps its room
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
) -> Chart:
    """Return one panel per rank, on the same axes; `histories` are those ranks' whole records, in the order of `ranks`.

    To compare runs, give the same rank of each, and the runs' `names`. Along x are a rank's events in their order, not
    seconds. `step` None shows everything that was recorded. Raises: InputError if the lists do not match, for more than
    8 ranks, and an unknown step.
    """
    names = [f"rank {rank}" for rank in ranks] if names is None else names
    if len(names) != len(ranks):
        raise InputError(f"{len(names)} names for {len(ranks)} panels: expected one for each")
    if len(histories) != len(ranks) or not ranks:
        raise InputError(f"{len(histories)} histories for {len(ranks)} ranks: expected one for each, at least one")
    if len(ranks) > MOST_PANELS:
        raise InputError(f"{len(ranks)} ranks: expected at most {MOST_PANELS} in one picture; choose fewer")
    shown = [read_history(events, step) for events in histories]
    most = max(history.peak.nbytes for history in shown) or 1
    near = [limit] if limit and limit[1] <= _FARTHEST * most else []
    rules, top = (
        [Rule(limit_words(one).replace(": ", ":\n"), y=one[1]) for one in near],
        max(most, *(n for _, n in near), 0),
    )
    panels = [
        tide(history, step, name if len(ranks) > 1 else "", top, length(shown), rules, last=history is shown[-1])
        for history, name in zip(shown, names, strict=True)
    ]
    notes = []
    if any(history.num_events >= len(history.at) for history in shown):
        notes.append("Each pixel column shows its minimum and maximum.")
    turns = max(sum(span.name == "forward" for span in history.phases) for history in shown)
    if turns > _MOST_NAMED:
        notes.append(f"Bands: forward and backward in turn, {turns} times, then the optimizer.")
    if limit and not near:
        notes.append(f"Above this axis: {limit_words(limit)}.")
    what = "everything recorded" if step is None else f"step {step}"
    who = f"rank {ranks[0]}" if len(set(ranks)) == 1 else f"{len(ranks)} ranks"
    said = tuple(f"{name}: {panel.of(Peak)[0].words[0]}." for name, panel in zip(names, panels, strict=True))
    high = 4.5 if len(ranks) == 1 else min(2.0 + 1.7 * len(ranks), 12.0)
    rows = tuple((panel,) for panel in panels)
    return Chart(f"Live bytes on {who}, {what}", subtitle, rows, kind_key(shown), tuple(notes), said, (8.0, high))


def length(shown: Sequence[History]) -> int:
    """Return the most events of a history."""
    return max(history.num_events for history in shown)


def kind_key(shown: Sequence[History]) -> tuple[tuple[str, Paint], ...]:
    """Return the kinds that are live at some moment, in words, and their paints."""
    live = [pair for history in shown for pair in zip(history.kinds, history.live, strict=True)]
    kinds = in_order(dict.fromkeys(kind for kind, nbytes in live if nbytes.any()), KIND_PAINTS)
    return tuple((kind_words(kind), KIND_PAINTS[kind]) for kind in kinds)


def tide(
    history: History, step: int | None, name: str, top: int, num_events: int, more: Sequence[Mark] = (), *, last: bool
) -> Panel:
    """Return the live bytes of one history on axes up to `top` and `num_events`: its areas, its peak, its phases and
    units. Only the `last` panel has numbers below."""
    rows = dict(zip(history.kinds, history.live, strict=True))
    kinds = in_order(rows, KIND_PAINTS)
    values = [np.append(rows[kind], rows[kind][-1]) for kind in kinds]
    areas = Areas(kinds, [KIND_PAINTS[kind] for kind in kinds], np.append(history.at, history.num_events), values)
    scope, words = history.peak.scope, f"peak {format_bytes(history.peak.nbytes)}"
    when = moment(scope.step, scope.phase, scope.unit)
    if scope.step == step:
        when = when.removeprefix(f"in step {step}, ")
    where = history.peak.index + 1.0, float(history.peak.nbytes)
    peak = Peak(where, (f"{words}, {when}", f"{words}, {scope.phase}", words))
    x = Axis(EVENTS if last else "", (0, num_events), whole_words, whole=True, hidden=not last)
    strips = _strip(history.phases, banded=True), _strip(history.units, banded=False)
    return Panel((areas, *more, peak, *strips), x, Axis(name, (0, top), tick_bytes), grid="y")


def _strip(spans: Sequence[Span], *, banded: bool) -> Strip:
    return Strip([(span.name, _SHORT.get(span.name, ""), span.start, span.end) for span in spans], banded)
