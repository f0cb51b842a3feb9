"""The keys of [expect]: which there are, and which go together.

A key is refused here for its name, its type or what it stands beside; what the values mean is in `reading.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.analysis.expect.figures import ROUNDINGS
from zerosim.analysis.expect.quantities import SHAPES, TRAINING, Quantity
from zerosim.analysis.formulas import calculators
from zerosim.errors import InputError
from zerosim.ledger.memory import MARKS

TEXTS = ("source", "title", "unit", "note", "why")
TABLES = ("with", "sweep", "bold")
KEYS = (
    *TEXTS, *TABLES, "quantity", "formula", "beside", "printed", "rounding", "instead",
    "counted_on", "at", "memory", "calculator",
)  # fmt: skip


def check_keys(table: Mapping[str, Any]) -> None:
    """Raises: InputError for an unknown key, a missing one, a bad type, and one without its companion."""
    for key in table:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}{nearest_of(key, KEYS)}")
    needed = {
        "source": "name the paper and the section or table that prints it",
        "printed": "the figures as they are printed, as strings",
        "rounding": f"one of {', '.join(ROUNDINGS)}",
    }
    for key, what in needed.items():
        if key not in table:
            raise InputError(f"{key} is missing: {what}")
    for key in TEXTS:
        if key in table and not (isinstance(table[key], str) and table[key].strip()):
            raise InputError(f"{key} {table[key]!r}: expected text")
    for key in TABLES:
        if key in table and not isinstance(table[key], dict):
            raise InputError(f"{key} {table[key]!r}: expected a table")
    _one_of(table, "rounding", ROUNDINGS)
    if "instead" in table and "note" not in table:
        raise InputError("note is missing: say why the source's figures are not what its rule gives, or drop instead")
    if ("beside" in table) != ("why" in table):
        raise InputError("beside and why go together: a count that is not judged, and why it differs")


def check_options(table: Mapping[str, Any], quantities: Sequence[Quantity]) -> None:
    """The keys that only some quantities take. Raises: InputError for one that is missing, bad, or read by nothing."""
    for key in ("at", "memory", "calculator"):
        needed = any(key in quantity.needs for quantity in quantities)
        if needed and key not in table:
            raise InputError(f"{key} is missing: {table.get('quantity') or table.get('formula')} needs it")
        if key in table and not needed and not any(key in quantity.takes for quantity in quantities):
            raise InputError(f"{key} {table[key]!r}: nothing here takes it; leave it out")
    _one_of(table, "at", MARKS)
    _one_of(table, "counted_on", (SHAPES, TRAINING))
    _one_of(table, "calculator", [calculator.name for calculator in calculators()])
    if table.get("counted_on") == TRAINING and not ("quantity" in table or "beside" in table):
        raise InputError(f'counted_on "{TRAINING}": nothing here is counted; leave it out')
    if table.get("counted_on") == TRAINING and table.get("quantity") in ("largest_model", "parameters"):
        raise InputError(f'counted_on "{TRAINING}": {table["quantity"]} is not read off training; leave it out')


def find_known(table: Mapping[str, Any], key: str, names: Mapping[str, Quantity]) -> Quantity | None:
    """The quantity that a key names, None where the key is not there. Raises: InputError for an unknown one."""
    if key not in table:
        return None
    _one_of(table, key, names)
    return names[table[key]]


def _one_of(table: Mapping[str, Any], key: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if key in table and not (isinstance(table[key], str) and table[key] in known):
        raise InputError(f"{key} {table[key]!r} is not known{nearest_of(table[key], known)}")


def nearest_of(word: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    """'; did you mean ...?', or all that are known."""
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"
