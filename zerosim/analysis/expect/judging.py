"""Compare a source's printed figures with the counts and the closed form.

A number agrees if it prints the same: rounded by the source's own rule, to the digits of the printed
figure. If a file says that its source is wrong (`instead`), the number must equal the corrected figure and
must differ from the printed one, so that neither claim can become outdated. A measured figure agrees if
the count, plus the causes that it leaves out, is near enough (`within`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerosim.analysis.expect.asked import Asked, Quantity, Runs, outside_bytes
from zerosim.analysis.expect.closed_forms import FORMULAS
from zerosim.analysis.expect.counts import COUNTS
from zerosim.analysis.expect.errors import Errors, Ranking, correlations, errors_of
from zerosim.analysis.expect.expectation import Cell, Expectation
from zerosim.analysis.expect.figures import Figure, naming, printed_like, show_difference, within_text
from zerosim.analysis.expect.sweeps import MP, describe
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware
from zerosim.errors import InputError
from zerosim.units import format_bytes


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """One printed figure beside its exact numbers (in base units: bytes, parameters, multiples of Ψ)."""

    labels: tuple[str, ...]
    printed: Figure
    instead: Figure | None
    counted: Fraction | None
    formula: Fraction | None
    beside: Fraction | None
    outside: Mapping[str, Fraction]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def judged(self) -> Fraction:
        """The count with the causes outside it or, if no count is judged, the formula."""
        value = self.formula if self.counted is None else self.counted
        assert value is not None  # reading.py demands one
        return value + sum(self.outside.values())

    @property
    def difference(self) -> Fraction:
        """The judged number minus the printed one, in the figure's unit."""
        return self.printed.measured(self.judged) - self.printed.value

    @property
    def share_off(self) -> Fraction:
        """The difference as a share of the printed figure; 0 if that is 0."""
        return self.difference / self.printed.value if self.printed.value else Fraction(0)


@dataclass(frozen=True, slots=True)
class Judged:
    """One table of figures with its verdicts."""

    expectation: Expectation
    cells: tuple[JudgedCell, ...]

    @property
    def passed(self) -> bool:
        return not self.num_failed

    @property
    def num_failed(self) -> int:
        return sum(not cell.passed for cell in self.cells) + len(self.failures)

    @property
    def errors(self) -> Errors:
        """The errors of all figures."""
        return errors_of([float(cell.share_off) for cell in self.cells])

    @property
    def ranks(self) -> list[float]:
        """The correlation of layouts by group; empty if the table does not ask for it."""
        ranking = self.expectation.ranking
        return [] if ranking is None else list(correlations(_grouped(self, ranking)).values())

    @property
    def failures(self) -> tuple[str, ...]:
        """The failures of all figures together."""
        found, allowed, ranking = [], self.expectation.mean_within, self.expectation.ranking
        if allowed and self.errors.mean_absolute > allowed:
            found.append(f"{self.errors}: the mean is more than {within_text(allowed)}")
        if ranking is not None and sum(rank > ranking.above for rank in self.ranks) < ranking.groups:
            ranks = ", ".join(f"{rank:.2f}" for rank in sorted(self.ranks))
            found.append(
                f"rank correlations {ranks}: expected more than {ranking.above:g} in {ranking.groups} groups at least"
            )
        return tuple(found)

    @property
    def worst(self) -> Fraction:
        """The largest error of a figure, as a share of it."""
        return max(abs(cell.share_off) for cell in self.cells)

    @property
    def num_bold(self) -> int:
        return sum(cell.printed.is_bold for cell in self.cells)


def judge(expectation: Expectation, runs: Runs) -> Judged:
    """Count, put numbers into formulas, compare. Raises: InputError, naming the file and the cell; and the errors of
    runs."""
    counted = _read(expectation, expectation.quantity, COUNTS, runs)
    formula = _read(expectation, expectation.formula, FORMULAS, runs)
    beside = _read(expectation, expectation.beside, COUNTS, runs)
    bold = _bold_failures(expectation, formula if expectation.quantity is None else counted)
    cells = []
    for cell, count, closed, shown in zip(expectation.cells, counted, formula, beside, strict=True):
        outside = _outside(expectation, cell, runs)
        failures = [bold.get(cell.labels)]
        for what, value in (("formula", closed), ("counted", count)):
            if value is not None and expectation.rounding:
                failures.insert(0, _misprinted(expectation, cell, what, value))
            elif value is not None:
                failures.insert(0, _far_off(expectation, cell, what, value, sum(outside.values(), Fraction(0))))
        found = tuple(failure for failure in failures if failure is not None)
        cells.append(JudgedCell(cell.labels, cell.printed, cell.instead, count, closed, shown, outside, found))
    return Judged(expectation, tuple(cells))


def _grouped(judged: Judged, ranking: Ranking) -> list[tuple[tuple[str, ...], float, float]]:
    """Return the group, the measured and the modelled value of each row."""
    names = [axis.name for axis in judged.expectation.axes]
    at = [names.index(name) for name in ranking.same]
    rows = []
    for cell in judged.cells:
        said = cell.printed.measured(cell.judged)
        rows.append((tuple(cell.labels[i] for i in at), float(cell.printed.value), float(said)))
    return rows


def _read(
    expectation: Expectation, name: str | None, known: Mapping[str, Quantity], runs: Runs
) -> list[Fraction] | list[None]:
    """Return a quantity's exact numbers, by cell."""
    if name is None:
        return [None] * len(expectation.cells)
    e, values = expectation, []
    for cell in e.cells:
        with naming(f"{f'scenario {e.path}: expect {_name(e, cell)}'.rstrip()}: "):
            value = known[name].read(_asked(e, cell, runs))
            if value is None:
                raise InputError(f'{e.calculator} has no answer here; write "-" in printed')
            if cell.spared_from is not None:
                value = known[name](replace(_asked(e, cell, runs), config=cell.spared_from)) - value
            if cell.over is not None:
                base = known[name].read(_asked(e, cell.over, runs))
                if not base:
                    raise InputError(f"over {describe(e.axes, cell.over.labels)}: cannot divide by {base}")
                value = Fraction(value) / Fraction(base)
            values.append(Fraction(value))
    return values


