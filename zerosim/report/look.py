"""The look of printed output: width, colours, boxes, and printable letters.

A report describes its tables (`Grid`) and sentences (`prose`); an `Adaptive` builds them when they are printed, for the
width and the letters of that console. In a pipe there are no boxes and no 80-column limit; if the encoding is not
UTF-8, Greek letters and marks have ASCII names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from zerosim.config.launcher import is_launched
from zerosim.report.names import show
from zerosim.report.notebook import InNotebook, width_asked
from zerosim.units import format_bytes

Cell = str | Text | int | Fraction | bool | None
right = partial(Column, justify="right")
"""A column of numbers."""

PIPE_WIDTH = 160
PROSE_WIDTH = 96
_IN_ASCII = {"Ψ": "Psi", "²": "^2", "✓": "ok", "≠": "!=", "→": "->", "×": "x", "·": "*", "−": "-", "…": "..."}
_ASCII = str.maketrans(_IN_ASCII | {"█": "#", "µ": "u"})
_PLAIN_BOX = box.Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
_RULED_BOX = box.Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")


class Look(NamedTuple):
    """The abilities of the console."""

    width: int
    ascii: bool
    is_plain: bool

    def text(self, text: str) -> str:
        """Return `text` in printable letters."""
        return text.translate(_ASCII) if self.ascii else text

    def mark(self, agrees: bool) -> Text:
        """Return the mark that says whether a count and its formula are the same number."""
        return Text(self.text("✓" if agrees else "≠"), style="bold green" if agrees else "bold red")

    def table(self, *columns: Column) -> Table:
        """Return a table without rows: rules are light, and in a pipe they are dashes."""
        return Table(
            *columns,
            box=_PLAIN_BOX if self.is_plain or self.ascii else _RULED_BOX,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )


class Grid:
    """A table as data, columns and rows, built for the console that shows it: every report describes its tables so.

    A cell is a text, a number (shown with thousands separators), a verdict (shown as a mark), or None (empty).
    """

    def __init__(self, *columns: str | Column, has_header: bool = True) -> None:
        self._columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self._has_header = has_header
        self._rows: list[tuple[Sequence[Cell], str]] = []
        self._rules: set[int] = set()
        self._show: Callable[[Fraction | int], str] = show

    def add(self, *cells: Cell, style: str = "") -> None:
        """Add one more row."""
        self._rows.append((cells, style))

    def rule(self) -> None:
        """Add a rule below the rows so far."""
        self._rules.add(len(self._rows))

    def without(self, *headers: str) -> Grid:
        """Return the same table with fewer columns."""
        kept = [at for at, column in enumerate(self._columns) if column.header not in headers]
        fewer = copy(self)
        fewer._columns = [self._columns[at] for at in kept]
        fewer._rows = [([cells[at] for at in kept if at < len(cells)], style) for cells, style in self._rows]
        return fewer

    def filled(self) -> Grid:
        """Return the same table without empty columns."""
        columns = {column.header: at for at, column in enumerate(self._columns) if column.header}
        seen = {at for cells, _ in self._rows for at, cell in enumerate(cells) if cell not in (None, "")}
        return self.without(*(str(header) for header, at in columns.items() if at not in seen))

    def joined(self, first: str, second: str) -> Grid:
        """Return the same table with the cells of a column below those of another one, if both exist."""
        headers = [column.header for column in self._columns]
        if first not in headers or second not in headers:
            return self
        above, below, tight = headers.index(first), headers.index(second), copy(self)
        tight._rows = []
        for cells, style in self._rows:
            both = "\n".join(str(cell) for cell in (cells[above], cells[below]) if cell)
            tight._rows.append(([*cells[:above], both, *cells[above + 1 :]], style))
        return tight.without(second)

    def stacked(self) -> Grid:
        """Return the same table for little room: one term of a sum per line, and long numbers folded."""

        def narrow(cell: Cell) -> Cell:
            return cell.replace(" + ", "\n+ ").replace(" - ", "\n- ") if isinstance(cell, str) else cell

        tight = copy(self)
        tight._columns = [replace(one, overflow="fold", no_wrap=one.justify != "right") for one in self._columns]
        tight._rows = [([narrow(cell) for cell in cells], style) for cells, style in self._rows]
        return tight

    def short(self) -> Grid:
        """Return the same table with its numbers as bytes in three digits."""
        shorter = copy(self)
        shorter._show = lambda value: format_bytes(round(value))
        return shorter

    def __call__(self, look: Look) -> Table:
        columns = (replace(column, header=Text(look.text(str(column.header))), _cells=[]) for column in self._columns)
        table = look.table(*columns)
        table.show_header = self._has_header
        for index, (cells, style) in enumerate(self._rows):
            if index in self._rules:
                table.add_section()
            table.add_row(*(self._shown(look, cell) for cell in cells), style=style)
        return table

    def _shown(self, look: Look, cell: Cell) -> Text:
        """Return rich's Text, in which brackets are brackets."""
        if isinstance(cell, bool):
            return look.mark(cell)
        if isinstance(cell, (int, Fraction)):
            return Text(self._show(cell))
        if isinstance(cell, Text):
            return Text(look.text(cell.plain), style=cell.style)
        return Text(look.text(cell or ""))


