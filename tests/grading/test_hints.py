"""A hint is found by the words of an error: words that nothing says any more would lose it without a sign."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import zerosim
from zerosim.grading.blame import _HINTS

PYTHONS = (
    "'Work' object",
    "unexpected keyword",
    "object has no attribute",
    "NameError",
    "SystemExit",
    "RecursionError",
)
"""What Python's own errors say."""


def said() -> list[str]:
    """Return every text of zerosim's modules except `blame.py`, with a number or a dtype in the place of each value."""
    found = []
    for path in sorted(Path(zerosim.__file__).parent.rglob("*.py")):
        if path.name != "blame.py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    for value in ("4", "bf16"):
                        parts = (part.value if isinstance(part, ast.Constant) else value for part in node.values)
                        found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.slow
def test_every_hint_has_an_error_that_leads_to_it() -> None:
    texts = said()
    own = [pattern for pattern, _ in _HINTS if not pattern.startswith((*PYTHONS, "NoneType"))]
    assert len(own) > 10
    assert [pattern for pattern in own if not any(re.search(pattern, text) for text in texts)] == []
