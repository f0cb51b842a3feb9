"""What a benchmark says: figures beside their goals, as text and as JSON. Measures nothing.

A figure compares two contestants that took turns, A B B A A B ..., in one process. Its value is the MEDIAN
of the ratios of single rounds: what slows a shared machine for a while slows both halves of a round.
Two copies of one contestant came out 1.0 % apart so (standard deviation over six tries of 21
rounds on a shared machine with two cores), 2.1 % apart as a ratio of minima. The spread beside it is the
middle half of the rounds. Only where a contestant needs both cores is its value the ratio of minima: other
programs then change what is measured, and its least time is the one in which they let it be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

METHOD = (
    "contestants take turns in one process after a warm-up; a figure is the median of the ratios of single rounds "
    "(of two cores: the ratio of minima), the spread is their middle half"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `value` is a ratio ('x'), seconds ('s'), or what its unit says (on GPUs 'ms', 'TFLOP/s', '%');
    None: it could not be measured, `note` says why.

    `goal` is the most that it should be; `low` and `high` are the spread, `seconds` the least time of
    each contestant.
    """

    model: str
    name: str
    value: float | None
    unit: str = "x"
    goal: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    seconds: Mapping[str, float] | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """'met' or 'missed' by comparison; '' without a goal or a figure."""
        if self.value is None or self.goal is None:
            return ""
        return "met" if self.value <= self.goal else "missed"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "verdict": self.verdict or None,
            "low": self.low,
            "high": self.high,
            "rounds": self.rounds,
            "seconds": dict(self.seconds or {}),
            "note": self.note,
        }


def ratio(
    model: str,
    name: str,
    measured: Mapping[str, Sequence[float]],
    over: str,
    under: str,
    goal: float | None = None,
    note: str = "",
    of_minima: bool = False,
) -> Figure:
    """The figure `over / under` of contestants timed in the same rounds: seconds by contestant, one per round."""
    above, below = measured[over], measured[under]
    low, middle, high = quartiles([a / b for a, b in zip(above, below, strict=True)])
    seconds = {over: min(above), under: min(below)}
    value = min(above) / min(below) if of_minima else middle
    return Figure(model, name, value, "x", goal, low, high, len(above), seconds, note)


def difference(
    model: str, name: str, measured: Mapping[str, Sequence[float]], more: str, less: str, goal: float
) -> Figure:
    """As `ratio`, in seconds: `more - less`."""
    above, below = measured[more], measured[less]
    low, middle, high = quartiles([a - b for a, b in zip(above, below, strict=True)])
    seconds = {more: min(above), less: min(below)}
    return Figure(model, name, middle, "s", goal, low, high, len(above), seconds)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third; of one value, that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    first, second, third = quantiles(values, n=4, method="inclusive")
    return first, second, third


HEADER = ("model", "what", "measured", "goal", "", "spread", "rounds", "least times")


def table(figures: Sequence[Figure]) -> str:
    """Aligned lines, one per figure."""
    rows = [HEADER, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(figure: Figure) -> tuple[str, ...]:
    if figure.value is None or figure.low is None or figure.high is None:
        return figure.model, figure.name, "-", _goal(figure), "", "", "", figure.note
    times = ", ".join(f"{name} {_time(seconds)}" for name, seconds in (figure.seconds or {}).items())
    return (
        figure.model,
        figure.name,
        _number(figure.value, figure.unit),
        _goal(figure),
        figure.verdict,
        f"{figure.low:.3f} .. {figure.high:.3f}",
        str(figure.rounds),
        "; ".join(part for part in (times, figure.note) if part),
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.3f} {unit}"


def _goal(figure: Figure) -> str:
    return "" if figure.goal is None else f"<= {figure.goal:g} {figure.unit}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def summary(figures: Sequence[Figure]) -> str:
    """One line: how many goals were met, and which were not."""
    missed = [f"{figure.model} {figure.name}".strip() for figure in figures if figure.verdict == "missed"]
    met = sum(figure.verdict == "met" for figure in figures)
    text = f"{met} of {met + len(missed)} goals met"
    return text + (f"; missed: {', '.join(missed)}" if missed else "")


def to_json(
    figures: Sequence[Figure],
    machine: Mapping[str, Any],
    method: str = METHOD,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Strict JSON: non-finite numbers do not occur, or this raises ValueError. `groups`: every single round."""
    for figure in figures:
        assert figure.value is None or math.isfinite(figure.value), figure
    body = {"schema": 1, "machine": dict(machine), "method": method, "figures": [f.to_dict() for f in figures]}
    if groups is not None:
        body["groups"] = list(groups)
    return json.dumps(body, indent=2, allow_nan=False) + "\n"
