"""The steps of a plan: one, or as many as a delayed update, states of the first step and paged states need."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.parts.delayed import steps_unlike
from zerosim.config.parts.paging import moves_pages
from zerosim.errors import wrong


def from_first(config: RunConfig) -> RunConfig:
    """Return the configuration of a plan: where no steps are given, updates are delayed from the first one on."""
    return config.replace(delayed_update=1) if config.grads.late and config.optim.steps is None else config


def check_timed(config: RunConfig) -> None:
    """Check that a plan has a step beside an update. Raises: InputError."""
    if config.grads.late == config.optim.steps == 1:
        raise wrong("steps", " 1: step 2 applies the delayed update of step 1; choose 2 steps, or leave it out")


def one_step(config: RunConfig) -> RunConfig:
    """Return the configuration for one step or, with delayed updates, for as many as a plan needs."""
    return config.replace(steps=None if config.grads.late else 1)


def timed_step(config: RunConfig) -> int:
    """Return the step of a plan that the clock times, from 0: the first or, with delayed updates, the first one beside
    an update, if the plan gets there. Paged states begin on the device, and states may be made in the first step: then
    the second is the first like later ones."""
    first = config.grads.late or max(steps_unlike(config.grads, config.optim), moves_pages(config.memory))
    return first if first < planned_steps(config) else 0


def planned_steps(config: RunConfig) -> int:
    """Return the number of steps of a plan."""
    return config.optim.steps or 1 + max(steps_unlike(config.grads, config.optim), moves_pages(config.memory))
