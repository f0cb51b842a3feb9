"""A table as data: every report describes its tables so, and one builder makes them for the console at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import partial

from rich.table import Column, Table
from rich.text import Text

from zerosim.report.look import Look, show
from zerosim.units import format_bytes

Cell = str | Text | int | Fraction | bool | None
right = partial(Column, justify="right")
"""A column of numbers."""


class Grid:
    """A table as data, columns and rows, built for the console that shows it: each report describes its tables so.

    A cell is a text, a number (shown with thousands apart), a verdict (shown as a mark), or None (left empty).
    """

    def __init__(self, *columns: str | Column, has_header: bool = True) -> None:
        self._columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self._has_header = has_header
        self._rows: list[tuple[Sequence[Cell], str]] = []
        self._rules: set[int] = set()
        self._show: Callable[[Fraction | int], str] = show

    def add(self, *cells: Cell, style: str = "") -> None:
        """One row more."""
        self._rows.append((cells, style))

    def rule(self) -> None:
        """A rule below the rows so far."""
        self._rules.add(len(self._rows))

    def without(self, *headers: str) -> Grid:
        """The same table with fewer columns."""
        kept = [at for at, column in enumerate(self._columns) if column.header not in headers]
        fewer = copy(self)
        fewer._columns = [self._columns[at] for at in kept]
        fewer._rows = [([cells[at] for at in kept if at < len(cells)], style) for cells, style in self._rows]
        return fewer

    def short(self) -> Grid:
        """The same table with its numbers as bytes in three figures."""
        shorter = copy(self)
        shorter._show = lambda value: format_bytes(round(value))
        return shorter

    def __call__(self, look: Look) -> Table:
        columns = [replace(column, header=Text(look.text(str(column.header))), _cells=[]) for column in self._columns]
        table = look.table(*columns)
        table.show_header = self._has_header
        for index, (cells, style) in enumerate(self._rows):
            if index in self._rules:
                table.add_section()
            table.add_row(*(self._shown(look, cell) for cell in cells), style=style)
        return table

    def _shown(self, look: Look, cell: Cell) -> Text:
        """As rich's Text, in which brackets are brackets."""
        if isinstance(cell, bool):
            return look.mark(cell)
        if isinstance(cell, (int, Fraction)):
            return Text(self._show(cell))
        if isinstance(cell, Text):
            return Text(look.text(cell.plain), style=cell.style)
        return Text(look.text(cell or ""))
