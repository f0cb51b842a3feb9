"""The page's appearance as data: the names, letters, colours and hatches that all reports share."""

from __future__ import annotations

from typing import Any

from zerosim.report.names import KIND_WORDS, KINDS
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT, THEMES, Paint


def looks() -> dict[str, Any]:
    """Return the kinds of memory, verbs ('' for any other), and the two themes."""
    kinds = {
        name: {"word": KIND_WORDS[name], "meaning": kind.meaning, "letter": kind.letter}
        | _paint(Paint(kind.light, kind.dark, kind.hatch))
        for name, kind in KINDS.items()
    }
    parts = ("background", "text", "muted", "grid", "band")
    return {
        "kinds": kinds,
        "verbs": {name: _paint(paint) for name, paint in {**OP_PAINTS, "": OTHER_PAINT}.items()},
        "themes": {name: {part: getattr(theme, part) for part in parts} for name, theme in THEMES.items()},
    }


def _paint(paint: Paint) -> dict[str, str]:
    return {"light": paint.light, "dark": paint.dark, "hatch": paint.hatch}
