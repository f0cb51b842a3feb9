"""Paged optimizer states: an option of `memory.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.reduction import Reduction
from zerosim.config.parts.world import WorldConfig
from zerosim.errors import InputError, wrong
from zerosim.placement.memories import DEVICE


def moves_pages(memory: MemoryConfig) -> bool:
    """Return whether states may move: a device without a limit always has room."""
    return memory.paged_states and memory.capacity is not None


def rules(
    memory: MemoryConfig, offload: OffloadConfig, optim: OptimConfig, reduction: Reduction, world: WorldConfig
) -> Iterator[InputError]:
    """Yield where no states can be paged, or none may move."""
    if not memory.paged_states:
        return
    if optim.optimizer == "sgd" and not optim.momentum:
        yield wrong("paged_states", ": sgd without momentum has no states; choose adamw, or leave it out")
    if offload.memory_of("optimizer") != DEVICE:
        yield wrong(
            "paged_states", f": offload {offload.where!r} keeps all states off the device; leave one of them out"
        )
    if world.backend == "cuda":
        yield wrong("paged_states", ": backend cuda has no unified memory; choose numpy, or use zerosim plan")
    if reduction.compress == "onebit-adam":
        yield wrong("paged_states", ": compress 'onebit-adam' sends exp_avg during backward; leave one of them out")


WORDS = (("is_paged", "--paged-states"),)
