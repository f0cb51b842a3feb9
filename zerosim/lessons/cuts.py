"""Pictures of notebook 12: which tensors that a block saves for backward t ranks divide, and how much is left.

Drawn from the tensors that forward saved (`RunResult.saved`), beside those of one rank. Source: arXiv 2205.05198,
section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from zerosim.errors import InputError
from zerosim.ledger.activations import SavedRow
from zerosim.lessons.sheet import THEME, Sheet
from zerosim.placement.families import GPT
from zerosim.report.plots.bars import Bar, bars_chart
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.page import Picture
from zerosim.report.plots.style import LINE_PAINTS, ink_on, mixed

WHOLE, CUT, SCORES = "whole", "cut", "attention scores"
PAINTS = {WHOLE: LINE_PAINTS[1], CUT: LINE_PAINTS[3], SCORES: LINE_PAINTS[2]}
_OF_SCORES = ("softmax", "mask", "dropped softmax")
_BEHIND_F = tuple(branch.named(branch.columns.name) for branch in GPT.block.branches)
_BEFORE_G = tuple(branch.named(branch.rows.name) for branch in GPT.block.branches)


def kept_parts(alone: Sequence[SavedRow], rows: Sequence[SavedRow]) -> dict[str, int]:
    """Return the bytes that a rank saves of a block: tensors as large as on one rank alone, divided ones, and
    attention's scores."""
    parts = dict.fromkeys(PAINTS, 0)
    for share, row in zip(_shares(alone, rows), rows, strict=True):
        is_score = row.op == "attention" and row.what in _OF_SCORES
        parts[SCORES if is_score else WHOLE if share == 1 else CUT] += row.nbytes
    return {part: nbytes for part, nbytes in parts.items() if nbytes}


def kept_figure(bars: Mapping[str, Mapping[str, int]], title: str, subtitle: str = "") -> Chart:
    """Draw a bar of `kept_parts` for each name. Raises: InputError for none."""
    if not bars:
        raise InputError("no bars: nothing to draw; pass at least one")
    drawn = [Bar(name, dict(parts), 0, True) for name, parts in bars.items()]
    return bars_chart(title, subtitle, drawn, PAINTS, height=max(3.0, 1.6 + 0.36 * len(drawn)))


def block_figure(alone: Sequence[SavedRow], cuts: Mapping[str, Sequence[SavedRow]], title: str) -> Picture:
    """Draw a line for each tensor that a block saves, in forward's order; a column for each cut, filled by the rank's
    share.

    Lines across show where f and g stand.
    """
    colors = {name: paint.light for name, paint in PAINTS.items()}
    count, wide = len(alone), 1.25
    sheet = Sheet(
        (8.0, max(3.0, 1.5 + 0.29 * count)),
        title,
        "A box is a tensor of the block, as full as the part of it that each rank keeps.",
        across=(-1.5, wide * len(cuts) - 0.1),
        up=(0.4 - count, 1.3),
        key=[(name, {"facecolor": colors[name], "edgecolor": THEME.background}) for name in (WHOLE, CUT)],
    )
    for at, row in enumerate(alone):
        sheet.write((-1.42, -at), row.op, ha="left", scale=0.8)
        sheet.write((-0.1, -at), row.what, ha="right", scale=0.8, color=THEME.muted)
        if row.op in _BEHIND_F:
            _draw_border(sheet, 0.5 - at, "f", wide * len(cuts) - 0.2)
        if row.op in _BEFORE_G:
            _draw_border(sheet, -0.5 - at, "g", wide * len(cuts) - 0.2)
    for column, (name, rows) in enumerate(cuts.items()):
        left = wide * column
        sheet.write((left + 0.5, 0.95), name, bold=True, scale=0.9)
        for at, share in enumerate(_shares(alone, rows)):
            color = colors[WHOLE if share == 1 else CUT]
            sheet.cell((left + 0.5, -at), 1.0, 0.66, fill=THEME.band, edge=THEME.grid)
            sheet.cell((left + float(share) / 2, -at), float(share), 0.66, fill=color, edge=color)
            ink = ink_on(color if share > Fraction(1, 2) else THEME.band)
            sheet.write((left + 0.5, -at), "whole" if share == 1 else str(share), scale=0.75, color=ink)
    return sheet.picture()


def _draw_border(sheet: Sheet, y: float, name: str, right: float) -> None:
    pale = mixed(THEME.muted, THEME.background)
    sheet.cell(((right - 1.42) / 2, y), right + 1.42, 0.03, fill=pale, edge=pale)
    sheet.write((right + 0.04, y), name, bold=True, scale=0.9, ha="left")


def _shares(alone: Sequence[SavedRow], rows: Sequence[SavedRow]) -> list[Fraction]:
    """Return a rank's share of each tensor that one rank alone saves. Raises: InputError for other tensors."""
    if [(row.op, row.what) for row in alone] != [(row.op, row.what) for row in rows]:
        raise InputError("these ranks keep other tensors than one alone: compare runs with the same recompute")
    return [Fraction(row.nbytes, whole.nbytes) for whole, row in zip(alone, rows, strict=True)]
