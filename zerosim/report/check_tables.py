"""Printed figures beside exact numbers: a grid like the source's, or a list; and notes on them.

With two axes or more the first goes down and the others across, and each place shows the printed figure, the count, the
formula and the difference below each other. If that is too wide there is one grid for each value of the second axis; if
those are too wide, a list.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from zerosim.analysis.expect import Expectation, Judged, JudgedCell
from zerosim.analysis.expect.asked import SHAPES
from zerosim.analysis.expect.closed_forms import FORMULAS
from zerosim.analysis.expect.counts import COUNTS, TIMES
from zerosim.analysis.expect.errors import FEWEST_RANKED
from zerosim.analysis.expect.figures import ROUNDINGS, show_difference, within_text
from zerosim.analysis.expect.keys import FIGURES, MEASURED
from zerosim.analysis.expect.sweeps import Axis, grid
from zerosim.report.look import Adaptive, Cell, Grid, Look, right
from zerosim.units import format_bytes


def figures_table(judged: Judged) -> Adaptive:
    """Return every figure of a table, for the available width."""
    axes = judged.expectation.axes
    builds: list[Callable[[Look], RenderableType]] = [_listed(judged), _tall(judged)]
    if judged.expectation.is_list:
        return Adaptive(*builds)
    if len(axes) > 2:
        builds.insert(0, lambda look: _split(look, judged))
    if len(axes) > 1:
        builds.insert(0, _whole(judged))
    return Adaptive(*builds)


def _split(look: Look, judged: Judged) -> RenderableType:
    """Return one grid for each value of the second axis."""
    axis = judged.expectation.axes[1]
    parts: list[RenderableType] = []
    for label in axis.labels:
        parts += [Text(look.text(_header(axis, label)), style="bold"), _whole(judged, label)(look), Text("")]
    return Group(*parts[:-1])


def _whole(judged: Judged, *second: str) -> Grid:
    """Return rows of the first axis; columns of the others, or of those after the `second`, which has one value."""
    rows, *others = judged.expectation.axes
    across = others[len(second) :]
    columns = [point.labels for point in grid(across)]
    headers = ("\n".join(map(_header, across, labels)) for labels in columns)
    table = Grid(
        Column(rows.name, justify="right" if rows.labels[0].isdigit() else "left"),
        Column("", style="dim", no_wrap=True),
        *(right(header, no_wrap=True) for header in headers),
    )
    places = {cell.labels: cell for cell in judged.cells}
    for row in rows.labels:
        table.rule()
        cells = [places.get((row, *second, *labels)) for labels in columns]
        for kind in _kinds(judged):
            place = row if kind in FIGURES else None
            table.add(place, kind, *(_entry(cell, kind) for cell in cells))
    return table


def _listed(judged: Judged) -> Grid:
    """Return a row for each figure: its place, then the printed number and the others."""
    kinds = _kinds(judged)
    axes = (Column(axis.name, overflow="fold") for axis in judged.expectation.axes)
    table = Grid(*axes, *(right(kind.replace(" ", "\n"), no_wrap=True) for kind in kinds))
    for cell in judged.cells:
        table.add(*cell.labels, *(_entry(cell, kind) for kind in kinds))
    return table


def _tall(judged: Judged) -> Grid:
    """Return a narrow form: a figure's numbers below each other, its place beside them."""
    place = ", ".join(axis.name for axis in judged.expectation.axes)
    table = Grid(Column(place, overflow="fold"), Column("", style="dim", no_wrap=True), right("", no_wrap=True))
    for cell in judged.cells:
        table.rule()
        for kind in _kinds(judged):
            table.add(", ".join(cell.labels) if kind in FIGURES else None, kind, _entry(cell, kind))
    return table


def _kinds(judged: Judged) -> list[str]:
    """Return which numbers each figure has."""
    expectation = judged.expectation
    has = {
        expectation.figures: True,
        "instead": any(cell.instead for cell in judged.cells),
        "count": expectation.quantity and not expectation.is_modelled,
        "modelled": expectation.is_modelled,
        "outside": expectation.outside,
        "formula": expectation.formula,
        "difference": not judged.cells[0].printed.is_verdict,
        "off": expectation.figures == MEASURED,
        _beside(expectation): expectation.beside,
    }
    return [kind for kind, there in has.items() if there]


def _beside(expectation: Expectation) -> str:
    return "modelled beside" if expectation.beside in TIMES else "count beside"


