"""What is said about a table of printed figures: what was counted, how it was rounded, what contradicts what."""

from __future__ import annotations

from zerosim.analysis.expect import Expectation
from zerosim.analysis.expect.figures import ROUNDINGS
from zerosim.analysis.expect.quantities import COUNTS, FORMULAS, SHAPES
from zerosim.units import format_bytes


def basis(expectation: Expectation) -> str:
    """Which numbers are counts, and of what; which are formulas."""
    parts = []
    where = "on shapes alone" if expectation.counted_on == SHAPES else "while training with real numbers"
    at = f", at {expectation.at}" if expectation.at != "end_of_backward" else ""
    if expectation.quantity:
        parts.append(f"Count ({where}{at}): {COUNTS[expectation.quantity].what}.")
    if expectation.formula:
        of = f"{expectation.calculator}, " if expectation.calculator else ""
        parts.append(f"Formula: {of}{FORMULAS[expectation.formula].what}.")
    if expectation.beside:
        parts.append(f"Count beside it ({where}{at}): {COUNTS[expectation.beside].what}.")
    units = {cell.printed.unit: cell.printed.scale for cell in expectation.cells if cell.printed.scale > 1}
    parts += [f"{unit} is 1e{len(str(scale)) - 1}." for unit, scale in units.items() if scale % 10 == 0]
    return " ".join(parts)


def rules(expectation: Expectation) -> str:
    """How the source rounded, and what it sets in bold."""
    text = f"Rounding: {ROUNDINGS[expectation.rounding]}."
    if expectation.bold:
        size = format_bytes(expectation.bold.at_most)
        text += f" In *bold*: the smallest {expectation.bold.smallest} of a column with at most {size}."
    return text


def contradictions(expectation: Expectation) -> str:
    """Why printed figures are not what the source's own rule gives; empty where they are."""
    if not any(cell.instead for cell in expectation.cells):
        return ""
    return f"{expectation.title}: {expectation.note}" if expectation.title else expectation.note
