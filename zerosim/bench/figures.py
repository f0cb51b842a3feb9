"""Turn the rounds of a benchmark into figures beside their goals, as text and as JSON. This module measures nothing.

A figure compares two contestants that took turns, A B B A A B ..., in one process. Its value is the MEDIAN
of the ratios of single rounds: a slow phase of a shared machine slows both halves of a round.
Two copies of one contestant differed by 1.0 % this way (standard deviation over six tries of 21
rounds on a shared machine with two cores), and by 2.1 % as a ratio of minima. The spread beside a figure is the
middle half of the rounds. If a contestant needs both cores, its value is the ratio of minima instead: other
programs then disturb the measurement, and the least time is the undisturbed one.

Flops are the recorded flops of the run's kernels, of all ranks together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import quantiles
from typing import Any

from zerosim.bench.contest import Rounds
from zerosim.config.presets.hardware import Hardware
from zerosim.device.work import EAGER_PARTS, MATMULS

PRODUCTS = MATMULS | {name for name in EAGER_PARTS if name.startswith("attention_") and name != "attention_dropout"}
"""Kernels whose recorded flops are matrix products and nothing else."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `value` is a ratio ('x'), seconds ('s'), or what its unit says (on GPUs 'ms', 'TFLOP/s', '%');
    None means not measured, and `note` says why.

    `goal` is an upper limit; `low` and `high` are the spread, and `seconds` is the least time of
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
        return asdict(self) | {"verdict": self.verdict or None, "seconds": dict(self.seconds or {})}


def of_rounds(
    model: str,
    name: str,
    values: Sequence[float],
    unit: str,
    goal: float | None = None,
    seconds: Mapping[str, float] | None = None,
    note: str = "",
) -> Figure:
    """Return the median of one value per round, with the middle half of the values; a single value stands for
    itself."""
    low = middle = high = values[0]
    if len(values) > 1:
        low, middle, high = quantiles(values, n=4, method="inclusive")
    return Figure(model, name, middle, unit, goal, low, high, len(values), seconds, note)


def ratio(
    model: str,
    name: str,
    measured: Mapping[str, Rounds],
    over: str,
    under: str,
    goal: float | None = None,
    note: str = "",
    of_minima: bool = False,
) -> Figure:
    """Return the figure `over / under` of contestants timed in the same rounds; `note` explains a missing `under`."""
    if under not in measured:
        return Figure(model, name, None, goal=goal, note=note)
    above, below = measured[over].device_s, measured[under].device_s
    values = [a / b for a, b in zip(above, below, strict=True)]
    figure = of_rounds(model, name, values, "x", goal, {over: min(above), under: min(below)}, note)
    return replace(figure, value=min(above) / min(below)) if of_minima else figure


def difference(model: str, name: str, measured: Mapping[str, Rounds], more: str, less: str, goal: float) -> Figure:
    """Return the difference `more - less` in seconds, otherwise as `ratio`."""
    above, below = measured[more].device_s, measured[less].device_s
    values = [a - b for a, b in zip(above, below, strict=True)]
    return of_rounds(model, name, values, "s", goal, {more: min(above), less: min(below)})


def same_losses(ours: Sequence[float], theirs: Sequence[float], within: float) -> str:
    """Return '' if both computed the same first losses, else a warning that the figure compares different things."""
    gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return "" if gap < within else f"NOT the same computation: first losses differ by {gap:.2g}"


def product_flops(flops: Mapping[str, int]) -> int:
    return sum(count for name, count in flops.items() if name in PRODUCTS)


def step_time(model: str, name: str, rounds: Rounds) -> Figure:
    """Return the milliseconds of one step between device events, beside the least value of those and of the host's
    clock."""
    seconds = {"device": min(rounds.device_s), "host": min(rounds.host_s)}
    return of_rounds(model, name, [1e3 * s for s in rounds.device_s], "ms", seconds=seconds)


def speed(model: str, name: str, rounds: Rounds) -> Figure:
    """Return TFLOP/s over the whole step: all its recorded flops divided by its seconds."""
    total, products = sum(rounds.flops.values()), product_flops(rounds.flops)
    note = f"{total / 1e12:.4g} TFLOP a step, {100 * products / max(1, total):.1f} % of it in matrix products"
    return of_rounds(model, name, [total / s / 1e12 for s in rounds.device_s], "TFLOP/s", note=note)


def share_of_peak(model: str, name: str, rounds: Rounds, hardware: Hardware | None, gpu: str | None) -> Figure:
    """Return the flops of the step's matrix products per second, as a share of the device's published dense 16-bit
    peak."""
    if hardware is None:
        return Figure(model, name, None, "%", note=f"no published peak is known here for {gpu}")
    products = product_flops(rounds.flops)
    note = f"{hardware.name}: {hardware.peak_flops / 1e12:g} TFLOP/s dense"
    return of_rounds(model, name, [100 * products / s / hardware.peak_flops for s in rounds.device_s], "%", note=note)


def share_of_square(model: str, name: str, rounds: Rounds, square: Rounds) -> Figure:
    """Return the same rate as a share of a large square product's rate in the same round."""
    ours, bare = product_flops(rounds.flops), sum(square.flops.values())
    shares = [100 * (ours / s) / (bare / t) for s, t in zip(rounds.device_s, square.device_s, strict=True)]
    return of_rounds(model, name, shares, "%")


HEADER = ("model", "what", "measured", "goal", "", "spread", "rounds", "least times")


def table(figures: Sequence[Figure]) -> str:
    """Return aligned lines, one per figure."""
    rows = [HEADER, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(figure: Figure) -> tuple[str, ...]:
    goal = "" if figure.goal is None else f"<= {figure.goal:g} {figure.unit}"
    if figure.value is None:
        return figure.model, figure.name, "-", goal, "", "", "", figure.note
    times = ", ".join(f"{name} {_time(seconds)}" for name, seconds in (figure.seconds or {}).items())
    return (
        figure.model,
        figure.name,
        f"{figure.value:.3f} {figure.unit}",
        goal,
        figure.verdict,
        f"{figure.low:.3f} .. {figure.high:.3f}",
        str(figure.rounds),
        "; ".join(part for part in (times, figure.note) if part),
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def summary(figures: Sequence[Figure]) -> str:
    """Return one line: the number of goals met, and the names of those missed."""
    missed = [f"{figure.model} {figure.name}".strip() for figure in figures if figure.verdict == "missed"]
    met = sum(figure.verdict == "met" for figure in figures)
    text = f"{met} of {met + len(missed)} goals met"
    return text + (f"; missed: {', '.join(missed)}" if missed else "")


def to_json(
    figures: Sequence[Figure], machine: Mapping[str, Any], method: str, groups: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return strict JSON. Raises on non-finite numbers. `groups`, if given, adds every single round."""
    for figure in figures:
        assert figure.value is None or math.isfinite(figure.value), figure
    body = {"schema": 1, "machine": dict(machine), "method": method, "figures": [f.to_dict() for f in figures]}
    if groups:
        body["groups"] = list(groups)
    return json.dumps(body, indent=2, allow_nan=False) + "\n"
