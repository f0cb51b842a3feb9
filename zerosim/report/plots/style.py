"""The look of the pictures: two themes, and one paint for every kind, operation and stage, in all pictures.

Tones were chosen so that each has a contrast of 3:1 with the background (WCAG 2.1, 1.4.11) and any two stay apart for
colour-blind eyes too (CIEDE2000, at least 12); a test simulates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.report.names import KINDS


@dataclass(frozen=True, slots=True)
class Paint:
    """A colour for each theme, and a hatch, so that areas differ in more than colour. `edge` names a theme's colour."""

    light: str
    dark: str
    hatch: str = ""
    edge: str = ""

    def faded(self, part: float) -> Paint:
        """Return this paint without a hatch, so far on its way to the paper: 0 to 1."""
        light, dark = THEMES["light"].background, THEMES["dark"].background
        return Paint(mixed(self.light, light, part), mixed(self.dark, dark, part))


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of everything that is not data."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    band: str

    def color(self, paint: Paint) -> str:
        return paint.dark if self.name == "dark" else paint.light


THEMES = {
    "light": Theme("light", "#ffffff", "#1b1f24", "#57606a", "#dfe3e8", "#eef1f4"),
    "dark": Theme("dark", "#10151b", "#e6edf3", "#a3adb8", "#2c343d", "#1d242c"),
}


def sheet_paint(name: str, hatch: str = "", edge: str = "") -> Paint:
    """Return a paint of one of the themes' own colours."""
    return Paint(getattr(THEMES["light"], name), getattr(THEMES["dark"], name), hatch, edge)


KIND_PAINTS: Mapping[str, Paint] = {name: Paint(kind.light, kind.dark, kind.hatch) for name, kind in KINDS.items()}

OP_PAINTS: Mapping[str, Paint] = {
    "reduce_scatter": Paint("#722119", "#e0a055", "//"),
    "all_gather": Paint("#13586c", "#5ebecf"),
    "all_reduce": Paint("#6c42b2", "#a383ec", ".."),
    "broadcast": Paint("#34a36c", "#9df4a1", "\\\\"),
    "reduce": Paint("#c84935", "#e46ca1", "xx"),
    "all_to_all": Paint("#747f7e", "#7a9168", "--"),
    "send": Paint("#313138", "#dae4e2", "++"),
}
OTHER_PAINT = Paint("#7a838d", "#7d8792", "**")

# One per line of a picture, in order; lines differ in marker and dashes too.
LINE_PAINTS = (
    Paint("#373a42", "#d6e4e5"),
    Paint("#8a3a10", "#e1a057"),
    Paint("#9d5098", "#c48ab4"),
    Paint("#4f6de2", "#76baff"),
    Paint("#511370", "#7f76d1"),
    Paint("#247f4c", "#eee989"),
    Paint("#4f0510", "#d55558"),
    Paint("#727376", "#519e83"),
)
MARKERS = ("s", "o", "D", "^", "v", "P", "X", "h")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 3)))


def in_order(names: Mapping[str, object], paints: Mapping[str, Paint]) -> list[str]:
    """Return the names in stacking order; unknown ones come last."""
    order = list(paints)
    return sorted(names, key=lambda name: order.index(name) if name in paints else len(order))


def mixed(a: str, b: str, part: float = 0.5) -> str:
    """Return the colour that lies between two: half way, or that part of the way."""
    between = (int(int(a[at : at + 2], 16) * (1 - part) + int(b[at : at + 2], 16) * part) for at in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in between)


def ink_on(fill: str) -> str:
    """Return black or white, whichever is more readable on a fill."""
    return max(("#ffffff", "#10151b"), key=lambda ink: contrast(ink, fill))


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two '#rrggbb' colours, 1 to 21 (WCAG 2.1)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
