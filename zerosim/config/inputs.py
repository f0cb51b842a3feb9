"""Files from outside: which are opened, how much of them is read, and what TOML and JSON may hold.

Whatever a user names is read through here. It must be a regular file (reading a pipe waits for its writer, a device has
no end) and no larger than such files are; of anything else nothing is read.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import tomllib
from io import BufferedReader
from typing import Any

from zerosim.errors import InputError
from zerosim.units import LONGEST_NUMBER, format_bytes

LARGEST_TEXT = 10**6
"""Bytes of a scenario, a device or a config.json: a hundred times what they have."""

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
    """A file, open for reading. `what` it is meant to be stands before its name in errors.

    Raises: InputError where it is not there, cannot be read, is no regular file, is empty, or has more than `largest`
    bytes.
    """
    name = _name(path, what)
    try:
        there = os.stat(path)  # before it is opened: to open a pipe is to wait for who writes
        kind = next((words for is_one, words in _KINDS if is_one(there.st_mode)), None)
        if kind is not None:
            raise InputError(f"cannot read {name}: it is {kind}, expected a file")
        if largest is not None and there.st_size > largest:
            raise InputError(
                f"cannot read {name}: it has {format_bytes(there.st_size)}, expected at most "
                f"{format_bytes(largest)}; is this the right file?"
            )
        if there.st_size == 0:  # so do the kernel's files, and to read some of them is to wait without end
            raise InputError(f"cannot read {name}: it is empty (0 bytes); is this the right file?")
        return open(path, "rb")
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError:  # a NUL, or what no encoding has
        raise InputError(f"cannot read {name}: this cannot be a file name") from None


def read_file(path: str | os.PathLike[str], what: str, largest: int) -> bytes:
    """All bytes of a file. Raises: InputError as `open_file`, and where memory does not hold them."""
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
    """The values of a TOML file. Raises: InputError, in one line, for what is no TOML, or nested without end."""
    name, text = _name(path, what), _read_text(path, what)
    dots = [line.count(".") for line in text.split("\n")]
    if sum(dots) * max(dots) > _MOST_DOTS:  # of a.b.c tomllib keeps a, a.b and a.b.c: memory goes with the square
        raise InputError(f"{name}: a line of it has {max(dots):,} dots, more than any key or number has")
    try:
        values = tomllib.loads(text)
        _check_values(values, name)
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name} is not valid TOML: {error}") from None
    except ValueError:  # int() refuses thousands of digits
        raise _too_large(name, "a number") from None
    return values


def read_json(path: str | os.PathLike[str], what: str = "") -> Any:
    """The value of a JSON file; in it, whole numbers of more digits than anything has are floats.

    Raises: InputError, in one line, for what is no JSON, has a key twice, or is nested without end.
    """
    name, text = _name(path, what), _read_text(path, what)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InputError(f"{name}: {key!r} appears twice; keep one")
            values[key] = value
        return values

    def whole(digits: str) -> int | float:
        return int(digits) if len(digits) < LONGEST_NUMBER else float(digits)

    try:
        value = json.loads(text, object_pairs_hook=once, parse_int=whole)
        _check_values(value, name)
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise InputError(f"{name} is not JSON: {error}") from None
    return value


def _read_text(path: str | os.PathLike[str], what: str) -> str:
    raw, name = read_file(path, what, LARGEST_TEXT), _name(path, what)
    if raw.startswith(codecs.BOM_UTF8):
        raise InputError(f"{name} begins with a byte order mark: save it as UTF-8 without one")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8, byte {error.start} is {raw[error.start]:#04x}: save it as UTF-8"
        ) from None


def _check_values(value: object, name: str, key: str = "", depth: int = 0) -> None:
    """Raises: InputError for whole numbers that cannot even be printed, and where values hold values without end."""
    if depth > _MOST_NESTED:
        raise _too_deep(name)
    if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER:
        raise _too_large(name, key)
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            _check_values(inner, name, inner_key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, name, key, depth + 1)


def _name(path: str | os.PathLike[str], what: str) -> str:
    return f"{what} {path}".strip()


def _too_large(name: str, key: str) -> InputError:
    return InputError(f"{name}: {key} is a whole number of more than {LONGEST_NUMBER} digits")


def _too_deep(name: str) -> InputError:
    return InputError(f"{name}: values are nested more than {_MOST_NESTED} deep; no key needs that")
