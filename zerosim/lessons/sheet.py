"""Elements of the course's drawings: a sheet with boxes, arrows and words on it, and charts of lines and of bars.

They look like the pictures of `report/plots`. Only `report` imports matplotlib, so axes have the type Any here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerosim.errors import InputError
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.page import Picture, dress, finish, frame, open_page
from zerosim.report.plots.panel import Axis, Panel, Place
from zerosim.report.plots.panel import Line as Mark
from zerosim.report.plots.style import THEMES, ink_on

THEME = THEMES["light"]


class Sheet:
    """A drawing whose places run from across[0] to across[1] and from up[0] to up[1]; `size` is in inches.

    Without a `grid` it has no axes.
    """

    def __init__(
        self,
        size: Place,
        title: str,
        subtitle: str,
        *,
        across: Place,
        up: Place,
        key: Sequence[tuple[str, dict[str, Any]]] = (),
        notes: Iterable[str] = (),
        grid: Literal["", "x"] = "",
    ) -> None:
        self.page = open_page(size, THEME.name)
        frame(self.page, title, subtitle, key, notes)
        self.axes: Any = self.page.figure.add_subplot()
        if grid:
            dress(self.page, self.axes, grid=grid)
        else:
            self.axes.set_axis_off()
        self.axes.set_xlim(*across)
        self.axes.set_ylim(*up)

    def picture(self) -> Picture:
        """Return the finished drawing, which a notebook shows."""
        return finish(self.page)

    def write(
        self, where: Place, words: str, *, scale: float = 1.0, bold: bool = False, color: str = "", ha: str = "center"
    ) -> None:
        """Write words around a place."""
        self.axes.text(
            *where, words.replace("$", r"\$"), ha=ha, va="center", color=color or THEME.text, zorder=6,
            **self.page.font(scale=scale, bold=bold),
        )  # fmt: skip

    def box(self, where: Place, words: str, *, fill: str) -> Any:
        """Draw words in a round box, in the ink that is most readable on its fill. Return the box, for arrows to begin
        and end at."""
        text = self.axes.text(
            *where, words.replace("$", r"\$"), ha="center", va="center", color=ink_on(fill), zorder=5,
            bbox={"boxstyle": "round,pad=0.45", "facecolor": fill, "edgecolor": THEME.muted, "linewidth": 0.8},
            **self.page.font(scale=0.9),
        )  # fmt: skip
        return text.get_bbox_patch()

    def cell(self, where: Place, width: float, height: float, *, fill: str, edge: str, heavy: bool = False) -> None:
        """Draw a rectangle around a place; sizes in the sheet's own units."""
        self.axes.bar(
            where[0], height, width, bottom=where[1] - height / 2, facecolor=fill, edgecolor=edge,
            linewidth=1.8 if heavy else 0.7, zorder=3 if heavy else 2,
        )  # fmt: skip

    def arrow(
        self, start: Place, end: Place, *, color: str, bend: float = 0.0, boxes: tuple[Any, Any] = (None, None)
    ) -> None:
        """Draw an arrow from a place to another, or from the border of one box to that of another.

        `bend` is the arc's height over its length.
        """
        first, last = boxes
        style = {
            "arrowstyle": "-|>", "color": color, "linewidth": 1.4, "patchA": first, "patchB": last,
            "shrinkA": 1 if first else 0, "shrinkB": 1 if last else 0, "connectionstyle": f"arc3,rad={bend}",
        }  # fmt: skip
        # Above the boxes, so that they have found their places when an arrow looks for their borders.
        self.axes.annotate("", end, xytext=start, arrowprops=style, zorder=7, annotation_clip=False)


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a chart, and their style: joined, marked, or both: '-', 'o' or '-o'."""

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


def chart(
    title: str,
    subtitle: str,
    lines: Mapping[str, Line],
    *,
    xlabel: str,
    ylabel: str,
    bounds: Place | None = None,
) -> Chart:
    """Return lines over one pair of axes, each named in a list beside them. `bounds` are the ends of the upright axis.

    Raises: InputError for no lines.
    """
    if not lines:
        raise InputError("no lines: nothing to draw; pass at least one")
    marks = tuple(
        Mark(name, list(zip(line.xs, line.ys, strict=True)), number, name * (len(lines) > 1), style=line.style)
        for number, (name, line) in enumerate(lines.items())
    )
    x, y = (_ends([value for line in lines.values() for value in getattr(line, of)]) for of in ("xs", "ys"))
    panel = Panel(marks, Axis(xlabel, x), Axis(ylabel, bounds or y), lists=len(lines) > 1)
    return Chart(title, subtitle, ((panel,),), size=(7.2, 3.6))


def _ends(values: Sequence[float]) -> Place:
    """Return the ends of an axis that shows these values, with some room."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room
