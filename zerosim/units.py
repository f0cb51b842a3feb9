"""Bytes and numbers as people write them: parsed and printed. A list of names, shortened.

GB is 1e9 bytes, as in every table of the ZeRO papers; GiB is 2**30. Nothing here returns a float for bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from zerosim.errors import InputError

MOST_BYTES = 10**18
"""More than any device has: a larger limit is a typing error."""

LONGEST_NUMBER = 100
"""The most characters of a number that is read, even one that is out of bounds."""

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,3}))?\s*([A-Za-z]*)\s*")


def _parse(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or match.group(3).upper() not in units:
        raise InputError(f"{shown(text)} is not {what}: write it like {example}")
    value = Fraction(match.group(1)) * Fraction(10) ** int(match.group(2) or 0)
    value *= units[match.group(3).upper()]
    if value > 10**LONGEST_NUMBER:
        raise InputError(f"{text!r} is too large: write it like {example}")
    if value.denominator != 1:
        raise InputError(f"{text!r} is not a whole number: write it like {example}")
    return int(value)


def parse_bytes(text: str | int) -> int:
    """Parse bytes such as '32GB' (1e9), '1.5 GiB' (2**30), '4096'.

    Raises: InputError for anything else, fractions of a byte included.
    """
    return text if isinstance(text, int) else _parse(text, _BYTE_UNITS, "a size in bytes", "32GB or 512MiB")


def parse_count(text: str | int) -> int:
    """Parse a count such as '7.5B' (1e9), '1T', '350M', '1e12'.

    Raises: InputError for anything else, fractions of one included.
    """
    return text if isinstance(text, int) else _parse(text, _COUNT_UNITS, "a count", "7.5B or 350M")


def shown(text: str) -> str:
    """Return a word in quotes, as errors name it; of a long one its beginning."""
    return repr(text) if len(text) <= LONGEST_NUMBER else f"{text[:20]!r}... of {len(text):,} characters"


def _scaled(value: int, units: tuple[str, ...], space: str) -> str:
    scaled, unit = float(value), units[0]
    for larger in units[1:]:
        if abs(scaled) < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    # Three printed digits: 9.996 is 10.0, not 10.00.
    digits = 0 if unit == units[0] else 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{space}{unit}".rstrip()


def few(names: Sequence[str], most: int = 3) -> str:
    """Shorten a list of names: 'a, b, c and 4 more'."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_bytes(value: int) -> str:
    """Return '1.88 GB': three digits, decimal units."""
    return _scaled(value, ("B", "KB", "MB", "GB", "TB", "PB"), " ")


def format_count(value: int) -> str:
    """Return '7.50B': three digits."""
    return _scaled(value, ("", "K", "M", "B", "T"), "")


def counted(count: int, one: str, many: str = "") -> str:
    """Return '1 rank', '4 ranks'."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
