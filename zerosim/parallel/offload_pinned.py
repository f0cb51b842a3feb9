"""Pinned host memory: PyTorch rounds each request up to a power of two.

    DeepSpeed    one request for all of a rank's masters, one for its gradients, one for its staged parameters
    FSDP2        one for each of a unit

So 20 GB of one kind take 34.4 GB. Adam's states are pageable. The rest of a request is a buffer of its own here, which
lives to the end. Source: PyTorch 2.13, CachingHostAllocator.h (allocate: PowerOf2Ceil below pinned_max_round_threshold,
by default without a limit); DeepSpeed 0.19.8, stage_1_and_2.py (__init__).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.parts.offload import FSDP2, has_host_buffers
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import uint8
from zerosim.optim.updater import Updater
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.memories import HOST
from zerosim.tensor.flat import Flat


class PinnedUpdater(Updater):
    """Allocates, beside a rank's host buffers, what the power of two adds. `by_unit`: each unit's are requests of their
    own; `stages`: new parameters pass through a buffer of the host."""

    def __init__(self, *args: Any, by_unit: bool, stages: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.by_unit, self.stages = by_unit, stages
        self._asked: dict[str, int] = {}  # bytes by request
        self._rests: dict[str, Buffer] = {}

    def allocate(self, flat: Flat) -> None:
        super().allocate(flat)
        pinned = {"master": flat.master, "gradient": flat.collector.lasting, "parameter": flat.param_shard}
        for name, buffer in pinned.items():
            if buffer is not None and buffer.memory == HOST:
                self._pin(name, flat, buffer.nbytes)
        if self.stages:
            self._pin("staging", flat, flat.own.size * flat.dtype.itemsize)

    def _pin(self, name: str, flat: Flat, nbytes: int) -> None:
        key = f"{name} {flat.name}" if self.by_unit else name
        asked = self._asked[key] = self._asked.get(key, 0) + nbytes
        self._rests.pop(key, None)
        if rest := (1 << (asked - 1).bit_length()) - asked:
            self._rests[key] = flat.device.alloc((rest,), uint8, Kind.TEMP, memory=HOST)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the power of two."""
    if not config.offload.pin_memory:
        return made
    stages = has_host_buffers(config.grads, config.offload, config.precision)
    return made._replace(updater=partial(PinnedUpdater, by_unit=config.offload.policy == FSDP2, stages=stages))
