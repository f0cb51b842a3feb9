"""A run that, where a device is too small for it, also says what would fit."""

from __future__ import annotations

from zerosim.analysis.search import cheapest_fit
from zerosim.config import RunConfig
from zerosim.errors import OutOfMemory
from zerosim.train import run as training
from zerosim.train.plan import peak_within
from zerosim.train.rank import Progress
from zerosim.train.result import RunResult


def run(config: RunConfig, *, progress: Progress | None = None, keep_events: bool = False) -> RunResult:
    """Train as `config` says.

    `keep_events` keeps every rank's whole record in the result (memory grows with steps).

    Raises: InputError (bad input, before any rank starts), OutOfMemory (with the cheapest change
    that fits, found by trying), RankFailed.
    """
    try:
        return training.run(config, progress=progress, keep_events=keep_events)
    except OutOfMemory as error:
        assert config.memory.capacity is not None
        error.advice = cheapest_fit(config.replace(capacity=None), config.memory.capacity, peak_within)
        raise
