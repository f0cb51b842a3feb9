"""A student's objects in words: an exception's text, a value's repr. Nothing that they do to it gets out.

Owns one thing: `str()` and `repr()` of what is not ours may raise, return no plain string, or megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MOST = 500
"""Characters of a text that are shown."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # says nothing, and differs from run to run


def error_words(error: BaseException) -> str:
    """'KeyError: its text', or the type alone where there is no text; one line."""
    name, text = text_of(type(error), lambda kind: kind.__name__), text_of(error)
    return f"{name}: {text}" if text else name


def text_of(value: Any, show: Callable[[Any], str] = str) -> str:
    """`show(value)` on one line, shortened; where that fails, words that say so."""
    try:
        whole = show(value)
        text = _ADDRESS.sub("", " ".join(whole[: 20 * MOST].split()))
        return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(whole):,} characters)"
    except BaseException as error:  # whatever it is: it comes from the object itself
        what = "__repr__" if show is repr else "__str__"
        return f"(no text: its {what} raises {type.__getattribute__(type(error), '__name__')})"
