"""Which collectives ranks joined in a step, and who of them sends: read from the ranks' records.

Owns the table and the picture of it for notebooks 04 to 06. Counts nothing by formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.device.events import Event, Launch
from zerosim.errors import InputError
from zerosim.lessons.sheet import Sheet, cell, ink_on, open_sheet, picture, write
from zerosim.lessons.tables import table
from zerosim.report.plots.page import Picture, open_page
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT
from zerosim.units import format_bytes

MOST_COLUMNS = 32


class Joined(NamedTuple):
    """A collective of the model states that a rank joined."""

    phase: str
    unit: str
    op: str
    payload_bytes: int
    sent_bytes: int


def joined(events: Sequence[Event], step: int) -> list[Joined]:
    """The collectives that a rank's record has in a step, in order; without the norm's and the overflow flags'."""
    return [
        Joined(event.scope.phase, event.scope.unit, event.op, event.payload_bytes, event.wire_bytes)
        for event in events
        if isinstance(event, Launch) and event.scope.step == step and event.purpose == "states"
    ]


def joined_table(events: Sequence[Event], step: int, title: str) -> Any:
    """`joined`, a line each, and their sum."""
    rows = joined(events, step)
    total = ("in all", "", "", sum(row.payload_bytes for row in rows), sum(row.sent_bytes for row in rows))
    return table(["phase", "unit", "operation", "payload, B", "sent, B"], [*rows, total], title=title)


def busy_figure(histories: Mapping[str, Sequence[Sequence[Event]]], step: int, phase: str) -> Picture:
    """Who sends in each collective of a phase: a row per rank, a column per collective, one grid per name.

    `histories` are all ranks' records, by rank. A cell is as full as its rank's share of what the column sends.
    Raises: InputError for none, and for more collectives than fit.
    """
    found = {
        name: [[row for row in joined(events, step) if row.phase == phase] for events in ranks]
        for name, ranks in histories.items()
    }
    columns = max((len(rows[0]) for rows in found.values()), default=0)
    if not 0 < columns <= MOST_COLUMNS:
        raise InputError(f"{columns} collectives in the {phase} of step {step}: expected 1 to {MOST_COLUMNS}")
    ranks = max(len(rows) for rows in found.values())
    ops = {op: None for rows in found.values() for row in rows[0] for op in (row.op,)}
    pitch = ranks + 3.0
    page = open_page((8.0, max(3.0, 1.3 + 0.27 * pitch * len(found))), "light")
    sheet = open_sheet(
        f"Who sends in each collective of {phase}",
        "Columns are collectives in their order, named by unit. A cell is as full as its rank's share of the bytes.",
        across=(-2.2, columns + 2.3),
        up=(1.4 - pitch * len(found), 1.7),
        size=page.size,
        key=[(op, page.paint(op, OP_PAINTS) | {"hatch": ""}) for op in ops],
        page=page,
    )
    for at, (name, rows) in enumerate(found.items()):
        _draw_busy(sheet, -at * pitch, name, rows, columns)
    return picture(sheet)


def _draw_busy(sheet: Sheet, top: float, name: str, rows: Sequence[Sequence[Joined]], columns: int) -> None:
    theme = sheet.page.theme
    write(sheet, (-2.1, top + 1.3), name, bold=True, ha="left")
    write(sheet, (columns + 0.1, top + 0.75), "sends in all", scale=0.75, color=theme.muted, ha="left")
    for column, calls in enumerate(zip(*rows, strict=True)):
        write(sheet, (column, top + 0.75), calls[0].unit, scale=0.7, color=theme.muted)
        sent = sum(call.sent_bytes for call in calls)
        color = theme.color(OP_PAINTS.get(calls[0].op, OTHER_PAINT))
        for rank, call in enumerate(calls):
            share = call.sent_bytes / sent if sent else 0.0
            cell(sheet, (column, top - rank), 0.9, 0.84, fill=theme.band, edge=theme.grid)
            if share:
                bottom = top - rank - 0.42
                cell(sheet, (column, bottom + 0.42 * share), 0.9, 0.84 * share, fill=color, edge=color)
                fill = color if share > 0.6 else theme.band
                write(sheet, (column, top - rank), f"{share:.0%}", scale=0.7, color=ink_on(fill))
    for rank, own in enumerate(rows):
        write(sheet, (-0.7, top - rank), f"rank {rank}", scale=0.8, color=theme.muted, ha="right")
        total = format_bytes(sum(call.sent_bytes for call in own))
        write(sheet, (columns + 0.1, top - rank), total, scale=0.8, bold=True, ha="left")
