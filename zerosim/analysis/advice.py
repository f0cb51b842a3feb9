"""Run a configuration. If its device is too small, also say what would fit."""

from __future__ import annotations

from zerosim.analysis.search import cheapest_fit
from zerosim.config import RunConfig
from zerosim.errors import OutOfMemory
from zerosim.optim.optimizer import Optimizer
from zerosim.placement.memories import DEVICE
from zerosim.train import run as training
from zerosim.train.plan import peak_within
from zerosim.train.rank import Progress
from zerosim.train.result import RunResult


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
    try:
        return training.run(config, progress=progress, keep_events=keep_events, optimizer=optimizer)
    except OutOfMemory as error:
        # A plan does not count a custom optimizer's states, and the search tries only the device's memory.
        if optimizer is not None or error.memory != DEVICE or config.memory.capacity is None:
            raise
        asked = config.replace(capacity=None, steps=config.optim.steps or training.DEFAULT_STEPS)
        error.advice = cheapest_fit(asked, config.memory.capacity, peak_within)
        raise
