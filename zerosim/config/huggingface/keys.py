"""The keys of one config.json: their values checked, the class's defaults where a key is missing, and which were read.

Every value is read here, so `unread` names the keys that nobody asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.errors import InputError


class Keys:
    """The keys of one object of a file. `name` says in errors which; `defaults` are those of the family's class."""

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.name, self.values, self.defaults = name, values, defaults
        self.asked: set[str] = set()

    def fail(self, text: str) -> InputError:
        return InputError(f"{self.name}: {text}")

    def knows(self, key: str) -> bool:
        """Return whether the family has the key."""
        return key in self.defaults

    def value(self, key: str) -> Any:
        """Return the file's value, the class's if the file has none. A null is a value."""
        self.asked.add(key)
        return self.values.get(key, self.defaults.get(key))

    def given(self, keys: Sequence[str]) -> tuple[str, Any]:
        """Return the first of a size's names, and its value; None if the file has none of them, or null.

        Raises: InputError if two names have different values.
        """
        self.asked.update(keys)
        there = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        for key, value in there[1:]:
            if value != there[0][1]:
                raise self.fail(f"{there[0][0]} {there[0][1]!r} and {key} {value!r} name the same size: keep one")
        return there[0] if there else (keys[0], None)

    def whole(self, *keys: str, otherwise: int | None = None) -> int:
        """Return a size of at least 1: the file's, the class's default, or `otherwise`."""
        key, value = self.given(keys)
        value = self.defaults.get(keys[0]) if value is None else value
        value = otherwise if value is None else value
        if value is None:
            others = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise self.fail(f"{keys[0]}{others} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} {show(value)}: expected a whole number of at least 1")
        return value

    def number(self, key: str, *, low: float = 0.0) -> float:
        """Return a number of more than 0, and at least `low`."""
        value = self.value(key)
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf or value < low:
            wanted = f"of at least {low:g}" if low else "more than 0"
            raise self.fail(f"{key} {show(value)}: expected a number {wanted}")
        return float(value)

    def chance(self, key: str) -> float:
        value = self.value(key)
        value = 0.0 if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.fail(f"{key} {show(value)}: expected a chance in [0, 1)")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.value(key)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{key} {show(value)}: expected true or false")
        return value

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.fail(f"{key} {show(value)}: expected text")
        return value

    def each(self, key: str, kind: type, length: int, *, at_least: bool = False) -> list[Any]:
        """Return a list of `length` values of one type; `at_least`: or of more, of which the first ones count."""
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            word = "text" if kind is str else "numbers"
            raise self.fail(f"{key} {show(value)}: expected a list of {word}")
        if len(value) < length or (len(value) > length and not at_least):
            raise self.fail(f"{key} has {len(value)} values: expected {length}, one for each block")
        return value[:length]

    def inner(self, key: str, defaults: Mapping[str, Any]) -> Keys | None:
        """Return the keys of an object inside; None if it is missing or null."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(f"{key} {show(value)}: expected an object")
        return Keys(f"{self.name}: {key}", value, defaults)

    def unread(self) -> dict[str, Any]:
        """Return the keys with a value that nobody read."""
        return {key: value for key, value in self.values.items() if key not in self.asked and value is not None}


def show(value: object) -> str:
    """Return a value as the file has it, in a few letters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."
