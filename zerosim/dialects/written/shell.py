"""Words of a shell script: arguments with their values, on lines of an array."""

from __future__ import annotations

import shlex
from typing import Any

_WIDTH = 100


def wrapped(words: list[str]) -> list[str]:
    """Return words on lines, each of which begins with an argument."""
    lines = list[str]()
    for word in words:
        if lines and (not word.startswith("--") or len(lines[-1]) + len(word) < _WIDTH):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(f"    {shlex.quote(word)}")
    return lines


def arguments(*pairs: tuple[str, Any]) -> list[str]:
    """Return arguments with values; True is a switch, False, None and '' are left out."""
    found = list[str]()
    for name, value in pairs:
        if value is None or value is False or value == "" or value == []:
            continue
        more = [] if value is True else value if isinstance(value, list) else [value]
        found += [f"--{name}", *(_text(one) for one in more)]
    return found


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)
