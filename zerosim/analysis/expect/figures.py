"""Figures as a source prints them: digits, unit, bold type, and rounding.

This module parses the text of a cell, and prints an exact number in the same way. GB is 1e9 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis import formulas
from zerosim.errors import InputError
from zerosim.units import LONGEST_NUMBER, shown

UNITS: Mapping[str, Mapping[str, int | Fraction]] = MappingProxyType(
    {
        "bytes": {
            "B": 1,
            "KB": 10**3,
            "MB": 10**6,
            "GB": 10**9,
            "TB": 10**12,
            "MiB": 2**20,
            "GiB": 2**30,
            "TiB": 2**40,
        },
        "count": {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12},
        "volume": {"Ψ": 1},
        "share": {"": 1, "%": Fraction(1, 100)},
        "verdict": {"": 1},
        "seconds": {"s": 1, "ms": Fraction(1, 1000)},
        "flops per second": {"TFLOP/s": 10**12, "PFLOP/s": 10**15},
        "tokens per second": {"tokens/s": 1},
    }
)
"""The units of each dimension and their sizes. A count or a share may have no unit."""

ROUNDINGS: Mapping[str, str] = MappingProxyType(
    {
        "half-up": "half up at the last printed digit",
        "tens": "half up to tens",
        "truncate": "cut off after the last printed digit",
        "truncate-from-100": "half up below 100, cut off from 100 on (ZeRO paper, Table 1)",
        "multiples-of-first-row": "mp times the first row as printed, half up (ZeRO paper, Table 2)",
        "exact": "none, the numbers are equal",
    }
)

VERDICTS = ("OOM", "fits")
"""Figures of the dimension "verdict": 0 and 1."""

NOT_PRINTED = "-"
_CELL = re.compile(r"(\*\*)?([0-9][0-9,]*(?:\.[0-9]+)?) ?([A-Za-zΨ]*)(\*\*)?")


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed number: `text` as in the source, `digits` without commas, in a unit of `scale`."""

    text: str
    digits: str
    unit: str
    scale: int | Fraction
    is_bold: bool

    @property
    def is_verdict(self) -> bool:
        return self.text in VERDICTS

    @property
    def value(self) -> Fraction:
        """The value in its unit."""
        return Fraction(self.digits)

    def measured(self, exact: Fraction) -> Fraction:
        """Convert bytes or a count to this figure's unit."""
        return exact / self.scale

    @property
    def with_unit(self) -> str:
        return f"{self.digits} {self.unit}".rstrip()

    def shown(self, exact: Fraction) -> str:
        """Format bytes or a count like this figure, in its unit."""
        return VERDICTS[int(exact)] if self.is_verdict else show(self.measured(exact))

    def in_unit(self, exact: Fraction) -> str:
        return f"{self.shown(exact)} {self.unit}".rstrip()


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Make InputErrors in the block begin with their place."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def parse_figure(text: object, dimension: str, unit: str) -> Figure | None:
    """Parse '31.4', '**31.4**' in bold, '0.5T' with its own unit, '1,557,611,200'; return None for '-', not printed.

    Raises: InputError for a number instead of a string (its digits would be lost), and anything else.
    """
    if not isinstance(text, str):
        raise InputError(f'{text!r}: expected a string, with the digits that are printed, like "31.4"')
    if text == NOT_PRINTED:
        return None
    if dimension == "verdict":
        if text not in VERDICTS:
            raise InputError(f"{text!r}: expected {' or '.join(VERDICTS)}, or - for none")
        return Figure(text, str(VERDICTS.index(text)), "", 1, False)
    match = _CELL.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or bool(match[1]) != bool(match[4]):
        raise InputError(
            f'{shown(text)} is not a printed figure: write "31.4", "**31.4**" for bold, "0.5T", or "-" for none'
        )
    scales = UNITS[dimension]
    used = match[3] or unit
    if used not in scales:
        known = ", ".join(name for name in scales if name)
        raise InputError(f"{text!r}: its unit is {used or 'missing'}; expected one of {known}")
    return Figure(text.strip("*"), match[2].replace(",", ""), used, scales[used], bool(match[1]))


def printed_like(value: Fraction, digits: str, rounding: str) -> str:
    """Round an exact number to the decimals of `digits`, by a rule of `ROUNDINGS` ('exact' rounds nothing)."""
    if rounding == "exact":
        return digits if value == Fraction(digits) else show(value)
    if rounding == "tens":
        return str(10 * math.floor(value / 10 + Fraction(1, 2)))
    return formulas.printed(value, digits, cut_from={"truncate": 0, "truncate-from-100": 100}.get(rounding))


def show(value: Fraction) -> str:
    """Format a number in its unit: whole numbers in full, others with six decimals, or four digits below 1."""
    if value.denominator == 1:
        return f"{int(value):,}"
    if abs(value) < 1:
        return f"{float(value):.4g}"
    return f"{float(value):,.6f}".rstrip("0").rstrip(".")


def percent(share: Fraction) -> str:
    """Return '5 %'."""
    return f"{float(100 * share):g} %"


def within_text(within: Fraction | int) -> str:
    """Return the tolerance of a measured figure: '5 %', or '65,536 B'."""
    return f"{within:,} B" if isinstance(within, int) else percent(within)


def show_difference(value: Fraction) -> str:
    """Format a signed difference with four digits; a whole number in full, and 0 for no difference."""
    if not value:
        return "0"
    return f"{int(value):+,}" if value.denominator == 1 else f"{float(value):+.4g}"
