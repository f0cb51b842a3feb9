"""Stacked horizontal bars, one per run, with totals at their ends and reference lines: for memory and for traffic.

`by_stage.py` decides their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any

from matplotlib.axes import Axes

from zerosim.report.names import kind_words
from zerosim.report.plots.axes import bytes_axis, rows_axis
from zerosim.report.plots.page import Page, describe, dress, finish, ground, inches, settle, stage_name
from zerosim.report.plots.style import OTHER_PAINT, Paint, in_order, ink_on
from zerosim.units import format_bytes

_GAP = 0.055  # inches, left and right of a text
_THINNEST = 0.001  # of the longest bar: less than a dot on a screen
_FARTHEST = 2.5  # a reference beyond this many times the longest bar would make bars hard to compare


@dataclass(frozen=True, slots=True)
class Bar:
    """Bytes by part for one run, as counted on `rank`; `alike` if every rank counted the same.

    `beyond`: other bytes that decide whether a device is enough, drawn behind the parts and in no total.
    """

    label: str
    parts: dict[str, int]
    rank: int
    alike: bool
    beyond: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, label: str, by_rank: Mapping[int, Mapping[str, int]]) -> Bar:
        """Return the bar of the rank that has the most, the first of equals."""
        rank = max(by_rank, key=lambda rank: sum(by_rank[rank].values()))
        parts = dict(by_rank[rank])
        return cls(label, parts, rank, all(others == parts for others in by_rank.values()))

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def end_bytes(self) -> int:
        """The bar's end: the total and `beyond`."""
        return self.total_bytes + sum(self.beyond.values())

    @property
    def words(self) -> str:
        """The words at its end."""
        total = format_bytes(self.total_bytes)
        return f"{total} ({format_bytes(self.end_bytes)})" if self.beyond else total

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "rank": self.rank,
            "every_rank": self.alike,
            "bytes": dict(self.parts),
            "total_bytes": self.total_bytes,
            **({"beyond": dict(self.beyond)} if self.beyond else {}),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """A labelled line: a device's limit, or a formula's value."""

    label: str
    nbytes: Fraction | int

    def to_dict(self) -> dict[str, Any]:
        """Return exact bytes, as an integer or as 'numerator/denominator'."""
        exact = Fraction(self.nbytes)
        return {"label": self.label, "bytes": int(exact) if exact.denominator == 1 else str(exact)}


def key_of(page: Page, bars: Sequence[Bar], paints: Mapping[str, Paint]) -> list[tuple[str, dict[str, Any]]]:
    """Return every part that is visible in some bar, in the order of the stack."""
    seen = {name: nbytes for name, nbytes in _largest(bars).items() if nbytes and name not in _thin(bars)}
    return [(kind_words(name), page.paint(name, paints)) for name in in_order(seen, paints)]


def too_thin(bars: Sequence[Bar]) -> list[str]:
    """Return a sentence about the parts that no bar is long enough to show; none if there are none."""
    thin = ", ".join(f"{kind_words(name)} (at most {format_bytes(nbytes)})" for name, nbytes in _thin(bars).items())
    return [f"Too thin to see: {thin}."] if thin else []


def _thin(bars: Sequence[Bar]) -> dict[str, int]:
    most = max((bar.total_bytes for bar in bars), default=0)
    return {name: nbytes for name, nbytes in _largest(bars).items() if 0 < nbytes < most * _THINNEST}


def _largest(bars: Sequence[Bar]) -> dict[str, int]:
    """Return the most of each part in any bar."""
    every = [{**bar.parts, **bar.beyond} for bar in bars]
    return {name: max(parts.get(name, 0) for parts in every) for name in dict.fromkeys(chain(*every))}


def which_rank(bars: Sequence[Bar], what: str) -> str:
    """Return whose bytes the bars are, in a sentence; `what` is 'holds' or 'sends'."""
    if all(bar.alike for bar in bars):
        return f"Every rank {what} the same."
    stages: dict[int, list[str]] = {}
    for bar in bars:
        if not bar.alike:
            stages.setdefault(bar.rank, []).append(bar.label.split(" (")[0])
    which = "; ".join(f"rank {rank} in {', '.join(names)}" for rank, names in stages.items())
    others = "; elsewhere all ranks are identical." if any(bar.alike for bar in bars) else "."
    return f"Drawn is the rank that {what} most: {which}{others}"


def draw_bars(
    page: Page, bars: Sequence[Bar], paints: Mapping[str, Paint], references: Sequence[Reference] = ()
) -> Axes:
    """Draw into the room that `frame` has left of the page, and finish the page."""
    axes = dress(page, page.figure.add_subplot(), grid="x")
    axes.spines["left"].set_color(page.theme.text)
    rows_axis(page, axes, [stage_name(bar.label, "\n") for bar in bars])
    most = max((bar.end_bytes for bar in bars), default=0) or 1
    lines = sorted(float(line.nbytes) for line in references if line.nbytes <= _FARTHEST * most)
    chart = _Chart(page, axes, paints, lines)
    end: float = most
    for _ in range(3):  # the room for a label depends on the axis, whose ends depend on that room
        bytes_axis(axes.xaxis, most, max(2, int(inches(page, axes)[0] / 1.1)))
        axes.set_xlim(0, end)
        settle(page)
        if inches(page, axes)[1] / len(bars) < 2.9 * page.points / 72:  # no room for two lines of a name
            axes.set_yticks(range(len(bars)), [stage_name(bar.label) for bar in bars])
            settle(page)
        end = chart.end_of_axis(bars)
    axes.set_xlim(0, end)
    height = inches(page, axes)[1]
    row = page.points * 1.5 / 72
    span = len(bars) / max(1 - len(references) * row / height, 0.3)
    axes.set_ylim(len(bars) - 0.5, len(bars) - 0.5 - span)
    finish(page)
    describe(page, "; ".join(f"{bar.label}: {bar.words}" for bar in bars) + ".")
    chart.draw_references(references, len(bars) - 0.5 - span, row * span / height)
    for position, bar in enumerate(bars):
        chart.draw_bar(position, bar, min(0.64, 0.62 * span / height))
    return axes


