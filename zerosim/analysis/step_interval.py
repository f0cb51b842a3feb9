"""The uncertainty of a modelled step: an interval from the clock's errors on measured steps.

Other people measured some hundreds of steps (scenarios/). For each of them `step_errors.toml` has the ratio of measured
to modelled time and the step's class: GPU, recipe, size, whether the host is the bottleneck, whether adapters alone
are trained, whether ranks share rows, and whether the model has experts. Classes are merged upwards by leaving out one
property after the other: the size, the exact GPU (then its generation), the recipe. Host-bound steps are never merged
with others, because their error is of another kind. Nor are steps of adapters, of context parallelism, or of experts.
Few steps of experts were measured, so theirs are merged over all GPUs in the end. Rows of one scenario err alike, so
fewer are left outside where few scenarios measured a class. The interval includes effects that the clock leaves out:
stragglers, power, data loading.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zerosim.analysis.capabilities import CAPABILITIES, context
from zerosim.analysis.interval import Interval, Measured, interval
from zerosim.config import RunConfig
from zerosim.config.inputs import read_toml
from zerosim.config.parts.fp8 import is_in_8_bits
from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.clock import StepTime

FILE = Path(__file__).parent / "step_errors.toml"
SIZES = ((2e9, "below 2B"), (20e9, "2B to 20B"), (math.inf, "above 20B"))


class StepClass(NamedTuple):
    """The properties of steps with similar errors; '' for a property that was left out."""

    gpu: str
    recipe: str
    size: str
    host_bound: bool
    adapters: bool = False
    context: bool = False
    experts: bool = False

    def merges(self) -> tuple[StepClass, ...]:
        """Return this class and the classes that it is merged into, in order."""
        of_any_size = self._replace(size="")
        generation = of_any_size._replace(gpu=self.gpu.split("-")[0])
        of_any_recipe = generation._replace(recipe="")
        classes = self, of_any_size, generation, of_any_recipe
        return (*classes, of_any_recipe._replace(gpu="")) if self.experts else classes

    def belongs(self, of: StepClass) -> bool:
        """Return whether this class belongs to a merged one."""
        is_gpu = of.gpu in ("", self.gpu, self.gpu.split("-")[0])
        same = of.recipe in ("", self.recipe) and of.size in ("", self.size)
        return is_gpu and same and of[3:] == self[3:]


MeasuredStep = Measured[StepClass]


def is_host_bound(time: StepTime) -> bool:
    """Return whether compute waits for its host for a tenth of the step, and longer than for anything else."""
    return time.host > max(0.1 * time.seconds, time.bubble, *time.exposed.values())


def step_class(config: RunConfig, time: StepTime, gpu: str) -> StepClass:
    """Return the class of a modelled step. Its size is that of a dense model with as many FLOPs per token, attention's
    included."""
    size = time.model_flops / (6 * config.tokens)
    name = next(name for most, name in SIZES if size < most)
    host, adapters = is_host_bound(time), config.tuning.lora_rank > 0
    shared, experts = bool(context.way(config)), config.model.has_experts
    return StepClass(gpu, config.parallel.recipe, name, host, adapters, shared, experts)


def step_interval(config: RunConfig, time: StepTime, cluster: Cluster) -> Interval[StepClass] | None:
    """Find a modelled step's interval; None if no such step was measured, and on a calibrated machine (which has its
    own error). No published step covers host-bound steps with CUDA graphs, weights frozen without adapters, traffic as
    codes, offload, or products in 8 bits."""
    unlike = not all(capability.measured(config) for capability in CAPABILITIES)
    unlike = unlike or is_in_8_bits(config.fp8) or (config.clock.cuda_graphs and is_host_bound(time))
    if unlike or cluster.machine is not None or not time.model_flops:
        return None
    return interval(step_class(config, time, cluster.name), read_steps(), alike=True)


@lru_cache
def read_steps() -> tuple[MeasuredStep, ...]:
    """Return every row of `step_errors.toml`."""
    rows = read_toml(FILE, "measured steps")["rows"]
    return tuple(Measured(name, StepClass(*of), ratio) for name, *of, ratio in rows)
