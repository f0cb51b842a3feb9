"""A row of a dialect's table: one key of a framework's file, and the kinds of values that the framework takes.

A kind is a function: it returns the value as the framework stores it, and raises ValueError with the expected values.
These are the lax kinds of pydantic 2, by which DeepSpeed reads its sections; other dialects use them too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Kind = Callable[[Any], Any]
_TRUE, _FALSE = ["1", "on", "t", "true", "y", "yes"], ["0", "off", "f", "false", "n", "no"]


class Row(NamedTuple):
    """One key, or several that are read alike, with blanks between.

    key      its name, with dots for sections
    kind     the values that the framework takes
    default  the framework's default, as a value; None if there is none, or in words
    does     in words, its effect there
    here     in words, what says it here: flags, or the nearest thing; '' if nothing does
    says     same | near | missing | ignored | refuse | warn
    changes  of bytes, traffic, seconds, batch, host, load, save and none, those that it changes there
    option   the option that takes the same value, if this is all that the key does
    myth     what people take it for
    """

    key: str
    kind: Kind
    default: Any
    does: str
    here: str = ""
    says: str = "same"
    changes: str = ""
    option: str = ""
    myth: str = ""

    @property
    def costs(self) -> bool:
        """Whether it changes bytes, traffic or seconds of a step."""
        return bool({"bytes", "traffic", "seconds", "all"} & set(self.changes.split()))

    def is_default(self, value: Any) -> bool:
        """Return whether this value of a file is the framework's own default."""
        return value is None or (
            (type(value) is type(self.default) or not isinstance(value, bool)) and (value == self.default)
        )


def by_key(rows: Iterable[Row]) -> Mapping[str, Row]:
    """Return the row of each key."""
    return {key: row for row in rows for key in row.key.split()}


def row_of(rows: Mapping[str, Row], key: str) -> Row | None:
    """Return a key's row, or that of the innermost section that has one."""
    while key and key not in rows:
        key = key.rpartition(".")[0]
    return rows.get(key)


def anything(value: Any) -> Any:
    return value


def boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    if isinstance(value, int | float) and value in (0, 1):
        return value == 1
    raise ValueError("expected true or false")


def integer(low: int | None = None) -> Kind:
    """Return the kind of whole numbers of at least `low`: 5e8, 500000000 and "500000000" are, true is 1, "5e8" is
    not."""

    def read(value: Any) -> int:
        expected = "expected a whole number" + ("" if low is None else f" of at least {low}")
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*", value):
            value = int(value.strip().replace("_", "").split(".")[0])
        if not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
            raise ValueError(expected)
        if low is not None and value < low:
            raise ValueError(expected)
        return int(value)

    return read


def not_boolean(kind: Kind) -> Kind:
    """Return the kind without true and false."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("expected a number, not true or false")
        return kind(value)

    return read


def real(low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, below: float = math.inf) -> Kind:
    """Return the kind of numbers in these bounds; text such as "1e-5" is one."""

    def read(value: Any) -> float:
        try:
            number = float(value) if isinstance(value, int | float | str) else math.nan
        except (ValueError, OverflowError):
            raise ValueError("expected a number") from None
        if math.isnan(number):
            raise ValueError("expected a number")
        if not (low <= number <= high and above < number < below):
            most = f" and at most {high}" if high < math.inf else f" and below {below}" if below < math.inf else ""
            least = f"above {above}" if above > -math.inf else f"of at least {low}"
            raise ValueError(f"expected a number {least}{most}")
        return number

    return read


def word(*known: str) -> Kind:
    """Return the kind of these words, as they are spelled."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return value

    return read


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def optional(kind: Kind) -> Kind:
    """Return the kind that takes null too."""
    return lambda value: None if value is None else kind(value)
