"""Printed figures beside counted ones: the output of `zerosim check`.

The verdicts are those of `zerosim/analysis/expect`. A line or a column says which of its numbers is a count and which a
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column
from rich.text import Text

from zerosim.analysis.expect import Expectation, Judged
from zerosim.analysis.expect.keys import COMPUTED, FIGURES, MEASURED, PRINTED
from zerosim.analysis.expect.sweeps import describe
from zerosim.report.check_tables import basis, contradiction, figures_table, rules
from zerosim.report.look import Adaptive, Grid, Stack, prose, right
from zerosim.report.names import counted
from zerosim.report.notebook import InNotebook

SAID_BY = {
    PRINTED: "Printed:",
    MEASURED: "Measured:",
    COMPUTED: "Computed for these runs; no source prints them. The rule:",
}
_UNCOUNTED = "Formula only, because nothing counts these figures:"
_CONTRADICTED = "Figures that differ from their source's own rule:"


_COMPARED: Mapping[str, Callable[[Expectation], bool]] = {
    "figures": lambda expectation: True,
    "by count": lambda expectation: expectation.quantity is not None and not expectation.is_modelled,
    "by clock": lambda expectation: expectation.is_modelled,
    "by formula": lambda expectation: expectation.formula is not None,
    "formula only": lambda expectation: expectation.quantity is None,
}
"""What a table's figures are compared with."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One scenario and its judged tables."""

    path: str
    tables: tuple[Judged, ...]

    @property
    def num_failed(self) -> int:
        return sum(table.num_failed for table in self.tables)

    @property
    def numbers(self) -> dict[str, int]:
        """How many figures there are, how many are compared with what, their sources, how many are bold, and how many
        differ."""
        found = dict.fromkeys((*_COMPARED, *FIGURES), 0)
        found |= {"bold": sum(table.num_bold for table in self.tables), "differ": self.num_failed}
        for table in self.tables:
            compared = [name for name, is_so in _COMPARED.items() if is_so(table.expectation)]
            for name in (*compared, table.expectation.figures):
                found[name] += len(table.cells)
        return found


