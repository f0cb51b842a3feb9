"""The sheet of every picture: heading, key, notes, and the room that is left for axes.

Figures are laid out in inches and built with matplotlib's objects, never with pyplot, and no setting of matplotlib is
changed while they are built. SVG files are written by `svg.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO
from warnings import catch_warnings

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from zerosim.errors import wrong
from zerosim.report.plots.panel import DPI, Place, in_words
from zerosim.report.plots.style import THEMES, Paint, Theme, mixed
from zerosim.report.plots.svg import write_svg

DEFAULT_SIZE = (8.0, 4.5)
SMALLEST, LARGEST = (5.0, 3.0), (40.0, 40.0)
_MARGIN = 0.12  # inches around everything
_FONT = "DejaVu Sans"  # comes with matplotlib, and has Psi


class Picture(Figure):
    """A figure that a notebook shows without %matplotlib inline; `alt` is its content in words."""

    alt: str = ""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """Return the picture, and the metadata that a notebook keeps beside it."""
        file = io.BytesIO()
        # On paper of its own colour, on a page of any theme and whatever matplotlib's settings are.
        paper = self.get_facecolor()
        self.savefig(file, format="png", dpi=DPI * 0.6, facecolor=paper, transparent=False, metadata={"Software": None})
        return file.getvalue(), {"alt": self.alt}


@dataclass(frozen=True, slots=True)
class Page:
    """A figure, its theme, its size in inches, and the size of its body text in points."""

    figure: Picture
    theme: Theme
    size: tuple[float, float]
    points: float

    @property
    def renderer(self) -> Any:
        canvas: Any = self.figure.canvas  # a FigureCanvasAgg, by open_page
        return canvas.get_renderer()

    def font(self, *, scale: float = 1.0, bold: bool = False) -> dict[str, Any]:
        """Return keywords of a text."""
        return {"fontfamily": _FONT, "fontsize": self.points * scale, "fontweight": "bold" if bold else "normal"}

    def extent(self, text: Text) -> Bbox:
        """Return the place of a text, in pixels."""
        return text.get_window_extent(self.renderer)

    def width(self, words: str, **font: Any) -> float:
        """Return the width that a text would have, in inches."""
        return self.extent(Text(0, 0, words, figure=self.figure, **(font or self.font()))).width / self.figure.dpi

    def look(self, paint: Paint) -> dict[str, Any]:
        """Return keywords of an area, its hatch half as strong as the background."""
        color, edge = self.theme.color(paint), self.theme.background
        if paint.hatch or paint.edge:
            edge = getattr(self.theme, paint.edge) if paint.edge else mixed(color, edge)
        return {"facecolor": color, "edgecolor": edge, "hatch": paint.hatch, "linewidth": 0.6}

    def ground(self, pad: float = 0.1, color: str | None = None) -> dict[str, Any]:
        """Return a box behind a text, so that hatches and lines do not run through its letters; `pad` in its font
        size."""
        fill = self.theme.background if color is None else color
        return {"boxstyle": f"square,pad={pad:g}", "facecolor": fill, "edgecolor": "none"}

    def write(self, axes: Axes, words: str, where: Place, offset: Place = (0, 0), **looks: Any) -> Annotation:
        """Write words so many points away from a place on axes: centred and in the body's font, unless `looks` say
        otherwise."""
        usual = self.font() | {"ha": "center", "va": "center_baseline", "color": self.theme.text}
        looks = usual | looks
        return axes.annotate(words, where, xytext=offset, textcoords="offset points", annotation_clip=False, **looks)


def check_size(size: tuple[float, float]) -> tuple[float, float]:
    """Check a sheet's size. Raises: InputError for one, in inches, that is unreadable or does not fit in memory."""
    width, height = size
    if not (SMALLEST[0] <= width <= LARGEST[0] and SMALLEST[1] <= height <= LARGEST[1]):
        low, high = (f"{w:g}x{h:g}" for w, h in (SMALLEST, LARGEST))
        raise wrong("size", f" {width:g}x{height:g}: expected {low} to {high} inches")
    return size


def open_page(
    size: tuple[float, float] | None,
    theme: str,
    default: tuple[float, float] = DEFAULT_SIZE,
    largest_type: float = 10.0,
) -> Page:
    """Open an empty sheet, its type as large as it has room for.

    Raises: InputError for a theme that is not 'light' or 'dark', and a size as `check_size` does.
    """
    if theme not in THEMES:
        raise wrong("theme", f" {theme!r}: expected one of {', '.join(THEMES)}")
    width, height = check_size(size or default)
    figure = Picture(figsize=(width, height), dpi=DPI, facecolor=THEMES[theme].background)
    FigureCanvasAgg(figure)
    return Page(figure, THEMES[theme], (width, height), min(largest_type, max(6.5, 10 * min(width / 7, height / 4))))


