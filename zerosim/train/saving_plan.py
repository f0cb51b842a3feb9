"""A save in a plan: after the last planned step, in a program of its own.

The step is planned as without a save, so none of its figures can change. Then the same ranks run once more with as few
microbatches as the plan needs, and save: what is live between steps does not depend on the number of microbatches. No
memory is limited there: the report compares what a save takes with what a device, a host and the drives have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.parts.saving import GATHERED
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Phase
from zerosim.placement.layout import Layout
from zerosim.state.alike import in_gathered, in_shards
from zerosim.state.saver import NONE, Checkpoints, Saving
from zerosim.train.delayed import planned_steps
from zerosim.train.extend import Planned, shortest
from zerosim.train.memory import RankMemory
from zerosim.train.result import RunResult
from zerosim.train.saved import Saved

UNLIMITED: dict[str, Any] = {"capacity": None, "host_memory": None, "allocator": "exact", "allocator_conf": None}


def planned_saves(config: RunConfig) -> Checkpoints:
    """Return how a plan saves: once, after its last step, into no folder."""
    how, last = config.saving.way, planned_steps(config)
    return NONE if how is None else Checkpoints(None, Saving(how, lambda done: done == last))


def with_save(result: RunResult, planned: Callable[[RunConfig], Planned]) -> RunResult:
    """Return the result of a plan with what a save takes, if one was asked for. `planned` plans it."""
    config = result.config
    if (how := config.saving.way) is None:
        return result
    found = planned(shortest(config.replace(**UNLIMITED)))
    stands_for = found.result.stands_for
    peaks = {rank: _peak(found.result.memory[rank]) for rank in found.saves}
    saves = Saved(how, [found.saves[rank] for rank in stands_for], [peaks[rank] for rank in stands_for], stands_for)
    return replace(result, save=saves)


def without_save(config: RunConfig) -> RunConfig:
    """Return the configuration of a plan of the step alone."""
    return config if config.saving.way is None else config.replace(save_as=None, save_state=None)


def by_writing(config: RunConfig, layout: Layout, stands_for: Sequence[int]) -> list[int]:
    """Cut classes of ranks by what they write: all of their group in a gathered save, or shares of copies."""
    first = dict[object, int]()
    if config.saving.way == GATHERED:
        written = [in_gathered(layout, rank) for rank in range(len(stands_for))]
    else:
        written = in_shards(layout, by_tensor=OPTIMIZERS[config.optim.optimizer].cut in ("blocks", "sums"))
    return [first.setdefault(pair, rank) for rank, pair in enumerate(zip(stands_for, written, strict=True))]


def followers(config: RunConfig, layout: Layout, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks for which no other rank gathers."""
    return [rank for rank in ranks if config.saving.way != GATHERED or not in_gathered(layout, rank)]


def _peak(memory: RankMemory) -> int:
    return max((shot.total_bytes for at, shot in memory.moments.items() if at.phase == Phase.SAVE), default=0)
