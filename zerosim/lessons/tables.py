"""A table of a lesson's own rows, in the look of the reports; a table too wide for the page is folded."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.report.look import Adaptive, Look, Stack, titled

_WORD = 20  # letters: a longer word may be broken
_GAP = 2


class _Column(NamedTuple):
    """A name and its cells, in printable letters."""

    name: str
    cells: list[Any]
    is_numeric: bool

    @property
    def longest(self) -> int:
        """The width without any line break."""
        return max(len(self.name), *(len(cell) for cell in self.cells), 1)

    @property
    def least(self) -> int:
        """The least width: numbers stay whole, words may be wrapped."""
        words = [*self.name.split(), *(word for cell in self.cells for word in str(cell).split())]
        if self.is_numeric:
            return max(*(len(word) for word in self.name.split()), *(len(cell) for cell in self.cells), 1)
        return max(*(min(len(word), _WORD) for word in words), 1)


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", note: str = ""
) -> Stack | Adaptive:
    """Return one line per row. Numbers are right-aligned, with a comma between thousands; words left; True and False
    are marks.

    If the table is wider than the page, the last columns stand below, beside the first words again.
    """

    def build(look: Look) -> Stack:
        columns = [_column(look, header[at], [row[at] for row in rows]) for at in range(len(header))]
        return Stack(*(_shown(look, piece) for piece in _pieces(columns, look.width)))

    body = Adaptive(build)
    return titled(title, body, note) if title or note else body


def _pieces(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Return as few groups of columns as the width allows, each after the first columns of words."""
    num_first = max(1, next((at for at, column in enumerate(columns) if column.is_numeric), 0))
    first, rest = columns[:num_first], columns[num_first:]
    pieces = [list(first)]
    for column in rest:
        if len(pieces[-1]) > num_first and _sum([c.least for c in [*pieces[-1], column]]) > width:
            pieces.append(list(first))
        pieces[-1].append(column)
    return pieces


def _shown(look: Look, columns: Sequence[_Column]) -> Any:
    """Give each column its least width; the rest goes to those that want more, the smallest wish first."""
    widths = [column.least for column in columns]
    spare = max(0, look.width - _sum(widths))
    by_wish = sorted(range(len(columns)), key=lambda at: columns[at].longest - widths[at])
    for done, at in enumerate(by_wish):
        more = min(columns[at].longest - widths[at], spare // (len(columns) - done))
        widths[at] += more
        spare -= more
    shown = look.table()
    for column, width in zip(columns, widths, strict=True):
        name = "\n".join(textwrap.wrap(column.name, width))
        shown.add_column(name, justify="right" if column.is_numeric else "left", width=width, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*cells)
    return shown


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _column(look: Look, name: str, values: Sequence[object]) -> _Column:
    is_numeric = all(_is_number(value) for value in values)
    return _Column(look.text(name), [_cell(look, value) for value in values], is_numeric)


def _is_number(value: object) -> bool:
    """Return whether a cell is a number, one with its unit, or empty: '16.6 GB', '2Ψ', '-', ''."""
    return not isinstance(value, str) or re.fullmatch(r"-?|[-+]?[\d.,]+ ?(%|Ψ|[KMGT]?B)?", value) is not None


def _cell(look: Look, value: object) -> Any:
    if isinstance(value, bool):
        return look.mark(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return look.text("" if value is None else str(value))
