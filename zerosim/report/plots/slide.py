"""A slide: a wide sheet with large type, on which places are inches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from zerosim.report.plots.page import Page, Place, frame, inches, open_page, settle

SIZE = (12.8, 7.2)
LARGEST_TYPE = 18.0


class Slide:
    """A page with a drawing whose places run from (0, 0), below left, to `width` and `height`, in inches."""

    def __init__(
        self,
        title: str,
        subtitle: str,
        key: Sequence[tuple[str, dict[str, Any]]] = (),
        notes: Iterable[str] = (),
        *,
        theme: str,
        size: tuple[float, float] | None,
    ) -> None:
        self.page: Page = open_page(size, theme, SIZE, LARGEST_TYPE)
        frame(self.page, title, subtitle, key, notes)
        self.axes: Axes = self.page.figure.add_subplot()
        self.axes.set_axis_off()
        settle(self.page)
        self.width, self.height = inches(self.page, self.axes)
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(0, self.height)
        self.em = self.page.points / 72

    def box(self, where: Place, width: float, height: float, **looks: Any) -> None:
        """Draw a rectangle with its lower left corner there."""
        self.axes.add_patch(Rectangle(where, width, height, **looks))

    def card(self, where: Place, width: float, height: float, **looks: Any) -> None:
        """Draw a rectangle with round corners around a place."""
        corner = where[0] - width / 2, where[1] - height / 2
        style = f"round,pad=0,rounding_size={0.2 * height:g}"
        self.axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, **looks))

    def write(self, words: str, where: Place, **looks: Any) -> None:
        """Write words around a place; `scale` and `bold` are of their font."""
        font = self.page.font(scale=looks.pop("scale", 1.0), bold=looks.pop("bold", False))
        self.page.write(self.axes, words, where, **font, **looks)
