"""What a function of this folder returns."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.report.plots.panel import DPI, Sheet


@dataclass(frozen=True, slots=True, repr=False)
class Chart(Sheet):
    """A picture as a value, which a notebook shows."""

    def __repr__(self) -> str:
        width, height = (DPI * inches for inches in self.size)
        return f"<Picture size {width:g}x{height:g} with {len(list(self.panels))} Axes>"

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """Return the picture, and the metadata that a notebook keeps beside it."""
        from zerosim.report.plots.draw import draw

        return draw(self)._repr_png_()