Build = Callable[[Look], RenderableType]


class Adaptive(InNotebook):
    """The first of several forms that fits into the console's width, else the last."""

    def __init__(self, *builds: Build) -> None:
        self._builds = builds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fancy = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
        look = Look(options.max_width, options.ascii_only, not fancy)
        for build in self._builds:
            shown = build(look)
            # Measured with room to spare: a table never asks for more width than the console has.
            if Measurement.get(console, options.update(width=10_000), shown).maximum <= look.width:
                break
        yield shown

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


class Stack(InNotebook):
    """Renderables one below the other, with an empty line between them unless they are `close`."""

    def __init__(self, *parts: RenderableType | None, close: bool = False) -> None:
        self.parts = [part for part in parts if part is not None]
        self._close = close

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, part in enumerate(self.parts):
            if index and not self._close:
                yield Text("")
            yield part


def prose(text: str, style: str = "") -> Adaptive:
    """Return sentences, wrapped at a readable width."""

    def build(look: Look) -> RenderableType:
        return Constrain(Text(look.text(text), style=style), min(look.width, PROSE_WIDTH))

    return Adaptive(build)


def spread(values: Sequence[Fraction | int], separator: str = " ") -> str:
    """Return '12', or '12 to 15' if they differ."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}{separator}to {high:,}"


def titled(title: str, body: RenderableType, note: str = "") -> Stack:
    """Return a heading, a body and, if there is one, a note below it."""
    return Stack(prose(title, "bold"), body, prose(note, "dim") if note else None, close=True)


def emit(shown: RenderableType, stream: TextIO) -> None:
    """Print on a stream. A letter that its encoding lacks becomes '?'; a pipe gets no trailing blanks."""
    console = make_console(stream)
    with console.capture() as captured:
        console.print(shown)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")[:-1])
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads the stream. Open MPI gives the first process a terminal of its own, whatever
    mpirun's is."""
    return stream.isatty() and not is_launched()


def make_console(stream: TextIO) -> Console:
    """Make a console on a stream. A pipe is as wide as COLUMNS says, else wide enough for every table."""
    if is_terminal(stream):
        if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):  # rich would give it 80 columns
            columns, lines = shutil.get_terminal_size()
            return Console(file=stream, highlight=False, width=columns, height=lines)
        return Console(file=stream, highlight=False)
    plain = False if stream.isatty() else None
    return Console(file=stream, highlight=False, width=width_asked("COLUMNS", PIPE_WIDTH), force_terminal=plain)
