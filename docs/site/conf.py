"""Sphinx's settings. `build.py` lays the pages out and calls Sphinx; nothing is fetched and no notebook is run."""

from __future__ import annotations

import re
from typing import Any

project = "zerosim"
author = "the zerosim authors"
project_copyright = "the zerosim authors"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "zerosim"
html_extra_path = ["extra"]  # the players' pages, as they are
exclude_patterns = ["extra"]
nb_execution_mode = "off"
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
suppress_warnings = [
    "myst.header",  # a heading two levels below the one before
    "ref.python",  # classes of one name in two rooms
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
highlight_language = "none"


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show a docstring as it is written: sentences as text, what is indented or aligned as it stands."""
    shown: list[str] = []
    for block in "\n".join(lines).strip().split("\n\n"):
        rows = block.split("\n")
        if any(row.startswith(" ") or re.search(r"\S {2,}\S", row) for row in rows):
            shown += ["::", "", *("    " + row for row in rows), ""]
        else:
            shown += [text(" ".join(rows)), ""]
    lines[:] = shown


def text(words: str) -> str:
    """Escape what reStructuredText would read; names in backticks become literals."""
    parts = re.split(r"`([^`]+)`", words)
    escaped = [re.sub(r"([\\*_|`])", r"\\\1", part) if at % 2 == 0 else f"``{part}``" for at, part in enumerate(parts)]
    return "\\ ".join(part for part in escaped if part).replace("\\  ", " ").replace(" \\ ``", " ``")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain)
