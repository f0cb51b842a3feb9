"""The uncertainty of a modelled step: an interval from the clock's errors on measured steps.

Other people measured some hundreds of steps (scenarios/). For each of them `step_errors.toml` has the ratio of measured
to modelled time and the step's class: GPU, recipe, size, and whether the host is the bottleneck. A modelled step is
compared with the rows of its own class. A class of fewer than `FEWEST` rows is merged upwards, leaving out one property
after the other: the size, the exact GPU (then its generation), the recipe. Host-bound steps are never merged with
others, because their error is of another kind. If there are still fewer than `FEWEST` rows, the step counts as never
compared.

The interval lies between two measured ratios, chosen so that eight of ten further rows of the class would
lie inside if they were like these. It includes effects that the clock leaves out: stragglers, power, data loading. The
clock's own number may lie outside, if all measured steps took longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zerosim.analysis.capabilities import CAPABILITIES
from zerosim.config import RunConfig
from zerosim.config.inputs import read_toml
from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.clock import StepTime

FILE = Path(__file__).parent / "step_errors.toml"
FEWEST = 8
INSIDE = 0.8
SIZES = ((2e9, "below 2B"), (20e9, "2B to 20B"), (math.inf, "above 20B"))


class StepClass(NamedTuple):
    """The properties of steps with similar errors; '' for a property that was left out."""

    gpu: str
    recipe: str
    size: str
    host_bound: bool


class MeasuredStep(NamedTuple):
    """A measured row: its scenario, its class, and ln(measured / modelled)."""

    scenario: str
    of: StepClass
    log_ratio: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Factors of a modelled step between which eight of ten measured ones lie, with the number of rows and their
    class."""

    low: float
    high: float
    rows: int
    of: StepClass


def is_host_bound(time: StepTime) -> bool:
    """Return whether compute waits for its host for a tenth of the step, and longer than for anything else."""
    return time.host > max(0.1 * time.seconds, time.bubble, *time.exposed.values())


def step_class(config: RunConfig, time: StepTime, gpu: str) -> StepClass:
    """Return the class of a modelled step. Its size is that of a dense model with as many FLOPs per token, attention's
    included."""
    size = time.model_flops / (6 * config.tokens)
    name = next(name for most, name in SIZES if size < most)
    return StepClass(gpu, config.parallel.recipe, name, is_host_bound(time))


def step_interval(config: RunConfig, time: StepTime, cluster: Cluster) -> Interval | None:
    """Find a modelled step's interval; None if no such step was measured, and on a calibrated machine (which has its
    own error). No published step covers host-bound steps with CUDA graphs, frozen weights, traffic as codes, or
    offload."""
    unlike = not all(capability.measured(config) for capability in CAPABILITIES)
    unlike = unlike or (config.clock.cuda_graphs and is_host_bound(time))
    if unlike or cluster.machine is not None or not time.model_flops:
        return None
    return interval(step_class(config, time, cluster.name), read_steps())


def overlaps(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two bands overlap. Overlapping bands are not ranked."""
    return one[0] <= other[1] and other[0] <= one[1]


def merges(of: StepClass) -> tuple[StepClass, ...]:
    """Return a class and the classes that it is merged into, in order."""
    of_any_size = of._replace(size="")
    generation = of_any_size._replace(gpu=of.gpu.split("-")[0])
    return of, of_any_size, generation, generation._replace(recipe="")


def belongs(step: StepClass, of: StepClass) -> bool:
    """Return whether a class belongs to a merged one."""
    is_gpu = of.gpu in (step.gpu, step.gpu.split("-")[0])
    same = of.recipe in ("", step.recipe) and of.size in ("", step.size)
    return is_gpu and same and of.host_bound == step.host_bound


def interval(of: StepClass, steps: Sequence[MeasuredStep]) -> Interval | None:
    """Return the interval of a step of this class; None if too few were measured."""
    for merged in merges(of):
        ratios = sorted(step.log_ratio for step in steps if belongs(step.of, merged))
        if len(ratios) >= FEWEST:
            left = _left_outside(len(ratios))
            return Interval(math.exp(ratios[left]), math.exp(ratios[-1 - left]), len(ratios), merged)
    return None


def _left_outside(rows: int) -> int:
    """Return how many rows lie beyond each end. Of n + 1 similar rows, the last one falls between the k-th from either
    end with probability (n + 1 - 2 k) / (n + 1)."""
    return max(int((1 - INSIDE) / 2 * (rows + 1) + 1e-9), 1) - 1


@lru_cache
def read_steps() -> tuple[MeasuredStep, ...]:
    """Return every row of `step_errors.toml`."""
    rows = read_toml(FILE, "measured steps")["rows"]
    return tuple(MeasuredStep(name, StepClass(*of), ratio) for name, *of, ratio in rows)


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


def coverage(steps: Sequence[MeasuredStep], *, by_scenario: bool = False) -> Coverage:
    """Compare each row with the interval of all other rows, or of all other scenarios' rows, which is how an unmeasured
    framework is judged."""
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
