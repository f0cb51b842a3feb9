"""Stacked bars that lie, one per run, with totals at their ends and reference lines: for memory and for traffic.

Owns how bars are drawn and labelled. What they hold is decided by `memory.py` and `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from zerosim.report.plots.page import Page, bytes_axis, dress, finish, ground, inches, settle, stage_name
from zerosim.report.plots.style import OTHER_PAINT, Paint, contrast, in_order
from zerosim.units import format_bytes

_GAP = 0.055  # inches, left and right of a text
_THINNEST = 0.001  # of the longest bar: less than a dot on a screen
_FARTHEST = 2.5  # a reference beyond this many times the longest bar would make bars hard to compare


@dataclass(frozen=True, slots=True)
class Bar:
    """Bytes by part for one run, as counted on `rank`; `alike` when every rank counted the same."""

    label: str
    parts: dict[str, int]
    rank: int
    alike: bool

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "rank": self.rank,
            "every_rank": self.alike,
            "bytes": dict(self.parts),
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """A labelled line: a device's limit, or what a formula says."""

    label: str
    nbytes: Fraction | int

    def to_dict(self) -> dict[str, Any]:
        """Exact bytes, as an integer or as 'numerator/denominator'."""
        exact = Fraction(self.nbytes)
        return {"label": self.label, "bytes": int(exact) if exact.denominator == 1 else str(exact)}


def most_of(values: Sequence[int]) -> tuple[int, bool]:
    """Where the most is, the first of equals, and whether all are equal."""
    return values.index(max(values)), len(set(values)) == 1


def key_of(page: Page, bars: Sequence[Bar], paints: Mapping[str, Paint]) -> list[tuple[str, dict[str, Any]]]:
    """Every part that can be seen in some bar, in the order of the stack."""
    thin, present = _thin(bars), _largest(bars)
    present = {name: nbytes for name, nbytes in present.items() if nbytes and name not in thin}
    return [(name, page.paint(name, paints)) for name in in_order(present, paints)]


def too_thin(bars: Sequence[Bar]) -> list[str]:
    """A sentence about the parts that no bar is long enough to show; none where there are none."""
    thin = ", ".join(f"{name} (at most {format_bytes(nbytes)})" for name, nbytes in _thin(bars).items())
    return [f"Too thin to be seen: {thin}."] if thin else []


def _thin(bars: Sequence[Bar]) -> dict[str, int]:
    most = max((bar.total_bytes for bar in bars), default=0)
    return {name: nbytes for name, nbytes in _largest(bars).items() if 0 < nbytes < most * _THINNEST}


def _largest(bars: Sequence[Bar]) -> dict[str, int]:
    """The most of each part in any bar."""
    names = dict.fromkeys(name for bar in bars for name in bar.parts)
    return {name: max(bar.parts.get(name, 0) for bar in bars) for name in names}


def which_rank(bars: Sequence[Bar], what: str) -> str:
    """Whose bytes the bars are, in a sentence; `what` is 'holds' or 'sends'."""
    if all(bar.alike for bar in bars):
        return f"Every rank {what} the same."
    stages: dict[int, list[str]] = {}
    for bar in bars:
        if not bar.alike:
            stages.setdefault(bar.rank, []).append(bar.label.split(" (")[0])
    which = "; ".join(f"rank {rank} in {', '.join(names)}" for rank, names in stages.items())
    return f"Drawn is the rank that {what} most: {which}" + (
        "; elsewhere all are alike." if any(bar.alike for bar in bars) else "."
    )


def draw_bars(
    page: Page, bars: Sequence[Bar], paints: Mapping[str, Paint], references: Sequence[Reference] = ()
) -> Axes:
    """Draw into what `frame` has left of the page, and finish the page."""
    axes = page.figure.add_subplot()
    dress(page, axes, grid="x")
    axes.spines["left"].set_color(page.theme.text)
    axes.set_yticks(range(len(bars)), [stage_name(bar.label, "\n") for bar in bars])
    axes.tick_params(axis="y", length=0, colors=page.theme.text, labelsize=page.points)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    most = max((bar.total_bytes for bar in bars), default=0) or 1
    shown = [reference for reference in references if reference.nbytes <= _FARTHEST * most]
    end: float = most
    for _ in range(3):  # the room for a label depends on the axis, whose ends depend on that room
        bytes_axis(axes.xaxis, most, max(2, int(inches(page, axes)[0] / 1.1)))
        axes.set_xlim(0, end)
        settle(page)
        if inches(page, axes)[1] / len(bars) < 2.9 * page.points / 72:  # no room for two lines of a name
            axes.set_yticks(range(len(bars)), [stage_name(bar.label) for bar in bars])
            settle(page)
        end = _end_of_axis(page, inches(page, axes)[0], end, bars, shown)
    axes.set_xlim(0, end)
    height = inches(page, axes)[1]
    row = page.points * 1.5 / 72
    span = len(bars) / max(1 - len(references) * row / height, 0.3)
    axes.set_ylim(len(bars) - 0.5, len(bars) - 0.5 - span)
    finish(page)
    _draw_references(page, axes, references, shown, len(bars) - 0.5 - span, row * span / height)
    thickness = min(0.64, 0.62 * span / height)
    lines = sorted(float(reference.nbytes) for reference in shown)
    for position, bar in enumerate(bars):
        _draw_bar(page, axes, position, bar, paints, thickness, lines)
    return axes


