"""How far a list of modelled figures is from what was measured, in a few numbers.

An error is modelled / measured - 1. The ranks of layouts are what a search wants: within rows that differ only in how a
run is laid out, Spearman's correlation of what was measured and what is modelled (equal values share their mean rank).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

FEWEST_RANKED = 4
"""Rows of a group: of three, chance alone puts a sixth in perfect order."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Within rows of the same values of the columns `same`, the correlation is `above` in at least `groups` groups."""

    same: tuple[str, ...]
    above: float
    groups: int


@dataclass(frozen=True, slots=True)
class Errors:
    """Of a list: the median, the mean of absolute ones, the least and the most, as shares; how many there are."""

    median: float
    mean_absolute: float
    least: float
    most: float
    rows: int

    def __str__(self) -> str:
        least, most = (f"{100 * error:+.0f}" for error in (self.least, self.most))
        middle = f"median {100 * self.median:+.1f} %, mean of absolute errors {100 * self.mean_absolute:.1f} %"
        return f"{middle}, from {least} to {most} %, of {self.rows} rows"


def errors_of(shares: Sequence[float]) -> Errors:
    """Of at least one error."""
    return Errors(median(shares), fmean(map(abs, shares)), min(shares), max(shares), len(shares))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of two lists' ranks; 0 where one of them is all equal."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    alone = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return float(both / alone**0.5) if alone else 0.0


def correlations(rows: Sequence[tuple[Hashable, float, float]]) -> dict[Hashable, float]:
    """By group that of its rows (group, measured, modelled), for groups of at least `FEWEST_RANKED`."""
    groups: dict[Hashable, list[tuple[float, float]]] = {}
    for group, measured, modelled in rows:
        groups.setdefault(group, []).append((measured, modelled))
    ranked = {name: pairs for name, pairs in groups.items() if len(pairs) >= FEWEST_RANKED}
    return {name: spearman(*zip(*pairs, strict=True)) for name, pairs in ranked.items()}


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share their mean."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]
