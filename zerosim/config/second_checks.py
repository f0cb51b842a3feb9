"""Checks of a run whose model is an encoder with a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import wrong

if TYPE_CHECKING:
    from zerosim.config.run import RunConfig


def check_second(config: RunConfig) -> None:
    """Check what an encoder with a decoder cannot do. Raises: InputError."""
    memory, mesh, own = config.memory, config.mesh, f"an encoder with a decoder ({config.model.family})"
    inputs = f"{own} has activations beside its blocks' inputs, which stay on the device; leave it out"
    refused = {
        "attention": (
            memory.attention == "flash",
            f"{own} trains a bias of its scores, and flash has none; choose eager",
        ),
        "sample": (config.data.sample is not None, f"{own} continues no text yet; leave it out"),
        "optimizer": (OPTIMIZERS[config.optim.optimizer].estimates_every, f"is not modelled with {own}; choose adam"),
        "sequence_parallel": (config.parallel.sequence_parallel, f"{own} has rows of two lengths; leave it out"),
        "tp": (mesh.tp > 1 and config.tuning.is_on, f"{own} with frozen weights is not modelled; choose tp 1"),
        **{
            name: (getattr(memory, name), inputs)
            for name in ("partition_activations", "cpu_checkpointing", "offload_activations", "stash_window")
        },
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            value = config.value(name)
            raise wrong(name, f"{'' if value is True else f' {value!r}'}: {why}")
