"""Runs without a grid, a line each: `columns` and `rows` of a table [expect].

A column is a field, an axis that is no field (`sweeps.py`), or a word. `[expect.cases.COLUMN]` says which
fields each value of a word sets. A field's column may have cases too, for values that set further fields.
The last column is the source's printed figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.analysis.expect.sweeps import MOST_PLACES, NO_FIELDS, Axis, Point
from zerosim.config import OPTIONS
from zerosim.errors import InputError, did_you_mean

PRINTED = "printed"


def read_rows(table: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[tuple[Axis, ...], list[Point], list[Any]]:
    """Return a table's columns as axes, a point for each row, and the printed figures. `beside`: values of all rows.

    Raises: InputError for a column without meaning, a row of another length, a case that no row has.
    """
    columns, rows, cases = table["columns"], table["rows"], table.get("cases", {})
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns) or columns[-1:] != [PRINTED]:
        raise InputError(f'columns {columns!r}: expected names, "{PRINTED}" last')
    names = columns[:-1]
    for name in names:
        _check_column(name, names, cases, beside)
    for name in cases:
        if name not in names:
            hint = did_you_mean(name, names, f"expected one of {', '.join(names)}")
            raise InputError(f"cases.{name}: unknown column; {hint}")
    if not isinstance(rows, list) or not rows or len(rows) > MOST_PLACES:
        raise InputError(f"rows: expected a list of 1 to {MOST_PLACES:,} rows, each a list of {len(columns)} values")
    points = [_point(number, row, names, cases) for number, row in enumerate(rows, 1)]
    for name, known in cases.items():
        labels = {point.labels[names.index(name)] for point in points}
        if unused := next((label for label in known if label not in labels), None):
            raise InputError(f"cases.{name}: no row has {unused!r}: leave it out")
    axes = (Axis(name, tuple(dict.fromkeys(labels)), ()) for name, labels in zip(names, _turned(points), strict=True))
    return tuple(axes), points, [row[-1] for row in rows]


def _check_column(name: str, names: Sequence[str], cases: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    fields = (*OPTIONS, *NO_FIELDS)
    if names.count(name) > 1:
        raise InputError(f"columns: {name} appears twice")
    if name in beside:
        raise InputError(f"columns: {name} is also set outside the rows; leave one of them out")
    if name not in fields and name not in cases:
        hint = did_you_mean(name, fields, "see zerosim run")
        raise InputError(
            f"columns: {name!r} is not a field; {hint}; or list in [expect.cases.{name}] the fields that its values set"
        )
    known = cases.get(name, {})
    if not isinstance(known, dict) or not all(isinstance(case, dict) for case in known.values()):
        raise InputError(f'cases.{name}: expected the fields that each value sets, "a" = {{ stage = 1 }}')


def _point(number: int, row: object, names: Sequence[str], cases: Mapping[str, Any]) -> Point:
    if not isinstance(row, list) or len(row) != len(names) + 1:
        got = f"{len(row)} values" if isinstance(row, list) else repr(row)
        raise InputError(f"row {number} has {got}, expected {len(names) + 1}: {', '.join((*names, PRINTED))}")
    changes: dict[str, Any] = {}
    labels = tuple(value if isinstance(value, str) else str(value).lower() for value in row[:-1])
    for name, label, value in zip(names, labels, row, strict=False):
        known = cases.get(name, {})
        if label not in known and name not in (*OPTIONS, *NO_FIELDS):
            hint = did_you_mean(label, known, f"expected one of {', '.join(known)}")
            raise InputError(f"row {number}: {name} {label!r} is not in [expect.cases.{name}]; {hint}")
        changes |= known.get(label, {name: value})
    return Point(labels, changes)


def _turned(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Transpose the rows into columns."""
    return list(zip(*(point.labels for point in points), strict=True))