def _end_of_axis(page: Page, width: float, end: float, bars: Sequence[Bar], shown: Sequence[Reference]) -> float:
    """The axis's end in bytes: every total has room after its bar, and after a line that would run through it."""
    lines = sorted(float(reference.nbytes) for reference in shown)
    ends = [line * 1.02 for line in lines]
    for bar in bars:
        label = page.width(format_bytes(bar.total_bytes), **page.font(bold=True))
        start = _beyond(lines, bar.total_bytes, (label + 2 * _GAP) / width * end)
        ends.append(start / max(1 - (label + 2 * _GAP) / width, 0.2))
    return max([*ends, 1.0])


def _beyond(lines: Sequence[float], start: float, length: float) -> float:
    """Where a text of that length begins, at `start` or further right, so that no line runs through it; in bytes."""
    for line in lines:
        if start <= line <= start + length:
            start = line
    return start


def _draw_bar(
    page: Page,
    axes: Axes,
    position: int,
    bar: Bar,
    paints: Mapping[str, Paint],
    thickness: float,
    lines: Sequence[float],
) -> None:
    left = 0
    for name in in_order(bar.parts, paints):
        nbytes = bar.parts[name]
        if not nbytes:
            continue
        (patch,) = axes.barh(position, nbytes, thickness, left=left, **page.paint(name, paints))
        patch.set_gid(f"bar{position}.{name}")
        _label_part(page, axes, (left, left + nbytes), position, name, paints, lines)
        left += nbytes
    words, font = format_bytes(left), page.font(bold=True)
    length = (page.width(words, **font) + 2 * _GAP) / inches(page, axes)[0] * axes.get_xlim()[1]
    axes.annotate(
        words, (_beyond(lines, left, length), position), xytext=(72 * _GAP, 0), textcoords="offset points",
        va="center_baseline", ha="left", color=page.theme.text, bbox=ground(page.theme.background), zorder=5,
        gid=f"total{position}", **font,
    )  # fmt: skip


def _label_part(
    page: Page,
    axes: Axes,
    span: tuple[int, int],
    position: int,
    name: str,
    paints: Mapping[str, Paint],
    lines: Sequence[float],
) -> None:
    """Name and bytes inside a part, or its bytes alone, or nothing: what fits.

    If there is room where no line runs through the part, there; else its bytes stand on the line.
    """
    scale = inches(page, axes)[0] / axes.get_xlim()[1]
    ends = [span[0], *(line for line in lines if span[0] < line < span[1]), span[1]]
    piece = max(pairwise(ends), key=lambda piece: piece[1] - piece[0])
    color = page.theme.color(paints.get(name, OTHER_PAINT))
    ink = max(("#ffffff", "#10151b"), key=lambda ink: contrast(ink, color))
    font, nbytes = page.font(scale=0.85), format_bytes(span[1] - span[0])
    for words, (start, stop) in ((f"{name} {nbytes}", piece), (nbytes, piece), (nbytes, span)):
        if page.width(words, **font) <= (stop - start) * scale - 2 * _GAP:
            pad = 0.1 if (start, stop) == piece else 0.4
            axes.text((start + stop) / 2, position, words, ha="center", va="center_baseline", color=ink, zorder=4,
                      bbox=ground(color, pad), gid=f"bar{position}.{name} label", **font)  # fmt: skip
            return


def _draw_references(
    page: Page, axes: Axes, references: Sequence[Reference], shown: Sequence[Reference], top: float, row: float
) -> None:
    """Lines and their labels above the bars, each in a row of its own: the smallest highest, over the others' ends."""
    end, width = axes.get_xlim()[1], inches(page, axes)[0]
    font = page.font(scale=0.9)
    for index, reference in enumerate(sorted(references, key=lambda reference: reference.nbytes)):
        nbytes, y = float(reference.nbytes), top + row * (index + 0.5)
        inside = reference in shown
        words = reference.label if inside else f"{reference.label}, beyond this axis \N{RIGHTWARDS ARROW}"
        x = min(nbytes, end)
        if inside:
            bottom = axes.get_ylim()[0]
            ends = [x, x], [bottom, y - row / 2]
            axes.plot(*ends, color=page.theme.background, linewidth=2.8, zorder=3)  # seen on every paint
            axes.plot(*ends, color=page.theme.text, linewidth=1.3, dashes=(4, 2), zorder=3, gid=f"reference{index}")
        fits_right = inside and x / end * width + page.width(words, **font) + 0.08 <= width
        axes.annotate(
            words, (x, y), xytext=(4 if fits_right else -4, 0), textcoords="offset points",
            ha="left" if fits_right else "right", va="center_baseline", color=page.theme.text, zorder=6,
            bbox=ground(page.theme.background), **font,
        )  # fmt: skip