def _asked(e: Expectation, cell: Cell, runs: Runs) -> Asked:
    memory = e.memory if isinstance(e.memory, int) else _left_of(e.memory, cell.config)
    place = cell.config, runs, e.counted_on, cell.mp, cell.pipeline_stage
    return Asked(*place, e.at, memory, e.calculator, cell.gpu, cell.bandwidth)


def _left_of(device: Hardware, config: RunConfig) -> int:
    """Return a device's memory minus the memory outside the program."""
    return device.memory_bytes - outside_bytes(device, config)


def _outside(expectation: Expectation, cell: Cell, runs: Runs) -> dict[str, Fraction]:
    """Return bytes by cause."""
    asked = _asked(expectation, cell, runs)
    return {
        cause: Fraction(each if isinstance(each, int) else each.read(asked) or 0)
        for cause, each in expectation.outside.items()
    }


def _far_off(expectation: Expectation, cell: Cell, what: str, value: Fraction, outside: Fraction) -> str | None:
    """Return the failure of one number beside a measured figure, or None."""
    printed = cell.printed
    off = printed.measured(value + outside) - printed.value
    within = expectation.within
    below = above = within if isinstance(within, int) else within * printed.value
    if not isinstance(within, int) and within >= 1:  # otherwise no number would be too small
        below = printed.value - printed.value / (1 + within)
    if -below <= off <= above:
        return None
    beside = f" and {printed.in_unit(outside)} outside of it" if outside else ""
    difference = f"{show_difference(off)} {printed.unit}".rstrip()
    return (
        f"measured {printed.with_unit}, {what} {printed.in_unit(value)}{beside}, difference {difference} "
        f"(more than {within_text(within)})"
    )


def _misprinted(expectation: Expectation, cell: Cell, what: str, value: Fraction) -> str | None:
    """Return the failure of one number beside a rounded figure, or None."""
    printed, right = cell.printed, cell.instead or cell.printed
    if cell.instead is not None and _rounded(expectation, cell, printed, value) == printed.digits:
        return f"{what} {printed.in_unit(value)} equals the figure that is {expectation.figures}; leave instead out"
    rounded = _rounded(expectation, cell, right, value)
    if rounded == right.digits:
        return None
    against = expectation.figures if cell.instead is None else f"{expectation.figures} {printed.with_unit}, instead"
    if right.is_verdict:
        return f"{against} {right.text}, {what} {right.in_unit(value)}"
    difference = show_difference(right.measured(value) - right.value)
    unit = f" {right.unit}" if right.unit else ""
    return (
        f"{against} {right.with_unit}, {what} {right.in_unit(value)}, difference {difference}{unit} "
        f"({expectation.rounding} gives {rounded})"
    )


def _rounded(expectation: Expectation, cell: Cell, figure: Figure, value: Fraction) -> str:
    """Return the number as the source would print it."""
    rounding = expectation.rounding
    if rounding == "multiples-of-first-row":
        first = _first_row(expectation, cell)
        value = cell.mp * Fraction(printed_like(first.measured(value / cell.mp), first.digits, "half-up")) * first.scale
        rounding = "half-up"
    return printed_like(figure.measured(value), figure.digits, rounding)


def _first_row(expectation: Expectation, cell: Cell) -> Figure:
    """Return the figure above a cell in the row of the smallest mp; a number there is its own, divided by mp."""
    for other in expectation.cells:
        if other.mp == 1 and other.labels[1:] == cell.labels[1:]:
            return other.printed
    raise InputError(
        f"scenario {expectation.path}: rounding {expectation.rounding!r}: {MP} = 1 has no figure "
        f"above {_name(expectation, cell)}"
    )


def _bold_failures(expectation: Expectation, values: Sequence[Fraction | None]) -> dict[tuple[str, ...], str]:
    """Return the cells, by labels, whose bold type contradicts the rule."""
    rule, found = expectation.bold, dict[tuple[str, ...], str]()
    if rule is None:
        return found
    axis = [axis.name for axis in expectation.axes].index(rule.smallest)
    smallest_of: dict[tuple[str, ...], int] = {}  # by column
    for cell, value in zip(expectation.cells, values, strict=True):
        column, at = cell.labels[:axis] + cell.labels[axis + 1 :], int(cell.labels[axis])
        if value is not None and value <= rule.at_most:
            smallest_of[column] = min(smallest_of.get(column, at), at)
    for cell, value in zip(expectation.cells, values, strict=True):
        smallest = smallest_of.get(cell.labels[:axis] + cell.labels[axis + 1 :])
        should = smallest == int(cell.labels[axis])
        if should == cell.printed.is_bold or value is None:
            continue
        by_rule = "this one is" if should else "none is" if smallest is None else f"{rule.smallest}={smallest} is"
        how = "in bold" if cell.printed.is_bold else "not in bold"
        what = "formula" if expectation.quantity is None else "counted"
        found[cell.labels] = (
            f"printed {cell.printed.with_unit} {how}, {what} {cell.printed.in_unit(value)}: by the rule "
            f"(smallest {rule.smallest} with at most {format_bytes(rule.at_most)}) {by_rule}"
        )
    return found


def _name(expectation: Expectation, cell: Cell) -> str:
    place = describe(expectation.axes, cell.labels)
    return ", ".join(part for part in (repr(expectation.title) if expectation.title else "", place) if part)
