"""The CPU's update during the next step: an option of `grads.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.option import Exclusion
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.errors import InputError, wrong

_READ = "the CPU still reads a gradient while the next step writes new ones"
EXCLUSIONS = (
    Exclusion("persistent_grads", "delayed_update", _READ, (2, 3)),
    Exclusion("upcast_grads", "delayed_update", _READ),
    Exclusion("host_buffers", "delayed_update", _READ),
)


def steps_unlike(grads: GradMemory, optim: OptimConfig) -> int:
    """Return how many steps a plan has before the one like all later ones: the first creates states, or its update
    waits."""
    return int(optim.lazy_states or grads.late > 0)


def is_delayed(grads: GradMemory) -> bool:
    """Return whether an update runs beside a later step."""
    return grads.late > 0


def rules(grads: GradMemory, offload: OffloadConfig) -> Iterator[InputError]:
    """Yield a delay where the device takes the optimizer step."""
    if (late := grads.late) and not offload.cpu_steps:
        where = (
            f"offload {offload.where!r} leaves the optimizer step on the device"
            if offload.is_on
            else "the device takes the optimizer step"
        )
        yield wrong("delayed_update", f" {late}: {where}, so no update is delayed; choose offload optimizer=host")
