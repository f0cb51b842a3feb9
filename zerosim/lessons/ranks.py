"""Pictures of notebooks 04 to 06 that set ranks side by side: their bytes, slices, messages and parameters' states.

Source: ZeRO paper (arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from zerosim.device.events import Event
from zerosim.errors import InputError
from zerosim.ledger.memory import Snapshot
from zerosim.lessons.sheet import THEME, Sheet
from zerosim.lessons.stepping import Joined, joined
from zerosim.report.plots.bars import Bar, bars_chart
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.page import Picture
from zerosim.report.plots.style import KIND_PAINTS, LINE_PAINTS, OP_PAINTS, OTHER_PAINT, ink_on, mixed
from zerosim.stepper import Moment, OwnedSlice, Ownership
from zerosim.units import format_bytes

MOST_RANKS = len(LINE_PAINTS)
MOST_UNITS = 40
MOST_COLUMNS = 32
MOST_LANES = 40


# -- live bytes --------------------------------------------------------------------------------------
def ranks_figure(snapshots: Sequence[Snapshot], title: str, subtitle: str = "") -> Chart:
    """Draw one bar of live bytes per rank, stacked by kind. Raises: InputError for no ranks."""
    if not snapshots:
        raise InputError("no ranks: nothing to draw; pass at least one snapshot")
    bars = [Bar(f"rank {rank}", dict(snapshot.by_kind), rank, True) for rank, snapshot in enumerate(snapshots)]
    return bars_chart(title, subtitle, bars, KIND_PAINTS, height=max(3.0, 1.7 + 0.36 * len(bars)))


# -- who owns what -----------------------------------------------------------------------------------
def ownership_figure(ownership: Ownership, title: str = "Who updates which part of each buffer") -> Picture:
    """Draw a bar per unit, as wide as the unit's buffer, cut into the ranks' slices.

    Raises: InputError for more ranks or units than the eye can tell apart.
    """
    buffers = ownership.buffers()
    if not 1 <= ownership.ranks <= MOST_RANKS or not 1 <= len(buffers) <= MOST_UNITS:
        raise InputError(
            f"{ownership.ranks} ranks and {len(buffers)} units: expected at most {MOST_RANKS} and {MOST_UNITS}"
        )
    colors = [paint.light for paint in LINE_PAINTS[: ownership.ranks]]
    padded = any(row.padding for row in ownership.rows)
    sheet = Sheet(
        (8.0, max(3.0, 1.3 + 0.3 * len(buffers))),
        title,
        "A line is a buffer; its length is drawn the same for all. Numbers are elements, from first to last.",
        across=(-0.14, 1.14),
        up=(0.4 - len(buffers), 0.6),
        key=[(f"rank {rank}", _swatch(color, THEME.background)) for rank, color in enumerate(colors)],
        notes=["Some slices end in padding: elements past the buffer's end, which belong to no parameter."] * padded,
    )
    for at, (name, rows) in enumerate(buffers.items()):
        sheet.write((-0.015, -at), name, ha="right", scale=0.9)
        sheet.write((1.015, -at), f"{rows[0].numel:,}", ha="left", scale=0.8, color=THEME.muted)
        whole = max(row.stop for row in rows)
        for row in rows:
            width, color = (row.stop - row.start) / whole, colors[row.rank]
            middle = (row.start + row.stop) / 2 / whole
            sheet.cell((middle, -at), width, 0.78, fill=color, edge=THEME.background)
            sheet.write((middle, -at), _elements(row), scale=0.75, color=ink_on(color))
    return sheet.picture()


def _elements(row: OwnedSlice) -> str:
    words = f"{row.start:,} to {row.stop - 1:,}"
    return f"{words} ({row.padding:,} padding)" if row.padding else words


def _swatch(color: str, edge: str, linewidth: float = 1.0) -> dict[str, Any]:
    """Draw a colour for a picture's key."""
    return {"facecolor": color, "edgecolor": edge, "linewidth": linewidth}


# -- who sends ---------------------------------------------------------------------------------------
def busy_figure(histories: Mapping[str, Sequence[Sequence[Event]]], step: int, phase: str) -> Picture:
    """Draw the senders of each collective of a phase: a row per rank, a column per collective, one grid per name.

    `histories` are all ranks' records, by rank. A cell is filled by its rank's share of the bytes that the column
    sends. Raises: InputError for none, and for more collectives than fit.
    """
    found = {
        name: [[row for row in joined(events, step) if row.phase == phase] for events in ranks]
        for name, ranks in histories.items()
    }
    columns = max((len(rows[0]) for rows in found.values()), default=0)
    if not 0 < columns <= MOST_COLUMNS:
        raise InputError(f"{columns} collectives in the {phase} of step {step}: expected 1 to {MOST_COLUMNS}")
    ops = dict.fromkeys(row.op for rows in found.values() for row in rows[0])
    pitch = max(len(rows) for rows in found.values()) + 3.0
    sheet = Sheet(
        (8.0, max(3.0, 1.3 + 0.27 * pitch * len(found))),
        f"Who sends in each collective of {phase}",
        "Columns are collectives in their order, named by unit. A cell is as full as its rank's share of the bytes.",
        across=(-2.2, columns + 2.3),
        up=(1.4 - pitch * len(found), 1.7),
        key=[(op, _swatch(_color_of(op), mixed(_color_of(op), THEME.background), 0.6)) for op in ops],
    )
    for at, (name, rows) in enumerate(found.items()):
        _draw_busy(sheet, -at * pitch, name, rows, columns)
    return sheet.picture()


