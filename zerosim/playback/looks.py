"""The page's appearance as data: the names, letters, colours and hatches that all reports share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.report.names import KIND_WORDS, KINDS
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT, THEMES, Paint, ink_on

TILES: Mapping[str, str] = {
    "//": "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4", "\\\\": "M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4",
    "xx": "M0,8 l8,-8 M0,0 l8,8", "--": "M0,4 h8", "||": "M4,0 v8", "++": "M0,4 h8 M4,0 v8", "..": "M3,4 h2",
    "oo": "M2.5,4 a1.5,1.5 0 1 0 3,0 a1.5,1.5 0 1 0 -3,0", "**": "M1,4 h6 M4,1 v6",
}  # fmt: skip
"""The path of each hatch, in a tile of 8 by 8."""


def looks() -> dict[str, Any]:
    """Return the kinds of memory, verbs ('' for any other), the ink on each colour, hatches, and the two themes."""
    kinds = {
        name: {"word": KIND_WORDS[name], "meaning": kind.meaning, "letter": kind.letter}
        | _paint(Paint(kind.light, kind.dark, kind.hatch))
        for name, kind in KINDS.items()
    }
    verbs = {name: _paint(paint) for name, paint in {**OP_PAINTS, "": OTHER_PAINT}.items()}
    colours = {paint[theme] for paint in (*kinds.values(), *verbs.values()) for theme in THEMES}
    parts = ("background", "text", "muted", "grid", "band")
    return {
        "kinds": kinds,
        "verbs": verbs,
        "inks": {colour: ink_on(colour) for colour in sorted(colours)},
        "tiles": TILES,
        "themes": {name: {part: getattr(theme, part) for part in parts} for name, theme in THEMES.items()},
    }


def _paint(paint: Paint) -> dict[str, str]:
    return {"light": paint.light, "dark": paint.dark, "hatch": paint.hatch}
