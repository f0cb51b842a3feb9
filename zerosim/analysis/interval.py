"""Intervals of uncertainty, from what other people measured.

A row is the ratio of a measured figure to zerosim's own, and a class. A figure is compared with the rows of its own
class; a class of fewer than `FEWEST` rows is merged upwards, as the class says (`merges`). If there are still fewer
than `FEWEST` rows, the figure counts as never compared.

The interval lies between two measured ratios, chosen so that eight of ten further rows of the class would lie inside if
they were like these. zerosim's own number may lie outside, if all measured figures were larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

FEWEST = 8
INSIDE = 0.8


class Class(Protocol):
    """The properties of figures with similar errors; '' for a property that was left out."""

    def merges(self) -> Sequence[Any]:
        """Return this class and the classes that it is merged into, in order."""

    def belongs(self, of: Any) -> bool:
        """Return whether this class belongs to a merged one."""


C = TypeVar("C", bound=Class)


@dataclass(frozen=True, slots=True)
class Measured(Generic[C]):
    """A measured row: its scenario, its class, and ln(measured / zerosim's)."""

    scenario: str
    of: C
    log_ratio: float


@dataclass(frozen=True, slots=True)
class Interval(Generic[C]):
    """Factors of zerosim's figure between which eight of ten measured ones lie, with the number of rows and their
    class."""

    low: float
    high: float
    rows: int
    of: C


def interval(of: C, rows: Sequence[Measured[C]], *, alike: bool = False) -> Interval[C] | None:
    """Return the interval of a figure of this class; None if too few were measured. `alike`: rows of one scenario err
    alike, so that fewer lie outside where fewer scenarios measured the class."""
    for merged in of.merges():
        found = [row for row in rows if row.of.belongs(merged)]
        ratios = sorted(row.log_ratio for row in found)
        if len(ratios) >= FEWEST:
            left = _left_outside(len(ratios), len({row.scenario for row in found}) if alike else 0)
            return Interval(math.exp(ratios[left]), math.exp(ratios[-1 - left]), len(ratios), merged)
    return None


def overlaps(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two bands overlap. Overlapping bands are not ranked."""
    return one[0] <= other[1] and other[0] <= one[1]


def _left_outside(rows: int, scenarios: int = 0) -> int:
    """Return how many rows lie beyond each end. Of n + 1 similar rows, the last one falls between the k-th from either
    end with probability (n + 1 - 2 k) / (n + 1). Of s + 1 scenarios whose rows err alike, the last one falls between
    the others' ends with probability (s - 1) / (s + 1): by that factor fewer rows lie beyond."""
    part = (scenarios - 1) / (scenarios + 1) if scenarios else 1.0
    return max(int((1 - INSIDE) / 2 * (rows + 1) * part + 1e-9), 1) - 1


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of rows left out one by one, the number with an interval and the number inside it; and the ratios of the ends."""

    rows: int
    with_interval: int
    inside: int
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        if not self.with_interval:
            return f"none of {self.rows} rows has an interval"
        middle = sorted(self.ratios)[len(self.ratios) // 2]
        return (
            f"{self.inside} of {self.with_interval} rows left out lie inside ({self.inside / self.with_interval:.1%}), "
            f"{self.rows - self.with_interval} have no interval; median ratio of the ends {middle:.2f}"
        )


def coverage(rows: Sequence[Measured[C]], *, by_scenario: bool = False, alike: bool = False) -> Coverage:
    """Compare each row with the interval of all other rows, or of all other scenarios' rows, which is how an unmeasured
    framework is judged."""
    inside, ratios = 0, []
    for at, row in enumerate(rows):
        others = [*rows[:at], *rows[at + 1 :]]
        if by_scenario:
            others = [other for other in rows if other.scenario != row.scenario]
        found = interval(row.of, others, alike=alike)
        if found is not None:
            ratios.append(found.high / found.low)
            inside += found.low <= math.exp(row.log_ratio) <= found.high
    return Coverage(len(rows), len(ratios), inside, tuple(ratios))
