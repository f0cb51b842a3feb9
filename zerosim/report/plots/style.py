"""How the pictures look: two themes, and one paint for every kind, operation and stage, in all pictures.

Owns colours and hatches, nothing that draws. Blue, orange and green for parameters, gradients and
optimizer states are those of the ZeRO paper's Figure 1. Tones were chosen so that each has a contrast of
3:1 with the background (WCAG 2.1, 1.4.11) and any two stay apart for colour-blind eyes; a test simulates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class Paint:
    """A colour for each theme, and a hatch, so that colour is not all that tells two areas apart."""

    light: str
    dark: str
    hatch: str = ""


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

# In the order in which they are stacked: what stays on a rank first, what comes and goes after it.
KIND_PAINTS: Mapping[str, Paint] = {
    "param": Paint("#0053ba", "#2f67cf"),
    "grad": Paint("#a74006", "#ed833c", "//"),
    "optim": Paint("#00a962", "#22ba8c", ".."),
    "unsharded_param": Paint("#4786e5", "#95d6fd", "\\\\"),
    "unsharded_grad": Paint("#b48400", "#f8ca49", "xx"),
    "activation": Paint("#9e519a", "#dd8fc3"),
    "activation_grad": Paint("#582b81", "#ab8ee6", "--"),
    "kept": Paint("#72583f", "#a4c278", "||"),
    "temp": Paint("#7a848a", "#717f88", "oo"),
    "comm": Paint("#333a42", "#e3dae2", "++"),
}

OP_PAINTS: Mapping[str, Paint] = {
    "reduce_scatter": Paint("#77251c", "#dfa056", "//"),
    "all_gather": Paint("#22647e", "#5ebece"),
    "all_reduce": Paint("#683fad", "#a483ec", ".."),
    "broadcast": Paint("#309654", "#93e58d", "\\\\"),
    "reduce": Paint("#bf4331", "#e26ca1", "xx"),
    "all_to_all": Paint("#606e6b", "#9db68e", "--"),
    "send": Paint("#333a42", "#d9e3e2", "++"),
}
OTHER_PAINT = Paint("#7a838d", "#7d8792", "**")

# One per line of a picture, in order; lines differ in marker and dashes too.
LINE_PAINTS = (
    Paint("#333a42", "#d9e3e2"),
    Paint("#8a3a10", "#dfa056"),
    Paint("#9e519a", "#dd8fc3"),
    Paint("#0053ba", "#6fb1f5"),
    Paint("#582b81", "#ab8ee6"),
    Paint("#1f7a44", "#93e58d"),
)
MARKERS = ("s", "o", "D", "^", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


def find_theme(name: str) -> Theme:
    """Raises: InputError for a name that is not 'light' or 'dark'."""
    if name not in THEMES:
        raise InputError(f"theme {name!r}: expected one of {', '.join(THEMES)}")
    return THEMES[name]


def in_order(names: Mapping[str, object], paints: Mapping[str, Paint]) -> list[str]:
    """The names in the order in which they are stacked; unknown ones come last."""
    order = list(paints)
    return sorted(names, key=lambda name: order.index(name) if name in paints else len(order))


def mixed(a: str, b: str) -> str:
    """The colour half way between two."""
    halves = ((int(a[at : at + 2], 16) + int(b[at : at + 2], 16)) // 2 for at in (1, 3, 5))
    return "#" + "".join(f"{half:02x}" for half in halves)


def contrast(a: str, b: str) -> float:
    """How far two '#rrggbb' colours are apart in luminance, 1 to 21 (WCAG 2.1, contrast ratio)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
