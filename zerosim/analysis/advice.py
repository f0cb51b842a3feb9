"""Run a configuration. If its device is too small, also say what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from zerosim.analysis.candidate import candidate
from zerosim.analysis.cheapest import cheapest_fit
from zerosim.config import RunConfig
from zerosim.errors import OutOfMemory
from zerosim.optim.optimizer import Optimizer
from zerosim.placement.memories import DEVICE
from zerosim.train import run as training
from zerosim.train.plan import peak_within
from zerosim.train.rank import Progress
from zerosim.train.result import RunResult


@contextmanager
def advised(config: RunConfig) -> Iterator[None]:
    """Add the cheapest change that fits to an OutOfMemory of this run that is raised inside the block."""
    try:
        yield
    except OutOfMemory as error:
        capacity = config.memory.capacity
        if error.memory == DEVICE and capacity is not None:  # the search tries only the device's memory
            steps = config.optim.steps or training.DEFAULT_STEPS
            asked = candidate(config, capacity=None, steps=steps).sure()
            error.advice = cheapest_fit(asked, capacity, peak_within, given=config.given) or ""
        raise


def run(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    keep_events: bool = False,
    optimizer: Optimizer | None = None,
) -> RunResult:
    """Train as `config` says.

    `keep_events` keeps every rank's whole record in the result (memory grows with steps). An `optimizer` of your own,
    such as a subclass of `zerosim.optim.elementwise.Elementwise`, replaces the configuration's.

    Raises: InputError (bad input, before any rank starts), OutOfMemory (with the cheapest change
    that fits, found by trying), RankFailed.
    """
    # A plan does not count a custom optimizer's states.
    with advised(config) if optimizer is None else nullcontext():
        return training.run(config, progress=progress, keep_events=keep_events, optimizer=optimizer)
