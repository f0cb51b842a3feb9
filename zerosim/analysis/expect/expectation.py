"""A table [expect] as values: its figures, their runs, and how to judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.analysis.expect.asked import Quantity
from zerosim.analysis.expect.errors import Ranking
from zerosim.analysis.expect.figures import Figure
from zerosim.analysis.expect.sweeps import Axis
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware


@dataclass(frozen=True, slots=True)
class BoldRule:
    """The rule for bold type: the smallest value of an axis whose figure is at most that many bytes."""

    smallest: str
    at_most: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One printed figure, its run, and the right figure where the source is known to be wrong."""

    labels: tuple[str, ...]
    config: RunConfig
    mp: int
    pipeline_stage: int | None
    printed: Figure
    instead: Figure | None
    bandwidth: int | None = None
    gpu: str = ""
    over: Cell | None = None  # the cell that this one is divided by
    spared_from: RunConfig | None = None  # the run that needs more than this one, by the figure


@dataclass(frozen=True, slots=True)
class Expectation:
    """One table of printed figures, with everything needed to judge it.

    A figure is compared by its `rounding`. If that is '', the count may differ by a share of the printed figure
    (`within`), after the bytes of causes that the count leaves out (`outside`) were added.

    `figures` says where the figures come from: the source 'printed' or 'measured' them, or they were 'computed' for the
    file with the source's rule. If nothing is counted, `formula_only` says why.
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
    """A share of the printed figure, or bytes."""
    mean_within: Fraction
    """The same for the mean of all figures; 0 if there is no demand."""
    ranking: Ranking | None
    outside: Mapping[str, int | Quantity]
    spared_from: Mapping[str, Any]
    bold: BoldRule | None
    counted_on: str
    at: str
    memory: int | Hardware
    calculator: str
    is_modelled: bool  # the compared value is the clock's, not a count
    is_list: bool  # rows without a grid; the axes are their columns
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
