"""Out of memory: the cheapest change that would fit, found by running it.

Tried in the order of what they cost: a higher stage (nothing but traffic), a smaller micro-batch
with more accumulation (the same global batch, thinner matrices), both, more ranks (more devices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zerosim.scenario import RunConfig
from zerosim.units import format_bytes

MOST_RANKS = 64
Trial = Callable[[RunConfig], int | None]
"""One step of a configuration under its capacity: the highest peak over ranks, None when it runs out of memory."""


def cheapest_fit(config: RunConfig, trial: Trial) -> str | None:
    """The first change that fits, as flags and the peak it was measured with; None when none tried does."""
    for changed, flags in changes(config):
        peak = trial(changed)
        if peak is not None:
            return f"{flags} would fit: its peak is {format_bytes(peak)} of {format_bytes(config.capacity or 0)}"
    return None


def changes(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Configurations of the same model and the flags that lead there, the cheapest first."""
    for stage in range(config.stage + 1, 4):
        yield config.replace(stage=stage), f"--stage {stage}"
    for changed, flags in _smaller(config):
        yield changed, flags
    full = config.replace(stage=3)
    if config.stage < 3:
        for changed, flags in _smaller(full):
            yield changed, f"--stage 3 {flags}"
    ranks = 2 * config.ranks
    while ranks <= MOST_RANKS:
        accumulate = max(1, config.global_batch // ranks)
        flags = f"--stage 3 --micro-batch 1 --accumulate {accumulate} --ranks {ranks}"
        yield full.replace(micro_batch=1, accumulate=accumulate, ranks=ranks), flags
        ranks *= 2


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Fewer rows at a time and as much more accumulation: every divisor of the micro-batch, largest first."""
    for rows in range(config.micro_batch - 1, 0, -1):
        if config.micro_batch % rows == 0:
            accumulate = config.accumulate * config.micro_batch // rows
            flags = f"--micro-batch {rows} --accumulate {accumulate}"
            yield config.replace(micro_batch=rows, accumulate=accumulate), flags