@dataclass(frozen=True, slots=True)
class _Chart:
    """Axes of bars, and the bytes at which `lines` cross them."""

    page: Page
    axes: Axes
    paints: Mapping[str, Paint]
    lines: Sequence[float]

    def end_of_axis(self, bars: Sequence[Bar]) -> float:
        """Return the axis's end in bytes: every total has room after its bar, and after a line that would cross it."""
        width, end = inches(self.page, self.axes)[0], self.axes.get_xlim()[1]
        ends = [1.0, *(line * 1.02 for line in self.lines)]
        for bar in bars:
            label = self.page.width(bar.words, **self.page.font(bold=True)) + 2 * _GAP
            ends.append(self._beyond(bar.end_bytes, label / width * end) / max(1 - label / width, 0.2))
        return max(ends)

    def _beyond(self, start: float, length: float) -> float:
        """Return where a text of `length` bytes begins: at `start`, or further right, so that no line crosses it."""
        for line in self.lines:
            if start <= line <= start + length:
                start = line
        return start

    def draw_bar(self, position: int, bar: Bar, thickness: float) -> None:
        page, axes, left = self.page, self.axes, 0
        for name, nbytes in self._stack(bar):
            if nbytes:
                looks = page.paint(name, self.paints) | {"gid": f"bar{position}.{name}"}
                axes.barh(position, nbytes, thickness, left=left, **looks)
                self._label_part((left, left + nbytes), position, name)
                left += nbytes
        words, font = bar.words, page.font(bold=True)
        length = (page.width(words, **font) + 2 * _GAP) / inches(page, axes)[0] * axes.get_xlim()[1]
        where, box = (self._beyond(left, length), position), ground(page.theme.background)
        page.write(axes, words, where, (72 * _GAP, 0), ha="left", bbox=box, zorder=5, gid=f"total{position}", **font)

    def _stack(self, bar: Bar) -> list[tuple[str, int]]:
        return [(name, bar.parts[name]) for name in in_order(bar.parts, self.paints)] + list(bar.beyond.items())

    def _label_part(self, span: tuple[int, int], position: int, name: str) -> None:
        """Write name and bytes inside a part, or its bytes alone, or nothing: as much as fits.

        They stand where no line crosses the part, if there is room; else its bytes stand on the line.
        """
        page, axes = self.page, self.axes
        scale = inches(page, axes)[0] / axes.get_xlim()[1]
        ends = [span[0], *(line for line in self.lines if span[0] < line < span[1]), span[1]]
        piece = max(pairwise(ends), key=lambda piece: piece[1] - piece[0])
        color = page.theme.color(self.paints.get(name, OTHER_PAINT))
        font, nbytes = page.font(scale=0.85), format_bytes(span[1] - span[0])
        for words, (start, stop) in ((f"{kind_words(name)} {nbytes}", piece), (nbytes, piece), (nbytes, span)):
            if page.width(words, **font) <= (stop - start) * scale - 2 * _GAP:
                pad = 0.1 if (start, stop) == piece else 0.4
                looks = {"bbox": ground(color, pad), "gid": f"bar{position}.{name} label", **font}
                page.write(axes, words, ((start + stop) / 2, position), color=ink_on(color), zorder=4, **looks)
                return

    def draw_references(self, references: Sequence[Reference], top: float, row: float) -> None:
        """Draw lines, and labels above the bars, each in a row of its own: the smallest highest, over the others'
        ends."""
        page, axes = self.page, self.axes
        end, width, font = axes.get_xlim()[1], inches(page, axes)[0], page.font(scale=0.9)
        for index, reference in enumerate(sorted(references, key=lambda reference: reference.nbytes)):
            x, y = min(float(reference.nbytes), end), top + row * (index + 0.5)
            inside = float(reference.nbytes) in self.lines
            words = reference.label if inside else f"{reference.label}, beyond this axis \N{RIGHTWARDS ARROW}"
            if inside:
                ends = [x, x], [axes.get_ylim()[0], y - row / 2]
                axes.plot(*ends, color=page.theme.background, linewidth=2.8, zorder=3)  # visible on every paint
                axes.plot(*ends, color=page.theme.text, linewidth=1.3, dashes=(4, 2), zorder=3, gid=f"reference{index}")
            fits_right = inside and x / end * width + page.width(words, **font) + 0.08 <= width
            (side, away), box = ("left", 4) if fits_right else ("right", -4), ground(page.theme.background)
            page.write(axes, words, (x, y), (away, 0), ha=side, bbox=box, zorder=6, **font)
