"""The tables of facts (`keys.toml`): which keys a row names, and how a reader's table differs from it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zerosim.dialects.rows import Row, by_key

TOML = Path(__file__).parent / "keys.toml"


def rows_of(dialect: str) -> list[dict[str, Any]]:
    """Return the rows of a dialect that name keys of a file."""
    rows = tomllib.loads(TOML.read_text("utf-8"))["key"]
    return [row for row in rows if row["dialect"] == dialect and _names(row["key"])]


def _names(text: str) -> list[str]:
    """Return the keys that a row's text names; a later one may lack its section and its prefix."""
    plain = re.sub(r"\([^)]*\)|\.\.\.", "", text)
    names = [one.strip().partition(":")[0] for one in re.split(r"[,;]", plain)]
    return [one for one in names if re.fullmatch(r"[a-z_][\w.*]*", one) and not one.endswith(".")]


def named(row: dict[str, Any], table: Iterable[Row]) -> dict[str, Row | None]:
    """Return the table's row of each key that a row names; None where it has none."""
    names, rows = _names(row["key"]), by_key(table)
    section = names[0].rpartition(".")[0]
    found: dict[str, Row | None] = {}
    for name in names:
        wanted = name if "." in name or not section else f"{section}.{name}"
        tail = wanted.rpartition(".")[2].lstrip("_")
        found[name] = next(
            (one for key, one in rows.items() if fnmatchcase(key, wanted)
             or (key.rpartition(".")[0] == section and fnmatchcase(key.rpartition(".")[2], f"*_{tail}"))), None,
        )  # fmt: skip
    return found


def unlike_rows(dialect: str, table: Iterable[Row]) -> dict[str, tuple[str, str] | None]:
    """Return the keys whose row says or changes something else than the facts: what the table has, None for none.

    Of several keys in one row each may change less.
    """
    table = tuple(table)
    different: dict[str, tuple[str, str] | None] = {}
    for row in rows_of(dialect):
        for name, one in named(row, table).items():
            if one is None:
                different[name] = None
            elif one.says != row["says"] or not _fits(one, row):
                different[name] = (one.says, one.changes)
    return different


def _fits(one: Row, row: dict[str, Any]) -> bool:
    ours, theirs = _set(one.changes), _set(row["changes"])
    return ours == theirs or row["changes"] == "-" or (len(_names(row["key"])) > 1 and ours <= theirs)


def _set(changes: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w-]+", changes)) - {"peak", "none", "-"}
