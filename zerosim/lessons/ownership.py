"""Who owns which slice of what, as a picture; and a parameter's slices, rank by rank.

Owns the drawing of `world.ownership()` for notebooks 05 and 06. Source: ZeRO paper (arXiv 1910.02054),
section 5: each rank owns 1/N of every state.
"""

from __future__ import annotations

from typing import Any

from zerosim.errors import InputError
from zerosim.lessons.sheet import cell, ink_on, open_sheet, picture, write
from zerosim.lessons.tables import table
from zerosim.report.plots.page import Picture, open_page
from zerosim.report.plots.style import LINE_PAINTS
from zerosim.stepper import DebugWorld, OwnedSlice, Ownership

MOST_RANKS = len(LINE_PAINTS)
MOST_UNITS = 40


def ownership_figure(ownership: Ownership, title: str = "Who updates which part of each buffer") -> Picture:
    """A bar per unit, as wide as the unit's buffer, cut into the ranks' slices.

    Raises: InputError for more ranks or units than can be told apart.
    """
    units = list(dict.fromkeys(row.unit for row in ownership.rows))
    if not 1 <= ownership.ranks <= MOST_RANKS or not 1 <= len(units) <= MOST_UNITS:
        raise InputError(
            f"{ownership.ranks} ranks and {len(units)} units: expected at most {MOST_RANKS} and {MOST_UNITS}"
        )
    page = open_page((8.0, max(3.0, 1.3 + 0.3 * len(units))), "light")
    colors = [page.theme.color(paint) for paint in LINE_PAINTS]
    key = [
        (f"rank {rank}", {"facecolor": colors[rank], "edgecolor": page.theme.background})
        for rank in range(ownership.ranks)
    ]
    padded = any(row.padding for row in ownership.rows)
    sheet = open_sheet(
        title,
        "A line is a buffer; its length is drawn the same for all. Numbers are elements, from first to last.",
        across=(-0.14, 1.14),
        up=(0.4 - len(units), 0.6),
        size=page.size,
        key=key,
        notes=["Some slices end in padding: elements past the buffer's end, which belong to no parameter."] * padded,
        page=page,
    )
    for at, unit in enumerate(units):
        rows = ownership.of(unit)
        write(sheet, (-0.015, -at), unit, ha="right", scale=0.9)
        write(sheet, (1.015, -at), f"{rows[0].numel:,}", ha="left", scale=0.8, color=page.theme.muted)
        whole = max(row.stop for row in rows)
        for row in (row for row in rows if row.stop > row.start):
            width, color = (row.stop - row.start) / whole, colors[row.rank]
            middle = (row.start + row.stop) / 2 / whole
            cell(sheet, (middle, -at), width, 0.78, fill=color, edge=page.theme.background)
            write(sheet, (middle, -at), _words(row), scale=0.75, color=ink_on(color))
    return picture(sheet)


def _words(row: OwnedSlice) -> str:
    words = f"{row.start:,} to {row.stop - 1:,}"
    return f"{words} ({row.padding:,} padding)" if row.padding else words


def slices_table(world: DebugWorld, name: str) -> Any:
    """What every rank holds of a parameter now: its state and, where a part is there, which elements of it."""
    rows = []
    for rank in world.ranks:
        view = rank.parameters[name]
        rows.append([f"rank {rank.rank}", view.state, view.start, view.stop, view.stop - view.start])
    return table(["", "state", "from", "up to", "elements"], rows, title=f"{name}, shape {view.shape}")
