"""What the course's drawings are made of: an empty sheet, boxes, arrows and words on it, and a chart of lines.

They look like the pictures of `report/plots`. Only `report` imports matplotlib, so axes have the type Any here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.errors import InputError
from zerosim.report.plots.page import Page, Picture, dress, finish, frame, open_page
from zerosim.report.plots.style import DASHES, LINE_PAINTS, MARKERS, contrast

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page and the axes on it."""

    page: Page
    axes: Any


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a chart, and whether they are joined, marked, or both: '-', 'o' or '-o'."""

    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "-o"

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys) or not len(self.xs):
            raise InputError(
                f"a line of {len(self.xs)} xs and {len(self.ys)} ys: expected as many of both, one or more"
            )
        if self.style not in ("-", "o", "-o"):
            raise InputError(f"style {self.style!r}: expected '-', 'o' or '-o'")


def open_sheet(
    page: Page,
    title: str,
    subtitle: str,
    *,
    across: Place,
    up: Place,
    key: Sequence[tuple[str, dict[str, Any]]] = (),
    notes: Iterable[str] = (),
) -> Sheet:
    """An empty drawing whose places run from across[0] to across[1] and from up[0] to up[1]."""
    frame(page, title, subtitle, key, notes)
    axes = page.figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    return Sheet(page, axes)


def picture(page: Page) -> Picture:
    """The finished drawing; a notebook shows it by itself."""
    figure = finish(page)
    assert isinstance(figure, Picture)  # by open_page
    return figure


def write(
    sheet: Sheet,
    where: Place,
    words: str,
    *,
    scale: float = 1.0,
    bold: bool = False,
    color: str = "",
    ha: str = "center",
) -> None:
    """Words around a place."""
    sheet.axes.text(
        *where, words.replace("$", r"\$"), ha=ha, va="center", color=color or sheet.page.theme.text, zorder=6,
        **sheet.page.font(scale=scale, bold=bold),
    )  # fmt: skip


def box(sheet: Sheet, where: Place, words: str, *, fill: str) -> Any:
    """Words in a round box, in the ink that is best read on its fill; the box, for arrows to begin and end at."""
    text = sheet.axes.text(
        *where, words.replace("$", r"\$"), ha="center", va="center", color=ink_on(fill), zorder=5,
        bbox={"boxstyle": "round,pad=0.45", "facecolor": fill, "edgecolor": sheet.page.theme.muted, "linewidth": 0.8},
        **sheet.page.font(scale=0.9),
    )  # fmt: skip
    return text.get_bbox_patch()


def cell(sheet: Sheet, where: Place, width: float, height: float, *, fill: str, edge: str, heavy: bool = False) -> None:
    """A rectangle around a place; sizes in the sheet's own units."""
    sheet.axes.bar(
        where[0], height, width, bottom=where[1] - height / 2, facecolor=fill, edgecolor=edge,
        linewidth=1.8 if heavy else 0.7, zorder=3 if heavy else 2,
    )  # fmt: skip


def arrow(
    sheet: Sheet, start: Place, end: Place, *, color: str, bend: float = 0.0, boxes: tuple[Any, Any] = (None, None)
) -> None:
    """From a place to another, or from the border of one box to that of another.

    `bend` is the arc's height over its length.
    """
    first, last = boxes
    style = {
        "arrowstyle": "-|>", "color": color, "linewidth": 1.4, "patchA": first, "patchB": last,
        "shrinkA": 1 if first else 0, "shrinkB": 1 if last else 0, "connectionstyle": f"arc3,rad={bend}",
    }  # fmt: skip
    # Above the boxes, so that they have found their places when an arrow looks for their borders.
    sheet.axes.annotate("", end, xytext=start, arrowprops=style, zorder=7, annotation_clip=False)


def ink_on(fill: str) -> str:
    """Black or white, whichever is better read on a fill."""
    return max(("#ffffff", "#10151b"), key=lambda ink: contrast(ink, fill))


def chart(
    title: str,
    subtitle: str,
    lines: Mapping[str, Line],
    *,
    xlabel: str,
    ylabel: str,
    bounds: Place | None = None,
) -> Picture:
    """Lines over one pair of axes, each named in a legend beside them. `bounds` are the ends of the upright axis.

    Raises: InputError for no lines.
    """
    if not lines:
        raise InputError("no lines: there is nothing to draw; give at least one")
    page = open_page((7.2, 3.6), "light")
    frame(page, title, subtitle)
    axes: Any = page.figure.add_subplot()
    dress(page, axes, grid="both")
    for index, (name, line) in enumerate(lines.items()):
        color = page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])
        axes.plot(
            line.xs, line.ys, color=color, label=name.replace("$", r"\$"), gid=f"line.{name}",
            linestyle=DASHES[index % len(DASHES)] if "-" in line.style else "none",
            marker=MARKERS[index % len(MARKERS)] if "o" in line.style else "", linewidth=1.6,
            markersize=page.points * 0.5,
        )  # fmt: skip
    font = page.font(scale=0.9)
    axes.set_xlabel(xlabel, color=page.theme.muted, **font)
    axes.set_ylabel(ylabel, color=page.theme.muted, **font)
    if bounds is not None:
        axes.set_ylim(*bounds)
    if len(lines) > 1:
        axes.legend(
            loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelcolor=page.theme.text,
            prop={"family": font["fontfamily"], "size": font["fontsize"]},
        )  # fmt: skip
    return picture(page)
