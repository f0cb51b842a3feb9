"""How sure a modelled step is: the interval that the clock's errors on measured steps give.

Others measured some hundreds of steps (scenarios/). For each of them `step_errors.toml` has how much longer it took
than the clock says, and its class: GPU, recipe, size, and whether the host decides. A modelled step is held against the
rows of its own class. A class of fewer than `FEWEST` rows is merged upwards, with one thing after the other left out:
the size, the exact GPU (then its generation), the recipe. Whether the host decides is never left out: there the error
is another one altogether. With fewer than `FEWEST` rows still, the step was never compared.

The interval lies between two measured ratios, so many from the ends that eight of ten further rows of the class would
lie inside if they were like these. It holds what the clock leaves out as well: stragglers, power, data loading. The
clock's own number need not lie in it, where all measured steps took longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zerosim.config import RunConfig
from zerosim.config.inputs import read_toml
from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.clock import StepTime

FILE = Path(__file__).parent / "step_errors.toml"
FEWEST = 8
INSIDE = 0.8
SIZES = ((2e9, "below 2B"), (20e9, "2B to 20B"), (math.inf, "above 20B"))


class StepClass(NamedTuple):
    """What steps have in common whose errors are alike; '' for what was left out."""

    gpu: str
    recipe: str
    size: str
    host_bound: bool


class MeasuredStep(NamedTuple):
    """A row that was measured: its scenario, its class, and ln(measured / modelled)."""

    scenario: str
    of: StepClass
    log_ratio: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Times a modelled step, where eight of ten measured ones lie; of how many rows, and of which class."""

    low: float
    high: float
    rows: int
    of: StepClass


def is_host_bound(time: StepTime) -> bool:
    """Whether compute waits for its host for a tenth of the step, and longer than for anything else."""
    return time.host > max(0.1 * time.seconds, time.bubble, *time.exposed.values())


def step_class(config: RunConfig, time: StepTime, gpu: str) -> StepClass:
    """Of a modelled step. Its size is that of a dense model with as many FLOPs a token, attention's included."""
    size = time.model_flops / (6 * config.global_batch * config.model.seq)
    name = next(name for most, name in SIZES if size < most)
    return StepClass(gpu, config.parallel.recipe, name, is_host_bound(time))


def step_interval(config: RunConfig, time: StepTime, cluster: Cluster) -> Interval | None:
    """Of a modelled step; None where no such step was measured, and on a machine that was (it has its own error). Where
    the host decides, none was measured with CUDA graphs."""
    if cluster.machine is not None or not time.model_flops or (config.clock.cuda_graphs and is_host_bound(time)):
        return None
    return interval(step_class(config, time, cluster.name), read_steps())


def overlaps(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two bands have a point in common: then they are not ranked."""
    return one[0] <= other[1] and other[0] <= one[1]


def merges(of: StepClass) -> tuple[StepClass, ...]:
    """A class, and those that it is merged into, in this order."""
    of_any_size = of._replace(size="")
    generation = of_any_size._replace(gpu=of.gpu.split("-")[0])
    return of, of_any_size, generation, generation._replace(recipe="")


def belongs(step: StepClass, of: StepClass) -> bool:
    """Whether a class is part of a merged one."""
    is_gpu = of.gpu in (step.gpu, step.gpu.split("-")[0])
    same = of.recipe in ("", step.recipe) and of.size in ("", step.size)
    return is_gpu and same and of.host_bound == step.host_bound


def interval(of: StepClass, steps: Sequence[MeasuredStep]) -> Interval | None:
    """Of a step of this class; None where too few were measured."""
    for merged in merges(of):
        ratios = sorted(step.log_ratio for step in steps if belongs(step.of, merged))
        if len(ratios) >= FEWEST:
            left = _left_outside(len(ratios))
            return Interval(math.exp(ratios[left]), math.exp(ratios[-1 - left]), len(ratios), merged)
    return None


def _left_outside(rows: int) -> int:
    """How many rows lie beyond each end. Of n + 1 rows alike, the last one falls between the k-th from either end with
    (n + 1 - 2 k) / (n + 1)."""
    return max(int((1 - INSIDE) / 2 * (rows + 1) + 1e-9), 1) - 1


@lru_cache
def read_steps() -> tuple[MeasuredStep, ...]:
    """Every row of `step_errors.toml`."""
    rows = read_toml(FILE, "measured steps")["rows"]
    return tuple(MeasuredStep(name, StepClass(*of), ratio) for name, *of, ratio in rows)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of rows that were left out one by one: how many have an interval and lie in it; the ratios of its ends."""

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


def coverage(steps: Sequence[MeasuredStep], *, by_scenario: bool = False) -> Coverage:
    """Each row against the interval of all others, or of the rows of all other scenarios: steps that nobody measured
    in such a framework."""
    inside, ratios = 0, []
    for at, step in enumerate(steps):
        others = [*steps[:at], *steps[at + 1 :]]
        if by_scenario:
            others = [other for other in steps if other.scenario != step.scenario]
        found = interval(step.of, others)
        if found is not None:
            ratios.append(found.high / found.low)
            inside += found.low <= math.exp(step.log_ratio) <= found.high
    return Coverage(len(steps), len(ratios), inside, tuple(ratios))
