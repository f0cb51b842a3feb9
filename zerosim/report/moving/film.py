"""Elements of moving pictures: shapes and words as SVG, and the moments at which they are visible, as CSS.

A shape without moments is always visible. One with moments also says whether it is part of the still picture, which is
shown under `prefers-reduced-motion`, in print and where CSS does not run.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import NamedTuple

from zerosim.report.plots.style import THEMES, Theme

FONTS = "'DejaVu Sans', 'Bitstream Vera Sans', Verdana, Geneva, sans-serif"
Span = tuple[float, float]
"""Seconds, from and to."""


class Moving(NamedTuple):
    """A finished picture: its file, and its content in words."""

    svg: str
    alt: str

    def _repr_html_(self) -> str:
        """Return HTML, as a notebook shows and stores it."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{html.escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    def __repr__(self) -> str:
        return f"Moving({self.alt!r})"


class Film:
    """A sheet of `size` pixels for shapes, in a loop of so many seconds."""

    def __init__(self, size: tuple[int, int], seconds: float, title: str, alt: str, theme: str) -> None:
        self.size, self.seconds, self.title, self.alt = size, seconds, title, alt
        self.theme: Theme = THEMES[theme]
        self._body: list[str] = []
        self._rules: dict[str, str] = {}  # keyframes by their text
        self._still: set[str] = set()

    def put(self, shapes: str | Sequence[str], name: str = "", *, still: bool = True) -> None:
        """Add shapes as one group that moves by the rule `name`; `still`: whether the still picture has it."""
        text = shapes if isinstance(shapes, str) else "".join(shapes)
        hidden = "" if still else " o"
        self._body.append(f'<g class="{name}{hidden}">{text}</g>' if name or hidden else text)

    def seen(self, spans: Sequence[Span], *, before: float = 0.0, after: float = 0.0) -> str:
        """Make a rule: opaque in these spans, and otherwise as opaque as given."""
        opacity = 1.0 if spans and spans[0][0] <= 0 else before
        frames = [(0.0, opacity)]
        for start, stop in spans:
            frames += [(start, opacity), (start, 1.0), (stop, 1.0)]
            opacity = after if stop < self.seconds else 1.0
            frames.append((stop, opacity))
        frames.append((self.seconds, opacity))
        return self._rule([f"{self._percent(at)}{{opacity:{value:g}}}" for at, value in _stepped(frames)])

    def moved(self, span: Span, start: tuple[float, float], end: tuple[float, float]) -> str:
        """Make a rule: visible in this span only, on the way from one place to the other."""
        first, last = (f"translate({x:g}px,{y:g}px)" for x, y in (start, end))
        begin, done = (self._percent(at) for at in span)
        near = self._percent(span[0] + 0.01)
        gone = self._percent(span[1] + 0.01)
        return self._rule([
            f"0%,{begin}{{opacity:0;transform:{first}}}", f"{near}{{opacity:1;transform:{first}}}",
            f"{done}{{opacity:1;transform:{last}}}", f"{gone},to{{opacity:0;transform:{last}}}",
        ])  # fmt: skip

    def slid(self, span: Span, by: float) -> str:
        """Make a rule: moved to the right by so many pixels during this span, then kept there."""
        begin, done = (self._percent(at) for at in span)
        return self._rule([f"0%,{begin}{{transform:none}}", f"{done},to{{transform:translate({by:g}px)}}"])

    def picture(self) -> Moving:
        (width, height), theme = self.size, self.theme
        rules = "".join(
            f"@keyframes {name}{{{text}}}.{name}{{animation:{name} {self.seconds:g}s linear infinite}}"
            for text, name in self._rules.items()
        )
        style = (
            f"text{{font-family:{FONTS};font-size:14px;fill:{theme.text}}}"
            f".b{{font-weight:bold}}.m{{fill:{theme.muted}}}.c{{text-anchor:middle}}.e{{text-anchor:end}}.o{{opacity:0}}"
            f"@media screen and (prefers-reduced-motion:no-preference){{{rules}}}"
        )
        label = html.escape(self.alt)
        body = "\n".join(self._body)
        return Moving(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{label}">\n<title>{html.escape(self.title)}</title>\n<desc>{label}</desc>\n'
            f'<style>{style}</style>\n<rect width="{width}" height="{height}" fill="{theme.background}"/>\n'
            f"{body}\n</svg>\n",
            self.alt,
        )

    def _rule(self, frames: Sequence[str]) -> str:
        return self._rules.setdefault("".join(frames), f"k{len(self._rules)}")

    def _percent(self, at: float) -> str:
        return f"{100 * min(max(at / self.seconds, 0.0), 1.0):.4g}%"


def _stepped(frames: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return changes that take a hundredth of a second: a moment cannot have two values."""
    found: list[tuple[float, float]] = []
    for at, value in frames:
        if found and at <= found[-1][0]:
            if value == found[-1][1]:
                continue
            at = found[-1][0] + 0.01
        found.append((at, value))
    return found


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    size = f'width="{max(width, 0.5):g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}"{more and " " + more}/>'


def words(text: str, x: float, y: float, looks: str = "", more: str = "") -> str:
    """Add words. `looks`: b bold, m muted, c centred, e ending there."""
    return f'<text x="{x:g}" y="{y:g}" class="{" ".join(looks)}"{more and " " + more}>{html.escape(text)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, color: str, more: str = "") -> str:
    return f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{color}"{more and " " + more}/>'
