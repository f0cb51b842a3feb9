"""The program of one rank, on real numbers and on shapes alike: build, place, train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.comm.runtime import Context
from zerosim.config import RunConfig
from zerosim.models.model import Model
from zerosim.nn import Group
from zerosim.optim.control import StepControl, StepReport
from zerosim.optim.optimizer import Optimizer
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import Pipeline, Schedule
from zerosim.parallel.stage import Stage
from zerosim.state.saver import NONE, Checkpoints
from zerosim.tensor.flat import Flat
from zerosim.train import engine
from zerosim.train.build import MakeStrategy, Whole, build_rank, place_rank
from zerosim.train.build_updater import build_updater
from zerosim.train.next_step import NextStep
from zerosim.train.offload import loaded
from zerosim.train.repeated import Rehearsals

Progress = Callable[[int, int, float], None]
"""A callback progress(rank, step, loss) on the rank's own thread."""

Opened = Callable[[Context, Model, Strategy], None]
"""A callback that receives a rank's built objects, before they are placed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that are read before ranks start.

    steps           of the whole run
    micro_batches   a function of (ctx, model, step): one rank's host arrays (B, T + 1) of one step
    write           a function that writes the initial weights into a tensor-parallel member's share of a flat
    checkpoints     the saved step that the run goes on from, and the steps that it saves
    """

    steps: int
    micro_batches: Callable[[Context, Model, int], Sequence[Any]]
    write: Callable[[Flat, Group], None]
    checkpoints: Checkpoints = NONE


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a rank's training: the mean loss by step, on ranks that have it, and the steps' reports."""

    model: Model
    strategy: Strategy
    pipeline: Pipeline
    losses: list[float]
    reports: list[StepReport]


def train_rank(
    ctx: Context,
    config: RunConfig,
    inputs: Inputs,
    *,
    make_strategy: MakeStrategy | None = None,
    schedule: Schedule | None = None,
    optimizer: Optimizer | None = None,
    make_control: Callable[..., StepControl] = StepControl,
    progress: Progress | None = None,
    opened: Opened | None = None,
    whole: Whole | None = None,
    repeats: Rehearsals | None = None,
    alike: NextStep | None = None,
) -> Trained:
    """Train all steps of `config` on this rank; `whole` and `repeats`: see `build_rank`, `alike`: `engine.train`."""
    updater = build_updater(config, inputs.steps, make_control, optimizer)
    model, strategy, pipeline = build_rank(ctx, config, updater, make_strategy, schedule, whole=whole, repeats=repeats)
    if opened is not None:
        opened(ctx, model, strategy)
    place_rank(ctx, model, strategy, inputs.write, loaded(ctx, config, model))
    saver = inputs.checkpoints.begin(ctx.comm, strategy, model)
    losses: list[float] = []
    first = inputs.checkpoints.first
    batches = (inputs.micro_batches(ctx, model, step) for step in range(first, inputs.steps))
    steps = engine.train(model, batches, strategy, ctx.device, first, pipeline, alike)
    for done, micro_losses in enumerate(steps, first + 1):
        if micro_losses:  # losses arise on the last pipeline stage
            losses.append(sum(micro_losses) / len(micro_losses))
            if progress is not None:
                progress(ctx.rank, done - 1, losses[-1])
        saver.after(done)
    saver.settle()
    if isinstance(strategy, Stage):
        strategy.finish(inputs.steps)
    return Trained(model, strategy, pipeline, losses, updater.control.reports[first:])
