"""A table out of rows, as the reports look. Owns the layout of a lesson's own numbers, nothing that counts them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from zerosim.report.look import Adaptive, Look, Stack, titled


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", note: str = ""
) -> Stack | Adaptive:
    """One line per row. Columns of numbers stand right, with thousands apart; words left; True and False are marks."""

    def build(look: Look) -> Any:
        shown = look.table()
        for column, name in enumerate(header):
            numeric = all(_is_number(row[column]) for row in rows)
            shown.add_column(look.text(name), justify="right" if numeric else "left")
        for row in rows:
            shown.add_row(*(_cell(look, value) for value in row))
        return shown

    body = Adaptive(build)
    return titled(title, body, note) if title or note else body


def _is_number(value: object) -> bool:
    """A number, one with its unit, or the absence of one: '16.6 GB', '2Ψ', '-', ''."""
    return not isinstance(value, str) or re.fullmatch(r"-?|[-+]?[\d.,]+ ?(%|Ψ|[KMGT]?B)?", value) is not None


def _cell(look: Look, value: object) -> Any:
    if isinstance(value, bool):
        return look.mark(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return look.text("" if value is None else str(value))
