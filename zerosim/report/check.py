"""Printed figures beside what was counted: what `zerosim check` shows.

Owns the layout and the JSON form. The verdicts are those of `zerosim/analysis/expect`. A line or a column says
which of its numbers is a count and which a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from zerosim.analysis.expect import Judged
from zerosim.analysis.expect.sweeps import describe
from zerosim.report.check_tables import figures_table
from zerosim.report.check_words import basis, contradictions, rules
from zerosim.report.look import Adaptive, Look, Stack, prose
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
    def num_figures(self) -> int:
        return sum(len(table.cells) for table in self.tables)

    @property
    def num_counts(self) -> int:
        return sum(len(table.cells) for table in self.tables if table.expectation.quantity is not None)

    @property
    def num_formulas(self) -> int:
        return sum(len(table.cells) for table in self.tables if table.expectation.formula is not None)

    @property
    def num_bold(self) -> int:
        return sum(table.num_bold for table in self.tables)


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
        parts: list[RenderableType | None] = []
        if self._in_full:
            parts += [Stack(*(_whole(file.path, table) for table in file.tables)) for file in self.files]
        if len(self.files) > 1 or not self._in_full:
            parts.append(_overview(self.files))
        if not self._in_full:
            parts.append(_contradicted(self.files))
        parts.append(_failures(self.files))
        parts.append(_closing(self))
        yield Stack(*parts)


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

    def build(look: Look, *columns: str) -> Table:
        table = look.table()
        table.add_column(look.text(f"{folder}/" if folder else "scenario"), overflow="fold")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for file in files:
            numbers = {
                "figures": file.num_figures,
                "by count": file.num_counts,
                "by formula": file.num_formulas,
                "bold": file.num_bold,
                "differ": file.num_failed,
            }
            words = [str(numbers[name]) if numbers[name] else "-" for name in columns]
            name = Path(file.path).name if folder else file.path
            table.add_row(look.text(name), *words, look.mark(not file.num_failed))
        return table

    return Adaptive(
        lambda look: build(look, "figures", "by count", "by formula", "bold", "differ"),
        lambda look: build(look, "by count", "by formula", "differ"),
    )


def _failures(files: Sequence[CheckedFile]) -> RenderableType | None:
    """Every figure that does not agree, one line each."""
    lines = []
    for file in files:
        for table in file.tables:
            expectation = table.expectation
            for cell in table.cells:
                place = describe(expectation.axes, cell.labels)
                where = ": ".join(part for part in (file.path, expectation.title, place) if part)
                lines += [f"≠ {where}: {failure}" for failure in cell.failures]
    return Stack(*(_line(text, "red") for text in lines), close=True) if lines else None


def _contradicted(files: Sequence[CheckedFile]) -> RenderableType | None:
    """Where a source's figures are not what its own rule gives, and why."""
    notes = [
        prose(f"{file.path}: {text}", "yellow")
        for file in files
        for table in file.tables
        if (text := contradictions(table.expectation))
    ]
    if not notes:
        return None
    return Stack(prose("Figures that are not what their source's own rule gives:", "bold"), *notes, close=True)


def _closing(report: CheckReport) -> RenderableType:
    files, figures = len(report.files), sum(file.num_figures for file in report.files)
    counts, formulas = (sum(getattr(f, name) for f in report.files) for name in ("num_counts", "num_formulas"))
    text = (
        f"{_many(figures, 'printed figure')} in {_many(files, 'scenario')}: {counts} compared with a count, "
        f"{formulas} with a formula. "
    )
    failed = sum(file.num_failed for file in report.files)
    text += "All agree." if report.passed else f"{failed} {'do' if failed > 1 else 'does'} not agree."
    skipped = f"Not checked, for they expect nothing: {', '.join(report.skipped)}." if report.skipped else ""
    verdict = prose(text, "bold green" if report.passed else "bold red")
    return Stack(_line(skipped, "dim") if skipped else None, verdict, close=True)


def _line(text: str, style: str) -> Adaptive:
    """As wide as the console: one failure is one line in a pipe."""
    return Adaptive(lambda look: Text(look.text(text), style=style))


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _table_dict(judged: Judged) -> dict[str, Any]:
    expectation = judged.expectation
    names = ("title", "source", "quantity", "formula", "beside", "why", "note", "rounding", "counted_on")
    return {
        **{name: getattr(expectation, name) for name in names},
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
                "difference": _number(cell.difference),
                "passed": cell.passed,
                "failures": list(cell.failures),
            }
            for cell in judged.cells
        ],
    }


def _number(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)