def frame(
    page: Page,
    title: str,
    subtitle: str,
    key: Sequence[tuple[str, dict[str, Any]]] = (),
    notes: Iterable[str] = (),
) -> None:
    """Write heading, key and notes; the rest of the sheet is for axes. The title is also the figure's label, and all of
    it is its alternative text."""
    notes = list(notes)
    page.figure.set_label(title)
    page.figure.alt = in_words(title, subtitle, [name for name, _ in key], notes)
    height = page.size[1]
    large, body, small = page.font(scale=1.2, bold=True), page.font(), page.font(scale=0.85)
    top = _write(page, height - _MARGIN, _wrapped(page, title, large), large, page.theme.text)
    top = _write(page, top - 0.02, _wrapped(page, subtitle, body), body, page.theme.muted)
    top = _key(page, top - 0.06, key)
    lines = [line for note in notes for line in _wrapped(page, note, small)]
    low = (_MARGIN + small["fontsize"] * 1.4 / 72 * len(lines)) / height
    _write(page, low * height, lines, small, page.theme.muted)
    room = max(top / height - low, 0.1)
    page.figure.set_layout_engine("constrained", rect=(0, low, 1, room), w_pad=_MARGIN, h_pad=0.06, hspace=0.02)


def settle(page: Page) -> None:
    """Place the axes, so that texts may ask how many inches an axis has. May be called again."""
    with catch_warnings(action="ignore", category=UserWarning):  # a layout without room shows in the axes' inches
        page.figure.draw_without_rendering()


def finish(page: Page) -> Picture:
    """Return the figure, its axes where they are now."""
    settle(page)
    page.figure.set_layout_engine("none")
    return page.figure


def inches(page: Page, axes: Axes) -> tuple[float, float]:
    """Return width and height of the area inside the axes."""
    box = axes.get_window_extent(page.renderer)
    return box.width / page.figure.dpi, box.height / page.figure.dpi


def _write(page: Page, top: float, lines: Iterable[str], font: dict[str, Any], color: str) -> float:
    """Write lines downwards from `top`, in inches; return where they end."""
    width, height = page.size
    for line in lines:
        page.figure.text(_MARGIN / width, top / height, line, va="top", ha="left", color=color, **font)
        top -= font["fontsize"] * 1.4 / 72
    return top


def _wrapped(page: Page, text: str, font: dict[str, Any]) -> list[str]:
    """Return lines that are no wider than the sheet."""
    room, lines = page.size[0] - 2 * _MARGIN, [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and page.width(longer, **font) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return [line for line in lines if line]


def _key(page: Page, top: float, key: Sequence[tuple[str, dict[str, Any]]]) -> float:
    """Draw swatches with their names, left to right in the order of the stack; return where they end."""
    if not key:
        return top
    (width, height), em = page.size, page.points / 72
    left = _MARGIN
    for name, paint in key:
        wide = 1.9 * em + page.width(name)
        if left > _MARGIN and left + wide > width - _MARGIN:
            left, top = _MARGIN, top - 1.6 * em
        box = Rectangle((left, top - 1.1 * em), 1.5 * em, 0.95 * em, transform=page.figure.dpi_scale_trans, **paint)
        page.figure.add_artist(box)
        page.figure.text(
            (left + 1.9 * em) / width, (top - 0.6 * em) / height, name,
            va="center_baseline", ha="left", color=page.theme.text, **page.font(),
        )  # fmt: skip
        left += wide + 1.4 * em
    return top - 1.6 * em


def list_looks(page: Page) -> dict[str, Any]:
    """Return keywords of a list beside or below axes."""
    font = page.font(scale=0.9)
    prop = {"family": font["fontfamily"], "size": font["fontsize"]}
    return {"frameon": False, "labelcolor": page.theme.text, "prop": prop}


def dress(page: Page, axes: Axes, *, grid: str, x: str = "", y: str = "") -> Axes:
    """Dress the axes in the page's theme, with a light grid along x, y or both; `x` and `y` are their labels."""
    theme = page.theme
    axes.set_xlabel(x, color=theme.muted, **page.font(scale=0.9))
    axes.set_ylabel(y, color=theme.muted, **page.font(scale=0.9))
    axes.set_facecolor(theme.background)
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=theme.grid, linewidth=0.8)  # type: ignore[arg-type]
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)
        spine.set_linewidth(0.8)
    axes.tick_params(which="both", colors=theme.muted, labelsize=page.points * 0.9, labelfontfamily=_FONT, width=0.8)
    axes.tick_params(which="minor", length=0)
    return axes


def named(words: str) -> str:
    """Return words for matplotlib without any formula, but with the index of 'ZeRO-1 (P_os)' below the line."""
    return re.sub(r"\(P_(os[+gp]*)\)", lambda match: f"($P_{{{match[1]}}}$)", words.replace("$", r"\$"))


def write_figure(figure: Figure, file: BinaryIO, form: str) -> None:
    """Write as 'png' or 'svg': the same bytes for the same picture, and no name of anything outside the file."""
    if form == "svg":
        write_svg(figure, file)
    else:
        figure.savefig(file, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": None})
