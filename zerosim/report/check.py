"""Printed figures beside what was counted: what `zerosim check` shows.

The verdicts are those of `zerosim/analysis/expect`. A line or a column names which of its numbers is a count and which
a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column
from rich.text import Text

from zerosim.analysis.expect import Judged
from zerosim.analysis.expect.sweeps import describe
from zerosim.report.check_tables import basis, contradictions, figures_table, rules
from zerosim.report.look import Adaptive, Grid, Stack, prose, right
from zerosim.report.names import counted
from zerosim.report.notebook import InNotebook


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
        """How many figures there are, how many of them are compared with what, are bold, or differ."""
        return {
            "figures": sum(len(table.cells) for table in self.tables),
            "by count": sum(len(table.cells) for table in self.tables if table.expectation.quantity is not None),
            "by formula": sum(len(table.cells) for table in self.tables if table.expectation.formula is not None),
            "bold": sum(table.num_bold for table in self.tables),
            "differ": self.num_failed,
        }


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
        """The JSON form, schema 1. Exact numbers are in base units: bytes, parameters, multiples of Psi."""
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
            None if in_full else _contradicted(tables),
            _failures(tables),
            _closing(self),
        )


def _whole(path: str, judged: Judged) -> RenderableType:
    """One table in full: where it is printed, every figure, what to know about it."""
    expectation = judged.expectation
    title = f"{path}: {expectation.title}" if expectation.title else path
    return Stack(
        prose(title, "bold"),
        prose(f"Printed: {expectation.source}."),
        prose(basis(expectation), "dim"),
        Text(""),
        figures_table(judged),
        Text(""),
        prose(rules(expectation), "dim"),
        prose(f"Note: {expectation.note}", "yellow") if expectation.note else None,
        prose(f"Beside it, not judged: {expectation.why}", "yellow") if expectation.why else None,
        close=True,
    )


def _overview(files: Sequence[CheckedFile]) -> RenderableType:
    """A line for each file: how many figures, how many of them beside a count, beside a formula, in bold, wrong."""
    folders = {str(Path(file.path).parent) for file in files}
    folder = next(iter(folders)) if len(folders) == 1 else ""
    title = Column(f"{folder}/" if folder else "scenario", overflow="fold")
    headers = ("figures", "by count", "by formula", "bold", "differ")
    grid = Grid(title, *(right(name, no_wrap=True) for name in headers), Column("", no_wrap=True))
    for file in files:
        counts = (str(file.numbers[name] or "-") for name in headers)
        grid.add(Path(file.path).name if folder else file.path, *counts, not file.num_failed)
    return Adaptive(grid, grid.without("figures", "bold"))


def _failures(tables: Sequence[tuple[str, Judged]]) -> RenderableType | None:
    """Every figure that does not agree, one line each."""
    lines = []
    for path, table in tables:
        for cell in table.cells:
            place = describe(table.expectation.axes, cell.labels)
            where = ": ".join(part for part in (path, table.expectation.title, place) if part)
            lines += [_line(f"≠ {where}: {failure}", "red") for failure in cell.failures]
    return Stack(*lines, close=True) if lines else None


def _contradicted(tables: Sequence[tuple[str, Judged]]) -> RenderableType | None:
    """Where a source's figures are not what its own rule gives, and why."""
    notes = [
        prose(f"{path}: {text}", "yellow") for path, table in tables if (text := contradictions(table.expectation))
    ]
    heading = prose("Figures that are not what their source's own rule gives:", "bold")
    return Stack(heading, *notes, close=True) if notes else None


def _closing(report: CheckReport) -> RenderableType:
    figures, counts, formulas = (
        sum(file.numbers[name] for file in report.files) for name in ("figures", "by count", "by formula")
    )
    text = (
        f"{counted(figures, 'printed figure')} in {counted(len(report.files), 'scenario')}: {counts} compared with a "
        f"count, {formulas} with a formula. "
    )
    failed = sum(file.num_failed for file in report.files)
    text += "All agree." if report.passed else f"{failed} {'do' if failed > 1 else 'does'} not agree."
    skipped = f"Not checked, for they expect nothing: {', '.join(report.skipped)}." if report.skipped else ""
    verdict = prose(text, "bold green" if report.passed else "bold red")
    return Stack(_line(skipped, "dim") if skipped else None, verdict, close=True)


def _line(text: str, style: str) -> Adaptive:
    """As wide as the console: one failure is one line in a pipe."""
    return Adaptive(lambda look: Text(look.text(text), style=style))


def _table_dict(judged: Judged) -> dict[str, Any]:
    expectation = judged.expectation
    names = ("title", "source", "quantity", "formula", "beside", "why", "note", "rounding", "counted_on")
    return {
        **{name: getattr(expectation, name) for name in names},
        "within": _number(expectation.within) if expectation.within else None,
        "passed": judged.passed,
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


def _number(value: Fraction | int | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)
