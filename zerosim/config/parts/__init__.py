"""A run's configuration in parts, one file for each capability: its options, the rules for them, and exclusions.

A part checks its own fields. A rule that looks at other parts is a generator of errors, whose parameters are the parts
that it reads: a file imports those, and never the configuration as a whole, so no file here imports one that imports
it. A rule about two capabilities is in the later file's. `PARTS` and `CAPABILITIES` are the only tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, get_type_hints

from zerosim.config.option import Exclusion, Option, Part
from zerosim.config.parts import (
    buckets,
    clock,
    compression,
    data,
    delayed,
    gathering,
    grads,
    kept_inputs,
    memory,
    offload,
    optim,
    pipeline,
    reduction,
    tensor,
    tiles,
    tuning,
    world,
    zeropp,
)
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, by their names in `RunConfig`."""

    model: ModelConfig
    mesh: MeshConfig
    parallel: ParallelConfig
    reduction: reduction.Reduction
    gathering: gathering.Gathering
    grads: grads.GradMemory
    tuning: tuning.TuningConfig
    precision: PrecisionConfig
    optim: optim.OptimConfig
    data: data.DataConfig
    memory: memory.MemoryConfig
    offload: offload.OffloadConfig
    world: world.WorldConfig
    clock: clock.ClockConfig


PARTS: Mapping[str, type[Part]] = MappingProxyType(get_type_hints(Parts))
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {flat: option for kind in PARTS.values() for flat, option in kind.options().items()}
)
"""Every field of a run by its flat name."""


def _no_rules(_: Parts) -> Iterator[InputError]:
    yield from ()


class Capability(NamedTuple):
    """What one file says of its options together with others'."""

    rules: Callable[[Parts], Iterator[InputError]] = _no_rules
    exclusions: tuple[Exclusion, ...] = ()


CAPABILITIES = (
    Capability(lambda c: memory.rules(c.memory, c.model, c.parallel, c.world)),
    Capability(lambda c: tuning.rules(c.tuning, c.model)),
    Capability(lambda c: tiles.rules(c.gathering, c.model, c.mesh, c.tuning, c.optim)),
    Capability(lambda c: tensor.rules(c.mesh, c.model, c.parallel)),
    Capability(lambda c: kept_inputs.rules(c.memory, c.mesh)),
    Capability(lambda c: pipeline.rules(c.mesh, c.model, c.parallel, c.data, c.optim)),
    Capability(lambda c: optim.rules(c.optim, c.mesh, c.parallel, c.precision)),
    Capability(exclusions=reduction.EXCLUSIONS),
    Capability(
        lambda c: compression.rules(
            c.reduction, c.precision, c.mesh, c.parallel, c.optim, c.data.accumulate > 1 and c.grads.sync
        ),
        compression.EXCLUSIONS,
    ),
    Capability(lambda c: zeropp.rules(c.mesh, c.gathering, c.reduction, c.precision, c.tuning), zeropp.EXCLUSIONS),
    Capability(exclusions=buckets.EXCLUSIONS),
    Capability(exclusions=gathering.EXCLUSIONS),
    Capability(lambda c: delayed.rules(c.grads, c.offload), delayed.EXCLUSIONS),
    Capability(exclusions=grads.EXCLUSIONS),
    Capability(exclusions=memory.EXCLUSIONS),
    Capability(exclusions=grads.OF_STAGE_1),
    Capability(exclusions=clock.EXCLUSIONS),
    Capability(
        lambda c: offload.rules(c.offload, c.parallel, c.optim, c.precision, c.reduction, c.grads, c.world),
        offload.EXCLUSIONS,
    ),
    Capability(exclusions=pipeline.EXCLUSIONS),
    Capability(lambda c: world.rules(c.world, c.mesh)),
    Capability(lambda c: data.rules(c.data, c.model, c.optim)),
)
"""The order is that of errors: of several things that are wrong, the first row's is reported. Exclusions are applied
before any rule; a value that one sets aside no longer counts for the next. Some files have two rows."""
