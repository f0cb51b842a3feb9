"""A picture as a value: its words, and panels of marks on axes. `draw.py` draws any of them; nothing here needs
matplotlib. `chart.py` adds its place in a notebook.

Places are in the units of a panel's axes. Words are plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from zerosim.report.plots.style import Paint

Place = tuple[float, float]
Of = TypeVar("Of")
DPI = 160  # texts are measured in the dots in which they are drawn
SLIDE, SLIDE_TYPE = (12.8, 7.2), 18.0
"""A slide's size in inches, and its type in points."""


class Box(NamedTuple):
    """A rectangle, with the first of its `words` that fits in it, and `after` beyond its right end."""

    name: str
    x: Place
    y: Place
    paint: Paint
    words: tuple[str, ...] = ()
    after: str = ""
    scale: float = 0.85


class Boxes(NamedTuple):
    """Rectangles of one paint: left, low, right, high. Those thinner than a line are left out."""

    name: str
    paint: Paint
    corners: Sequence[tuple[float, float, float, float]]


class Line(NamedTuple):
    """A line with the paint, dashes and marker of its `number`, and `words` beside its end.

    `filled` says of each point whether its marker is filled; with None one marker stands at the end. `band` is the
    range around it: x, low, high.
    """

    name: str
    points: Sequence[Place]
    number: int = 0
    words: str = ""
    filled: Sequence[bool] | None = None
    band: Sequence[tuple[float, float, float]] = ()
    style: str = ""


class Areas(NamedTuple):
    """Stacked areas: the rows of `values` from each place of `at` to the next."""

    names: Sequence[str]
    paints: Sequence[Paint]
    at: Any
    values: Any


class Rule(NamedTuple):
    """A dashed line across the panel, at an x or at a y, and its name."""

    words: str = ""
    x: float | None = None
    y: float | None = None


class Note(NamedTuple):
    """Words at a place, so many font sizes away from it, `align`ed as in 'left bottom'."""

    words: str
    where: Place
    align: str = "center center_baseline"
    away: Place = (0, 0)
    scale: float = 1.0
    bold: bool = False
    paint: Paint | None = None
    card: Paint | None = None


class Peak(NamedTuple):
    """A dot, and above it the longest of its `words` that fits in the panel."""

    where: Place
    words: tuple[str, ...]


class Strip(NamedTuple):
    """Names over stretches of the axis, above everything else: (name, short name, start, end)."""

    spans: Sequence[tuple[str, str, float, float]]
    banded: bool


class Arrow(NamedTuple):
    """An arrow between two cards, as thick as its weight (0 to 1). `bend` is its arc's height over its length."""

    start: Place
    end: Place
    paint: Paint
    weight: float = 1.0
    both: bool = False
    bend: float = 0.0


class Field(NamedTuple):
    """A value at each place of a grid: as shades of a paint, or as lines of equal value without one."""

    xs: Any
    ys: Any
    values: Any
    paint: Paint | None = None


Mark = Box | Boxes | Line | Areas | Rule | Note | Peak | Strip | Arrow | Field


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a panel. With `rows` names stand at 0, 1, ...; with `among` only these numbers do, where they fit;
    `words` writes a number."""

    label: str = ""
    ends: Place = (0, 1)
    words: Callable[[float], str] | None = None
    rows: tuple[str, ...] = ()
    among: tuple[float, ...] = ()
    log: bool = False
    whole: bool = False
    hidden: bool = False

    @classmethod
    def of_rows(cls, names: Sequence[str], *, hidden: bool = False) -> Axis:
        """Return an upright axis with the first name highest."""
        return cls(ends=(len(names) - 0.5, -0.5), rows=tuple(names), hidden=hidden)


@dataclass(frozen=True, slots=True)
class Panel:
    """Marks on one pair of axes. `grid` runs along 'x', 'y', 'both' or none (''); a `bare` panel has no axes.

    `key` stands below the panel. With `lists` the lines' words are a list right of it.
    """

    marks: tuple[Mark, ...]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""
    grid: str = "both"
    bare: bool = False
    key: tuple[tuple[str, Paint], ...] = ()
    lists: bool = False

    def of(self, kind: type[Of]) -> list[Of]:
        """Return the marks of one kind."""
        return [mark for mark in self.marks if isinstance(mark, kind)]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture. `said` is added to its alternative text; sizes are in inches and points."""

    title: str
    subtitle: str
    rows: tuple[tuple[Panel, ...], ...]
    key: tuple[tuple[str, Paint], ...] = ()
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    size: Place = (8.0, 4.5)
    heights: tuple[float, ...] = ()
    widths: tuple[float, ...] = ()
    largest_type: float = 10.0

    @property
    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row)

    @property
    def alt(self) -> str:
        """The picture in words, for readers who cannot see it."""
        ends = [mark.words for panel in self.panels for mark in panel.marks if isinstance(mark, Line) and mark.words]
        lines = [f"Lines: {'; '.join(' '.join(words.split()) for words in ends)}."] if ends else []
        return in_words(self.title, self.subtitle, [words for words, _ in self.key], [*self.notes, *lines, *self.said])


def in_words(title: str, subtitle: str, key: Sequence[str], notes: Sequence[str]) -> str:
    """Return a picture's alternative text."""
    heads = [words if words.endswith((".", "!", "?", ":")) else f"{words}." for words in (title, subtitle) if words]
    return " ".join([*heads, *([f"Colours: {', '.join(key)}."] if key else []), *notes])
