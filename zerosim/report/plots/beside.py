"""One rank of a run beside the same rank of a reference: live bytes, and below them every collective."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.events import Event, Launch
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.history import read_history
from zerosim.report.plots.panel import Axis, Boxes, Note, Panel, Rule
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT, in_order, sheet_paint
from zerosim.report.plots.timeline import kind_key, length, tide
from zerosim.report.plots.words import EVENTS, tick_bytes, whole_words
from zerosim.units import format_bytes

Calls = list[tuple[int, Launch]]
"""A step's collectives and messages, by event, counted from the first one shown."""


def beside_figure(
    records: Sequence[Sequence[Event]],
    names: Sequence[str],
    rank: int,
    step: int,
    *,
    title: str,
    subtitle: str = "",
    event: int | None = None,
) -> Chart:
    """Return one rank's step of several runs, one below the other, on the same axes.

    `records` are the rank's whole records, `names` the runs'. `event` is a place in the first record, which is marked.
    Raises: InputError for a step that a record does not have.
    """
    shown = [read_history(record, step) for record in records]
    calls = [_calls(record, step) for record in records]
    top, most = max(history.peak.nbytes for history in shown) or 1, length(shown)
    largest = max((call.payload_bytes for one in calls for _, call in one), default=1) or 1
    rows: list[tuple[Panel]] = []
    for number, (name, history, own) in enumerate(zip(names, shown, calls, strict=True)):
        mark = []
        if event is not None and number == 0:
            first = next(at for at, one in enumerate(records[0]) if one.scope.step == step)
            mark.append(event - first + 0.5)
        above = [Rule(f"event {event}", x=at) for at in mark]
        rows.append((tide(history, step, name, top, most, above, last=False),))
        rows.append((_calls_panel(own, largest, most, [Rule(x=at) for at in mark], last=number + 1 == len(records)),))
    ops = in_order(dict.fromkeys(call.op for one in calls for _, call in one), OP_PAINTS)
    key = *kind_key(shown), *((op, OP_PAINTS.get(op, OTHER_PAINT)) for op in ops)
    note = f"Rank {rank}, step {step}. Above: live bytes. Below: the payload of each collective and message."
    said = tuple(f"{name}: {_in_words(own)}." for name, own in zip(names, calls, strict=True))
    size, heights = (8.0, 2.2 + 2.4 * len(records)), (3, 1) * len(records)
    return Chart(title, subtitle, tuple(rows), key, (note,), said, size, heights)


def _calls(record: Sequence[Event], step: int) -> Calls:
    shown = [event for event in record if event.scope.step == step]
    return [(at, event) for at, event in enumerate(shown) if isinstance(event, Launch) and event.payload_bytes]


def _in_words(calls: Calls) -> str:
    """Return '12 calls, 161 KB'."""
    return f"{len(calls)} call{'s' * (len(calls) != 1)}, {format_bytes(sum(call.payload_bytes for _, call in calls))}"


def _calls_panel(calls: Calls, largest: int, most: int, rules: Sequence[Rule], *, last: bool) -> Panel:
    """Return bars of one width, as high as the payload. A small payload still has a visible height."""
    wide, least = max(1.0, 0.006 * most), 0.06 * largest
    bars = [
        Boxes(f"calls.{op}", OP_PAINTS.get(op, OTHER_PAINT),
              [(at, 0, at + wide, max(call.payload_bytes, least)) for at, call in calls if call.op == op])
        for op in dict.fromkeys(call.op for _, call in calls)
    ]  # fmt: skip
    note = Note(_in_words(calls), (most, 1.25 * largest), "right bottom", (0, 0.1), 0.8, paint=sheet_paint("muted"))
    x = Axis(EVENTS if last else "", (0, most), whole_words, whole=True, hidden=not last)
    return Panel((*bars, *rules, note), x, Axis(ends=(0, 1.25 * largest), words=tick_bytes), grid="y")
