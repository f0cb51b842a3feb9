"""What an encoder with a decoder cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong

_INPUTS = ("partition_activations", "cpu_checkpointing", "offload_activations", "stash_window")


def rules(
    model: ModelConfig,
    memory: MemoryConfig,
    data: DataConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    mesh: MeshConfig,
    tuning: TuningConfig,
) -> Iterator[InputError]:
    """Yield what is wrong."""
    if not model.is_second:
        return
    own = f"an encoder with a decoder ({model.family})"
    if memory.attention == "flash":
        yield wrong("attention", f" 'flash': {own} trains a bias of its scores, and flash has none; choose eager")
    if data.sample is not None:
        yield wrong("sample", f" {data.sample!r}: {own} continues no text yet; leave it out")
    if OPTIMIZERS[optim.optimizer].estimates_every:
        yield wrong("optimizer", f" {optim.optimizer!r}: is not modelled with {own}; choose adam")
    if parallel.sequence_parallel:
        yield wrong("sequence_parallel", f": {own} has rows of two lengths; leave it out")
    if mesh.tp > 1 and tuning.is_on:
        yield wrong("tp", f" {mesh.tp!r}: {own} with frozen weights is not modelled; choose tp 1")
    for name in _INPUTS:
        if value := getattr(memory, name):
            said = "" if value is True else f" {value!r}"
            inputs = f"{own} has activations beside its blocks' inputs, which stay on the device; leave it out"
            yield wrong(name, f"{said}: {inputs}")
