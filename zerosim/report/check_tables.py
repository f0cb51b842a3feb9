"""Printed figures and exact numbers as a table: a grid as the source has it, or a list.

Owns the two layouts. With two axes or more the first goes down and the others across, and each place
shows what is printed, what was counted, the formula and the difference below each other; where that is
too wide there is one grid for each value of the second axis; where that is, a list.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zerosim.analysis.expect import Judged, JudgedCell
from zerosim.analysis.expect.figures import show, show_difference
from zerosim.analysis.expect.sweeps import Axis, grid
from zerosim.report.look import Adaptive, Look

Places = dict[tuple[str, ...], JudgedCell]


def figures_table(judged: Judged) -> Adaptive:
    """Every figure of a table, for the width at hand."""
    axes = judged.expectation.axes
    listed = [lambda look: _list(look, judged), lambda look: _tall(look, judged)]
    if len(axes) < 2:
        return Adaptive(*listed)
    whole = [lambda look: _grid(look, judged, ())]
    split = [lambda look: _split(look, judged)] if len(axes) > 2 else []
    return Adaptive(*whole, *split, *listed)


def _split(look: Look, judged: Judged) -> RenderableType:
    """One grid for each value of the second axis."""
    axis = judged.expectation.axes[1]
    parts: list[RenderableType] = []
    for label in axis.labels:
        parts += [Text(look.text(_header(axis, label)), style="bold"), _grid(look, judged, (label,)), Text("")]
    return Group(*parts[:-1])


def _grid(look: Look, judged: Judged, second: tuple[str, ...]) -> Table:
    """Rows of the first axis; columns of the others, or of those after `second`."""
    rows, *others = judged.expectation.axes
    across = others[len(second) :]
    places: Places = {cell.labels: cell for cell in judged.cells}
    table = look.table()
    table.add_column(look.text(rows.name), justify="right" if rows.labels[0].isdigit() else "left")
    table.add_column("", style="dim", no_wrap=True)
    columns = [point.labels for point in grid(across)]
    for labels in columns:
        header = "\n".join(_header(axis, label) for axis, label in zip(across, labels, strict=True))
        table.add_column(look.text(header), justify="right", no_wrap=True)
    kinds = _kinds(judged)
    for index, row in enumerate(rows.labels):
        if index:
            table.add_section()
        cells = [places.get((row, *second, *labels)) for labels in columns]
        for kind in kinds:
            shown = [_entry(look, cell, kind) for cell in cells]
            table.add_row(look.text(row) if kind == kinds[0] else "", kind, *shown)
    return table


def _list(look: Look, judged: Judged) -> Table:
    """A row for each figure: its place, then what is printed and what is not."""
    kinds = _kinds(judged)
    table = look.table()
    for axis in judged.expectation.axes:
        table.add_column(look.text(axis.name), overflow="fold")
    for kind in kinds:
        table.add_column(kind.replace(" ", "\n"), justify="right", no_wrap=True)
    for cell in judged.cells:
        table.add_row(*(look.text(label) for label in cell.labels), *(_entry(look, cell, kind) for kind in kinds))
    return table


def _tall(look: Look, judged: Judged) -> Table:
    """Where there is little room: a figure's numbers below each other, its place beside them."""
    axes = judged.expectation.axes
    table = look.table()
    table.add_column(look.text(", ".join(axis.name for axis in axes)), overflow="fold")
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for index, cell in enumerate(judged.cells):
        if index:
            table.add_section()
        for kind in _kinds(judged):
            place = ", ".join(cell.labels) if kind == "printed" else ""
            table.add_row(look.text(place), kind, _entry(look, cell, kind))
    return table


def _kinds(judged: Judged) -> list[str]:
    """What there is to show of each figure."""
    expectation = judged.expectation
    kinds = ["printed"]
    kinds += ["instead"] if any(cell.instead for cell in judged.cells) else []
    kinds += ["count"] if expectation.quantity else []
    kinds += ["formula"] if expectation.formula else []
    kinds += ["difference"]
    kinds += ["count beside"] if expectation.beside else []
    return kinds


def _entry(look: Look, cell: JudgedCell | None, kind: str) -> Text:
    """One number in the figure's unit; the verdict stands with the figure that is judged."""
    if cell is None:
        return Text("-" if kind == "printed" else "", style="dim")
    figure, mark = cell.printed, "✓" if cell.passed else "≠"
    if kind == "printed":
        text = f"*{figure.text}*" if figure.is_bold else figure.text
        if cell.instead is not None:
            return Text(look.text(f"{text}  "), style="dim")
        style = "bold red" if not cell.passed else "bold" if figure.is_bold else ""
        return Text(look.text(f"{text} {mark}"), style=style)
    if kind == "instead":
        right = "" if cell.instead is None else f"{cell.instead.text} {mark}"
        return Text(look.text(right), style="yellow" if cell.passed else "bold red")
    if kind == "difference":
        return Text(show_difference(cell.difference), style="" if cell.passed else "red")
    value = {"count": cell.counted, "formula": cell.formula, "count beside": cell.beside}[kind]
    return Text("" if value is None else show(figure.measured(value)))


def _header(axis: Axis, label: str) -> str:
    """'stage 1', but '7.5B' alone."""
    return f"{axis.name} {label}" if label.isdigit() else label