class CheckReport(InNotebook):
    """Every file's verdict; `skipped` are scenarios that expect nothing. `in_full` shows every figure."""

    def __init__(self, files: Sequence[CheckedFile], skipped: Sequence[str] = (), *, in_full: bool = False) -> None:
        self.files = list(files)
        self.skipped = list(skipped)
        self._in_full = in_full

    @property
    def passed(self) -> bool:
        return not any(file.num_failed for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, schema 1. Exact numbers are in base units: bytes, parameters, multiples of Psi."""
        return {
            "schema": 1,
            "passed": self.passed,
            "not_checked": self.skipped,
            "scenarios": [
                {
                    "file": file.path,
                    "passed": not file.num_failed,
                    "tables": [_table_dict(table) for table in file.tables],
                }
                for file in self.files
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        in_full, several = self._in_full, len(self.files) > 1
        tables = [(file.path, table) for file in self.files for table in file.tables]
        yield Stack(
            *(_whole(path, table) for path, table in tables if in_full),
            _overview(self.files) if several or not in_full else None,
            None if in_full else _noted(_UNCOUNTED, lambda one: one.formula_only, tables),
            None if in_full else _noted(_CONTRADICTED, contradiction, tables, "yellow"),
            _failures(tables),
            _closing(self),
        )


def _whole(path: str, judged: Judged) -> RenderableType:
    """Return one table in full: its source, every figure, and notes."""
    expectation = judged.expectation
    title = f"{path}: {expectation.title}" if expectation.title else path
    return Stack(
        prose(title, "bold"),
        prose(f"{SAID_BY[expectation.figures]} {expectation.source}."),
        prose(basis(expectation), "dim"),
        Text(""),
        figures_table(judged),
        Text(""),
        prose(rules(judged), "dim"),
        prose(f"Note: {expectation.note}", "yellow") if expectation.note else None,
        prose(f"Beside it, not judged: {expectation.why}", "yellow") if expectation.why else None,
        close=True,
    )


def _overview(files: Sequence[CheckedFile]) -> RenderableType:
    """Return a line for each file: its number of figures, how many are compared with a count, the clock, a formula or
    nothing, how many no source prints, and how many differ."""
    folders = {str(Path(file.path).parent) for file in files}
    folder = next(iter(folders)) if len(folders) == 1 else ""
    title = Column(f"{folder}/" if folder else "scenario", overflow="fold")
    names = ["figures", "by count", "by clock", "by formula", "formula only", "computed", "differ"]
    if not any(file.numbers["by clock"] for file in files):
        names.remove("by clock")
    headers = [name.replace(" ", "\n") for name in names]
    grid = Grid(title, *(right(name, no_wrap=True) for name in headers), Column("", no_wrap=True))
    for file in files:
        counts = (str(file.numbers[name] or "-") for name in names)
        grid.add(Path(file.path).name if folder else file.path, *counts, not file.num_failed)
    return Adaptive(grid, grid.without("figures", "by\nformula"))


def _failures(tables: Sequence[tuple[str, Judged]]) -> RenderableType | None:
    """Return every figure that does not agree, one line each."""
    lines = []
    for path, table in tables:
        lines += [_line(f"≠ {path}: {failure}", "red") for failure in table.failures]
        for cell in table.cells:
            place = describe(table.expectation.axes, cell.labels)
            where = ": ".join(part for part in (path, table.expectation.title, place) if part)
            lines += [_line(f"≠ {where}: {failure}", "red") for failure in cell.failures]
    return Stack(*lines, close=True) if lines else None


def _noted(
    heading: str, why: Callable[[Expectation], str], tables: Sequence[tuple[str, Judged]], style: str = ""
) -> RenderableType | None:
    """Return below a heading the tables with notes, and the notes."""
    expectations = [(path, table.expectation) for path, table in tables if why(table.expectation)]
    notes = [prose(": ".join(filter(None, (path, one.title, why(one)))), style) for path, one in expectations]
    return Stack(prose(heading, "bold"), *notes, close=True) if notes else None


def _closing(report: CheckReport) -> RenderableType:
    total = {name: sum(file.numbers[name] for file in report.files) for name in report.files[0].numbers}
    number = total["figures"]
    from_where = [(total[name], name) for name in FIGURES if total[name]]
    if len(from_where) > 1:
        what = f"{counted(number, 'figure')} ({', '.join(f'{each:,} {name}' for each, name in from_where)})"
    else:
        what = counted(number, f"{from_where[0][1]} figure")
    alone = f", {total['formula only']} with that alone" if total["formula only"] else ""
    clock = f", {total['by clock']} with the clock, which is a model" if total["by clock"] else ""
    text = (
        f"{what} in {counted(len(report.files), 'scenario')}: {total['by count']} compared with a count, "
        f"{total['by formula']} with a formula{alone}{clock}. "
    )
    failed = sum(file.num_failed for file in report.files)
    text += "All agree." if report.passed else f"{failed} {'do' if failed > 1 else 'does'} not agree."
    skipped = f"Not checked, because they expect nothing: {', '.join(report.skipped)}." if report.skipped else ""
    verdict = prose(text, "bold green" if report.passed else "bold red")
    return Stack(_line(skipped, "dim") if skipped else None, verdict, close=True)


def _line(text: str, style: str) -> Adaptive:
    """Return text as wide as the console: one failure is one line in a pipe."""
    return Adaptive(lambda look: Text(look.text(text), style=style))


def _table_dict(judged: Judged) -> dict[str, Any]:
    expectation = judged.expectation
    names = ("title", "source", "figures", "quantity", "formula", "formula_only", "beside", "why", "note", "rounding")
    return {
        **{name: getattr(expectation, name) for name in names},
        "counted_on": expectation.counted_on,
        "within": _number(expectation.within) if expectation.within else None,
        "passed": judged.passed,
        **_list_dict(judged),
        "cells": [
            {
                "at": {axis.name: label for axis, label in zip(expectation.axes, cell.labels, strict=True)},
                "printed": cell.printed.digits,
                "unit": cell.printed.unit,
                "bold": cell.printed.is_bold,
                "instead": cell.instead.digits if cell.instead else None,
                "counted": _number(cell.counted),
                "formula": _number(cell.formula),
                "beside": _number(cell.beside),
                "outside": {cause: _number(nbytes) for cause, nbytes in cell.outside.items()},
                "difference": _number(cell.difference),
                "passed": cell.passed,
                "failures": list(cell.failures),
            }
            for cell in judged.cells
        ],
    }


def _list_dict(judged: Judged) -> dict[str, Any]:
    """Return the JSON form of a list of runs: its error as a whole."""
    if not judged.expectation.is_list:
        return {}
    errors, mean_within = judged.errors, judged.expectation.mean_within
    return {
        "errors": asdict(errors) | {"mean_within": float(mean_within) if mean_within else None},
        "rank_correlations": judged.ranks,
        "failures": list(judged.failures),
    }


def _number(value: Fraction | int | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)
