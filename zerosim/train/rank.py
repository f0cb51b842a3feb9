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
from zerosim.tensor.flat import Flat
from zerosim.train import engine
from zerosim.train.build import MakeStrategy, build_rank, place_rank
from zerosim.train.build_strategy import IsTrained, all_trained
from zerosim.train.build_updater import build_updater
from zerosim.train.repeated import Rehearsals

Progress = Callable[[int, int, float], None]
"""Called as progress(rank, step, loss) on the rank's own thread."""

Opened = Callable[[Context, Model, Strategy], None]
"""Is shown what a rank has built, before it is placed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read before ranks start.

    micro_batches   of one rank in one step, as (ctx, step): host arrays (B, T + 1)
    write           the weights to begin with, into what a member of a tensor-parallel group holds of a flat
    """

    steps: int
    micro_batches: Callable[[Context, int], Sequence[Any]]
    write: Callable[[Flat, Group], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank's training leaves: the mean loss by step where it comes out, and the steps' reports."""

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
    is_trained: IsTrained = all_trained,
    make_control: Callable[..., StepControl] = StepControl,
    progress: Progress | None = None,
    opened: Opened | None = None,
    repeats: Rehearsals | None = None,
) -> Trained:
    """All steps of `config` on this rank; `repeats`: see `build_rank`."""
    updater = build_updater(config, inputs.steps, make_control, optimizer)
    model, strategy, pipeline = build_rank(ctx, config, updater, make_strategy, schedule, is_trained, repeats=repeats)
    if opened is not None:
        opened(ctx, model, strategy)
    place_rank(ctx, model, strategy, inputs.write)
    losses: list[float] = []
    batches = (inputs.micro_batches(ctx, step) for step in range(inputs.steps))
    for micro_losses in engine.train(model, batches, strategy, ctx.device, pipeline=pipeline):
        if not micro_losses:  # they come out on the last stage
            continue
        losses.append(sum(micro_losses) / len(micro_losses))
        if progress is not None:
            progress(ctx.rank, len(losses) - 1, losses[-1])
    return Trained(model, strategy, pipeline, losses, updater.control.reports)