def _entry(cell: JudgedCell | None, kind: str) -> Cell:
    """Return one number in the figure's unit; the verdict stands with the judged figure."""
    if cell is None:
        return Text("-" if kind in FIGURES else "", style="dim")
    figure, mark = cell.printed, "✓" if cell.passed else "≠"
    if kind in FIGURES:
        text = f"*{figure.text}*" if figure.is_bold else figure.text
        if cell.instead is not None:
            return Text(f"{text}  ", style="dim")
        return Text(f"{text} {mark}", style="bold red" if not cell.passed else "bold" if figure.is_bold else "")
    if kind == "instead":
        right_one = "" if cell.instead is None else f"{cell.instead.text} {mark}"
        return Text(right_one, style="yellow" if cell.passed else "bold red")
    if kind == "difference":
        return Text(show_difference(cell.difference), style="" if cell.passed else "red")
    if kind == "off":
        return Text(f"{float(100 * cell.share_off):+.3g} %", style="" if cell.passed else "red")
    others = {"outside": sum(cell.outside.values(), Fraction(0)), "formula": cell.formula}
    value = cell.beside if kind.endswith("beside") else others.get(kind, cell.counted)
    if value is None:
        return Text("")
    return Text(_four_digits(figure.measured(value)) if kind.startswith("modelled") else figure.shown(value))


def _four_digits(value: Fraction) -> str:
    """Return a model's figure with no more digits than it deserves."""
    return f"{float(value):,.0f}" if float(value) >= 1000 else f"{float(value):.4g}"


def _header(axis: Axis, label: str) -> str:
    """Return 'stage 1', but '7.5B' alone."""
    return f"{axis.name} {label}" if label.isdigit() else label


# -- in words -----------------------------------------------------------------------------------
def basis(expectation: Expectation) -> str:
    """Return which numbers are counts, and of what; which are formulas."""
    parts = []
    where = "on shapes alone" if expectation.counted_on == SHAPES else "while training with real numbers"
    at = f", at {expectation.at}" if expectation.at != "end_of_backward" else ""
    if expectation.quantity:
        name = "Modelled" if expectation.is_modelled else "Count"
        parts.append(f"{name} ({where}{at}): {COUNTS[expectation.quantity].what}.")
    if expectation.outside:
        causes = (
            f"{cause} ({format_bytes(each) if isinstance(each, int) else each.what})"
            for cause, each in expectation.outside.items()
        )
        parts.append(f"Outside of it: {'; '.join(causes)}.")
    if expectation.formula:
        of = f"{expectation.calculator}, " if expectation.calculator else ""
        parts.append(f"Formula: {of}{FORMULAS[expectation.formula].what}.")
    if expectation.formula_only:
        parts.append(f"Formula only: {expectation.formula_only}")
    if expectation.beside:
        parts.append(f"{_beside(expectation).capitalize()} it ({where}{at}): {COUNTS[expectation.beside].what}.")
    if expectation.spared_from:
        fields = ", ".join(f"{name} {value}" for name, value in expectation.spared_from.items())
        parts.append(f"Less than with {fields}.")
    if any(cell.over for cell in expectation.cells):
        pairs = (f"{cell.labels[-1]} by {cell.over.labels[-1]}" for cell in expectation.cells if cell.over is not None)
        parts.append(f"Divided: {'; '.join(dict.fromkeys(pairs))}.")
    units = {cell.printed.unit: cell.printed.scale for cell in expectation.cells if cell.printed.scale > 1}
    parts += [f"{unit} is 1e{len(str(scale)) - 1}." for unit, scale in units.items() if scale % 10 == 0]
    return " ".join(parts)


def rules(judged: Judged) -> str:
    """Return how the source rounded, and what it sets in bold; for its measurements, the allowed and the actual error
    of the count."""
    expectation = judged.expectation
    if not expectation.rounding:
        added = " with the bytes outside of it" if expectation.outside else ""
        what = "clock" if expectation.is_modelled else "count"
        text = (
            f"Measured: the {what}{added} may be {within_text(expectation.within)} off; the worst is "
            f"{float(100 * judged.worst):.3g} % off."
        )
        return f"{text} {_as_a_list(judged)}" if expectation.is_list else text
    text = f"Rounding: {ROUNDINGS[expectation.rounding]}."
    if expectation.bold:
        size = format_bytes(expectation.bold.at_most)
        text += f" In *bold*: the smallest {expectation.bold.smallest} of a column with at most {size}."
    return text


def _as_a_list(judged: Judged) -> str:
    """Return the error of all rows together, and how well they rank layouts."""
    text, ranking, ranks = f"All rows: {judged.errors}.", judged.expectation.ranking, judged.ranks
    if judged.expectation.mean_within:
        text += f" The mean may be {within_text(judged.expectation.mean_within)}."
    if ranking is not None and ranks:
        above = sum(rank > ranking.above for rank in ranks)
        text += (
            f" Ranks of layouts within the same {', '.join(ranking.same)} (Spearman): median {median(ranks):.2f}, "
            f"above {ranking.above:g} in {above} of {len(ranks)} groups of at least {FEWEST_RANKED} rows."
        )
    return text


def contradiction(expectation: Expectation) -> str:
    """Return why printed figures contradict the source's own rule; empty if they do not."""
    return expectation.note if any(cell.instead for cell in expectation.cells) else ""