def _color_of(op: str) -> str:
    return OP_PAINTS.get(op, OTHER_PAINT).light


def _draw_busy(sheet: Sheet, top: float, name: str, rows: Sequence[Sequence[Joined]], columns: int) -> None:
    sheet.write((-2.1, top + 1.3), name, bold=True, ha="left")
    sheet.write((columns + 0.1, top + 0.75), "sends in all", scale=0.75, color=THEME.muted, ha="left")
    for column, calls in enumerate(zip(*rows, strict=True)):
        sheet.write((column, top + 0.75), calls[0].unit, scale=0.7, color=THEME.muted)
        sent = sum(call.sent_bytes for call in calls)
        color = _color_of(calls[0].op)
        for rank, call in enumerate(calls):
            share = call.sent_bytes / sent if sent else 0.0
            sheet.cell((column, top - rank), 0.9, 0.84, fill=THEME.band, edge=THEME.grid)
            if share:
                bottom = top - rank - 0.42
                sheet.cell((column, bottom + 0.42 * share), 0.9, 0.84 * share, fill=color, edge=color)
                fill = color if share > 0.6 else THEME.band
                sheet.write((column, top - rank), f"{share:.0%}", scale=0.7, color=ink_on(fill))
    for rank, own in enumerate(rows):
        sheet.write((-0.7, top - rank), f"rank {rank}", scale=0.8, color=THEME.muted, ha="right")
        total = format_bytes(sum(call.sent_bytes for call in own))
        sheet.write((columns + 0.1, top - rank), total, scale=0.8, bold=True, ha="left")


# -- states of parameters ----------------------------------------------------------------------------
class Glance(NamedTuple):
    """The state of a world before an event: `states[rank][i]` of watched parameter i; and the event."""

    states: list[list[str]]
    moment: Moment


class Span(NamedTuple):
    """A stretch without change, from index `start` up to `stop`."""

    what: str
    start: int
    stop: int


def spans(labels: Iterable[str]) -> list[Span]:
    """Return runs of equal labels, each as one span."""
    found, start = [], 0
    for what, same in groupby(labels):
        stop = start + len(list(same))
        found.append(Span(what, start, stop))
        start = stop
    return found


def states_figure(seen: Sequence[Glance], names: Sequence[str], title: str, rank: int | None = None) -> Picture:
    """Draw a lane per parameter and rank, coloured while the whole parameter is there. `names` are the watched ones.

    `rank` None draws all of them, grouped by rank. Raises: InputError for more lanes than are readable.
    """
    ranks = range(len(seen[0].states)) if rank is None else [rank]
    lanes = {
        (of, name): spans(glance.states[of][at] for glance in seen)
        for of in ranks
        if of < len(seen[0].states)
        for at, name in enumerate(names)
    }
    if not 1 <= len(lanes) <= MOST_LANES:
        raise InputError(f"{len(lanes)} lanes: expected 1 to {MOST_LANES}; watch fewer parameters, or draw one rank")
    wide = len(seen)
    nothing = mixed(OTHER_PAINT.light, THEME.background)
    paints = {  # parameters' blue while all is there, a pale one while a slice is
        "gathered": ("gathered", KIND_PAINTS["unsharded_param"].light),
        "sharded": ("sharded", mixed(KIND_PAINTS["param"].light, THEME.background)),
        "whole": ("whole", KIND_PAINTS["param"].light),
        "elsewhere": ("nothing here", nothing),  # not gathered yet
        "freed": ("nothing here", nothing),
    }
    shown = {span.what for lane in lanes.values() for span in lane}
    key = dict(paints[state] for state in paints if state in shown)
    sheet = Sheet(
        (8.0, max(3.0, 1.55 + 0.3 * len(lanes))),
        title,
        "Along x are the events of all ranks in the order in which they happened (not seconds).",
        across=(-0.2 * wide, 1.01 * wide),
        up=(0.4 - len(lanes), 1.5),
        key=[(words, _swatch(color, THEME.muted)) for words, color in key.items()],
    )
    _draw_phases(sheet, seen, ranks[0])
    for at, ((of, name), lane) in enumerate(lanes.items()):
        words = f"rank {of}" if len(names) == 1 else name if rank is not None else f"rank {of}, {name}"
        sheet.write((-0.01 * wide, -at), words, ha="right", scale=0.8)
        for span in lane:
            _, color = paints.get(span.what, ("", THEME.band))
            tall = 0.78 if span.what in ("gathered", "whole") else 0.2
            sheet.cell(_middle(span, -at), span.stop - span.start, tall, fill=color, edge=color)
    return sheet.picture()


def _draw_phases(sheet: Sheet, seen: Sequence[Glance], rank: int) -> None:
    """Draw the phases of one rank above the lanes: that of its last event so far."""
    phases, phase = [], ""
    for _, moment in seen:
        phase = moment.event.scope.phase if moment.rank == rank else phase
        phases.append(phase)
    for span in spans(phases):
        if span.what in ("forward", "backward", "optimizer"):
            width = span.stop - span.start
            sheet.cell(_middle(span, 1.0), width, 0.7, fill=THEME.band, edge=THEME.background)
            sheet.write(_middle(span, 1.0), span.what if width > 0.1 * len(seen) else "opt", scale=0.8)
    sheet.write((-0.01 * len(seen), 1.0), f"rank {rank} is in", ha="right", scale=0.8, color=THEME.muted)


def _middle(span: Span, y: float) -> tuple[float, float]:
    return (span.start + span.stop) / 2, y
