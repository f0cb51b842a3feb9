"""Stacked horizontal bars, one per run, with totals at their ends and reference lines: for memory and for traffic.

`by_stage.py` decides their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

from zerosim.report.names import kind_words
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Box, Mark, Panel, Rule
from zerosim.report.plots.style import OTHER_PAINT, Paint, in_order
from zerosim.report.plots.words import tick_bytes
from zerosim.units import format_bytes

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


def _too_thin(bars: Sequence[Bar]) -> list[str]:
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


def bars_panel(bars: Sequence[Bar], paints: Mapping[str, Paint], references: Sequence[Reference] = ()) -> Panel:
    """Return a row for each bar, its parts in their order, its total at its end, and the references across."""
    most = max((bar.end_bytes for bar in bars), default=0) or 1
    near = sorted(float(line.nbytes) for line in references if line.nbytes <= _FARTHEST * most)
    marks: list[Mark] = [Rule(line.label, x=float(line.nbytes)) for line in references]
    for row, bar in enumerate(bars):
        left, thick = 0, (row - 0.32, row + 0.32)
        stack = [(name, bar.parts[name]) for name in in_order(bar.parts, paints)] + list(bar.beyond.items())
        for name, nbytes in stack:
            if nbytes:
                words = f"{kind_words(name)} {format_bytes(nbytes)}", format_bytes(nbytes)
                paint = paints.get(name, OTHER_PAINT)
                marks.append(Box(f"bar{row}.{name}", (left, left + nbytes), thick, paint, words))
                left += nbytes
        at = max([left, *(line for line in near if left <= line < left + 0.08 * most)])  # no line runs through it
        marks.append(Box(f"total{row}", (at, at), thick, OTHER_PAINT, after=bar.words))
    names = [bar.label.replace(" (", "\n(") for bar in bars]
    return Panel(
        tuple(marks),
        Axis(ends=(0, max(most, *(1.02 * line for line in near), 0)), words=tick_bytes),
        Axis.of_rows(names),
        grid="x",
    )


def bars_chart(
    title: str,
    subtitle: str,
    bars: Sequence[Bar],
    paints: Mapping[str, Paint],
    notes: Sequence[str] = (),
    references: Sequence[Reference] = (),
    height: float = 4.5,
) -> Chart:
    """Return a chart of stacked bars, one below the other; `height` is in inches."""
    seen = {name: nbytes for name, nbytes in _largest(bars).items() if nbytes and name not in _thin(bars)}
    key = tuple((kind_words(name), paints.get(name, OTHER_PAINT)) for name in in_order(seen, paints))
    panel = bars_panel(bars, paints, references)
    said = "; ".join(f"{bar.label}: {bar.words}" for bar in bars) + "."
    return Chart(title, subtitle, ((panel,),), key, (*notes, *_too_thin(bars)), (said,), (8.0, height))
