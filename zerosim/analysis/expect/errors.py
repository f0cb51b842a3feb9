"""Summarise how far a list of modelled figures is from the measured ones.

An error is modelled / measured - 1. A search needs the ranking of layouts: among rows that differ only in the
layout of the run, Spearman's correlation of measured and modelled values (equal values share their mean rank).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

FEWEST_RANKED = 4
"""The fewest rows of a group: three rows are in perfect order by chance in one case of six."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A demand: among rows with equal values in the columns `same`, the correlation is `above` in at least `groups`
    groups."""

    same: tuple[str, ...]
    above: float
    groups: int


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a list as shares: the median, the mean of absolute values, the least and the greatest; and their
    number."""

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
    """Summarise at least one error."""
    return Errors(median(shares), fmean(map(abs, shares)), min(shares), max(shares), len(shares))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of two lists' ranks; 0 if all values of one list are equal."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    alone = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return float(both / alone**0.5) if alone else 0.0


def correlations(rows: Sequence[tuple[Hashable, float, float]]) -> dict[Hashable, float]:
    """Return each group's correlation, from rows (group, measured, modelled), for groups of at least
    `FEWEST_RANKED`."""
    groups: dict[Hashable, list[tuple[float, float]]] = {}
    for group, measured, modelled in rows:
        groups.setdefault(group, []).append((measured, modelled))
    ranked = {name: pairs for name, pairs in groups.items() if len(pairs) >= FEWEST_RANKED}
    return {name: spearman(*zip(*pairs, strict=True)) for name, pairs in ranked.items()}


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share their mean rank."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]
