"""What an explanation is made of: terms, each a formula with its numbers and bytes, under a title with notes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.units import format_bytes

PRINTED = "The paper prints"
"""How the note begins that `Section.agrees` is about."""


@dataclass(frozen=True, slots=True)
class Term:
    """One line: a formula, the same with its numbers, and bytes."""

    name: str
    formula: str
    numbers: str
    value: Fraction
    is_sum: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Bytes are exact where they are whole; else 'exact' has the fraction."""
        whole = self.value.denominator == 1
        exact = {} if whole else {"exact": str(self.value)}
        value = int(self.value) if whole else float(self.value)
        return {"name": self.name, "formula": self.formula, "numbers": self.numbers, "bytes": value, **exact}


@dataclass(frozen=True, slots=True)
class Section:
    """Terms under a title, with notes that name their source."""

    key: str
    title: str
    terms: tuple[Term, ...]
    notes: tuple[str, ...]
    agrees: bool | None = None
    """Whether the total is what the paper prints; None where it prints nothing."""


def gigabytes(value: Fraction) -> str:
    """Three figures, such as '16.6 GB'."""
    return format_bytes(round(value))
