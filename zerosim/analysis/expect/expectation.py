"""What a table [expect] asks, as values: its figures, the runs that they are about, how they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis.expect.asked import Quantity
from zerosim.analysis.expect.errors import Ranking
from zerosim.analysis.expect.figures import Figure
from zerosim.analysis.expect.sweeps import Axis
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware


@dataclass(frozen=True, slots=True)
class BoldRule:
    """Bold is the smallest value of an axis whose figure is at most so many bytes."""

    smallest: str
    at_most: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One printed figure, the run that it is about, and what is right in its place where that is known."""

    labels: tuple[str, ...]
    config: RunConfig
    mp: int
    pipeline_stage: int | None
    printed: Figure
    instead: Figure | None
    bandwidth: int | None = None
    gpu: str = ""
    over: Cell | None = None  # the place that this one is divided by


@dataclass(frozen=True, slots=True)
class Expectation:
    """One table of printed figures, with everything that is needed to judge it.

    A figure is compared by its `rounding`, or where that is '' as a share of what is printed that it may be off
    (`within`), with the bytes of the causes that the count leaves out (`outside`) added to the count.

    `figures` says where the figures are from: the source 'printed' or 'measured' them, or they were 'computed' for the
    file with the source's rule. Where nothing is counted, `formula_only` says why.
    """

    path: str
    title: str
    source: str
    quantity: str | None
    formula: str | None
    figures: str
    formula_only: str
    beside: str | None
    why: str
    note: str
    rounding: str
    within: Fraction | int
    """A share of what is printed, or bytes."""
    mean_within: Fraction
    """The same of all figures' mean; 0 where it is not held."""
    ranking: Ranking | None
    outside: Mapping[str, int | Quantity]
    bold: BoldRule | None
    counted_on: str
    at: str
    memory: int | Hardware
    calculator: str
    is_modelled: bool  # what is compared is the clock's, and no count
    is_list: bool  # rows that no grid spans; the axes are their columns
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
