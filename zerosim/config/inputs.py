"""Files from outside: which are opened, how much of them is read, and which TOML and JSON are accepted.

Every file that a user names is read here. It must be a regular file (reading a pipe waits for its writer, a device has
no end) and no larger than such files are; otherwise nothing is read.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from typing import Any

from zerosim.errors import InputError
from zerosim.units import LONGEST_NUMBER, format_bytes

LARGEST_TEXT = 10**6
"""Bytes of a scenario, a device or a config.json: a hundred times their usual size."""

_MOST_NESTED = 32
_MOST_DOTS = 10**7  # of a file's lines, all of them times the most in one
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: str | os.PathLike[str], what: str = "", largest: int | None = None) -> BufferedReader:
    """Open a file for reading. `what` says in errors which kind of file it should be.

    Raises: InputError for a file that does not exist, cannot be read, is not regular, is empty, or has more than
    `largest` bytes.
    """
    name = _name(path, what)
    try:
        there = os.stat(path)  # before opening: opening a pipe waits for its writer
        kind = next((words for is_one, words in _KINDS if is_one(there.st_mode)), None)
        if kind is not None:
            raise InputError(f"cannot read {name}: it is {kind}, expected a file")
        if largest is not None and there.st_size > largest:
            raise InputError(
                f"cannot read {name}: it has {format_bytes(there.st_size)}, expected at most "
                f"{format_bytes(largest)}; is this the right file?"
            )
        if there.st_size == 0:  # so are the kernel's files, and reading some of them never ends
            raise InputError(f"cannot read {name}: it is empty (0 bytes); is this the right file?")
        return open(path, "rb")
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError:  # a NUL, or a character that no encoding has
        raise InputError(f"cannot read {name}: this cannot be a file name") from None


def read_file(path: str | os.PathLike[str], what: str, largest: int) -> bytes:
    """Return all bytes of a file. Raises: InputError as `open_file`, and if they do not fit in memory."""
    with open_file(path, what, largest) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return file.read(min(size, largest))
        except OSError as error:
            raise InputError(f"cannot read {_name(path, what)}: {error.strerror or error}") from None
        except MemoryError:
            why = f"its {format_bytes(size)} do not fit into memory"
            raise InputError(f"cannot read {_name(path, what)}: {why}") from None


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the values of a TOML file. Raises: InputError, in one line, for invalid TOML, or endless nesting."""
    name, text = _name(path, what), _read_text(path, what)
    dots = [line.count(".") for line in text.split("\n")]
    if sum(dots) * max(dots) > _MOST_DOTS:  # for a.b.c tomllib keeps a, a.b and a.b.c: memory grows with the square
        raise InputError(f"{name}: a line of it has {max(dots):,} dots, more than any key or number has")
    try:
        values = tomllib.loads(text)
        check_values(values, name)
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name} is not valid TOML: {error}") from None
    except ValueError:  # int() refuses thousands of digits
        raise _too_large(name, "a number") from None
    return values


def read_json(path: str | os.PathLike[str], what: str = "", largest: int = LARGEST_TEXT) -> Any:
    """Return the value of a JSON file; absurdly long whole numbers become floats.

    Raises: InputError, in one line, for invalid JSON, a repeated key, or endless nesting.
    """
    return parse_json(_read_text(path, what, largest), _name(path, what))


def once(name: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a parser's hook that makes a mapping of pairs. It raises InputError for a repeated key of the file
    `name`."""

    def collected(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InputError(f"{name}: {key!r} appears twice; keep one")
            values[key] = value
        return values

    return collected


def parse_json(text: str, name: str) -> Any:
    """Return the value of JSON text, which errors call `name`. Raises: InputError as `read_json`."""

    def whole(digits: str) -> int | float:
        return int(digits) if len(digits) < LONGEST_NUMBER else float(digits)

    try:
        value = json.loads(text, object_pairs_hook=once(name), parse_int=whole)
        check_values(value, name)
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise InputError(f"{name} is not JSON: {error}") from None
    return value


def _read_text(path: str | os.PathLike[str], what: str, largest: int = LARGEST_TEXT) -> str:
    raw, name = read_file(path, what, largest), _name(path, what)
    if raw.startswith(codecs.BOM_UTF8):
        raise InputError(f"{name} begins with a byte order mark: save it as UTF-8 without one")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8, byte {error.start} is {raw[error.start]:#04x}: save it as UTF-8"
        ) from None


def check_values(value: object, name: str, key: str = "", depth: int = 0) -> None:
    """Check values. Raises: InputError for whole numbers too long to print, and for endless nesting."""
    if depth > _MOST_NESTED:
        raise _too_deep(name)
    if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER:
        raise _too_large(name, key)
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            check_values(inner, name, inner_key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            check_values(inner, name, key, depth + 1)


def _name(path: str | os.PathLike[str], what: str) -> str:
    return f"{what} {path}".strip()


def _too_large(name: str, key: str) -> InputError:
    return InputError(f"{name}: {key} is a whole number of more than {LONGEST_NUMBER} digits")


def _too_deep(name: str) -> InputError:
    return InputError(f"{name}: values are nested more than {_MOST_NESTED} deep; no key needs that")
