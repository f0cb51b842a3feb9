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

from zerosim.config.option import Draft, Exclusion, Option, Part
from zerosim.config.parts import (
    buckets,
    clock,
    compression,
    context,
    data,
    delayed,
    documents,
    experts,
    fp8,
    gathering,
    grads,
    in_backward,
    kept_inputs,
    memory,
    mesh,
    model,
    mtp,
    offload,
    optim,
    paging,
    parallel,
    pipeline,
    precision,
    reduction,
    saving,
    second,
    tensor,
    tiles,
    tuning,
    tuning_rules,
    world,
    zeropp,
)
from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, by their names in `RunConfig`."""

    model: model.ModelConfig
    mesh: mesh.MeshConfig
    parallel: parallel.ParallelConfig
    reduction: reduction.Reduction
    gathering: gathering.Gathering
    grads: grads.GradMemory
    tuning: tuning.TuningConfig
    precision: precision.PrecisionConfig
    optim: optim.OptimConfig
    data: data.DataConfig
    memory: memory.MemoryConfig
    offload: offload.OffloadConfig
    world: world.WorldConfig
    clock: clock.ClockConfig
    context: context.ContextConfig
    experts: experts.ExpertsConfig
    saving: saving.SavingConfig
    fp8: fp8.Fp8Config
    mtp: mtp.MtpConfig


PARTS: Mapping[str, type[Part]] = MappingProxyType(get_type_hints(Parts))
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {flat: option for kind in PARTS.values() for flat, option in kind.options().items()}
)
"""Every field of a run by its flat name."""


class Capability(NamedTuple):
    """What one file says of its options together with others', and of other frameworks' words.

    rules       yields what is wrong with a configuration
    exclusions  pairs of options of which only one may be set
    words       names in other frameworks, and in words the flags that are the same
    lacking     names in other frameworks, the feature that is not modelled, and the nearest one
    settles     after exclusions: sets values that follow from others, takes out a recipe's, and returns why
    """

    rules: Callable[[Parts], Iterator[InputError]] = lambda parts: iter(())
    exclusions: tuple[Exclusion, ...] = ()
    words: tuple[tuple[str, str], ...] = ()
    lacking: tuple[tuple[str, str, str], ...] = ()
    settles: Callable[[Draft], Mapping[str, str]] = lambda draft: {}


CAPABILITIES = (
    Capability(words=data.WORDS, lacking=data.LACKING),
    Capability(words=mesh.WORDS),
    Capability(words=model.WORDS, lacking=model.LACKING),
    Capability(words=parallel.WORDS),
    Capability(words=precision.WORDS, settles=precision.settles),
    Capability(lambda c: context.model_rules(c.mesh, c.context, c.model)),
    Capability(lambda c: memory.rules(c.memory, c.model, c.parallel, c.world), (), memory.WORDS, memory.LACKING),
    Capability(
        lambda c: tuning_rules.rules(c.tuning, c.model),
        (), tuning_rules.WORDS, tuning_rules.LACKING, tuning_rules.settles,
    ),
    Capability(lambda c: tuning_rules.whole_rules(c.tuning, c.precision, c.mesh, c.parallel, c.optim, c.offload)),
    Capability(
        lambda c: tuning_rules.dtype_rules(
            c.tuning, c.precision, c.mesh, c.gathering, c.grads, c.offload, c.model
        )
    ),
    Capability(lambda c: tiles.rules(c.gathering, c.model, c.mesh, c.tuning, c.optim)),
    Capability(lambda c: tiles.rules_of_rows(c.memory, c.gathering, c.model, c.tuning, c.parallel), (), tiles.WORDS),
    Capability(
        lambda c: context.rules(c.mesh, c.context, c.model, c.parallel, c.memory), (), context.WORDS,
        settles=context.settles,
    ),
    Capability(lambda c: tensor.rules(c.mesh, c.model, c.parallel), (), tensor.WORDS, tensor.LACKING),
    Capability(lambda c: experts.cut_rules(c.mesh, c.model, c.parallel, c.gathering, c.reduction)),
    Capability(
        lambda c: experts.rules(c.experts, c.model, c.mesh, c.gathering, c.memory, c.tuning, c.data), (), experts.WORDS
    ),
    Capability(
        lambda c: kept_inputs.rules(c.memory, c.mesh, c.parallel), (), kept_inputs.WORDS, settles=kept_inputs.settles,
    ),
    Capability(lambda c: pipeline.rules(c.mesh, c.model, c.parallel, c.data, c.optim), (), pipeline.WORDS),
    Capability(
        lambda c: optim.rules(c.optim, c.mesh, c.parallel, c.precision), optim.EXCLUSIONS, optim.WORDS, optim.LACKING
    ),
    Capability(exclusions=reduction.EXCLUSIONS),
    Capability(
        lambda c: compression.rules(c.reduction, c.precision, c.mesh, c.parallel, c.optim, c.data, c.grads),
        compression.EXCLUSIONS, compression.WORDS, settles=compression.settles,
    ),
    Capability(
        lambda c: zeropp.rules(c.mesh, c.gathering, c.reduction, c.precision, c.tuning),
        zeropp.EXCLUSIONS, zeropp.WORDS,
    ),
    Capability(exclusions=buckets.EXCLUSIONS),
    Capability(exclusions=gathering.EXCLUSIONS, words=gathering.WORDS, settles=gathering.settles),
    Capability(lambda c: delayed.rules(c.grads, c.offload), delayed.EXCLUSIONS),
    Capability(
        lambda c: in_backward.rules(c.grads, c.data, c.mesh, c.offload, c.optim, c.precision), in_backward.EXCLUSIONS,
    ),
    Capability(exclusions=grads.EXCLUSIONS, settles=grads.settles),
    Capability(exclusions=memory.EXCLUSIONS),
    Capability(exclusions=grads.OF_STAGE_1),
    Capability(exclusions=clock.EXCLUSIONS, words=clock.WORDS),
    Capability(
        lambda c: offload.rules(c.offload, c.parallel, c.optim, c.precision, c.reduction, c.grads, c.world),
        offload.EXCLUSIONS, offload.WORDS, offload.LACKING, offload.settles,
    ),
    Capability(lambda c: paging.rules(c.memory, c.offload, c.optim, c.reduction, c.world), (), paging.WORDS),
    Capability(exclusions=pipeline.EXCLUSIONS),
    Capability(settles=buckets.settles),
    Capability(lambda c: world.rules(c.world, c.mesh)),
    Capability(lambda c: second.rules(c.model, c.memory, c.data, c.optim, c.parallel, c.mesh, c.tuning)),
    Capability(lambda c: data.rules(c.data, c.model, c.optim)),
    Capability(lambda c: saving.rules(c.saving, c.data, c.offload, c.tuning), saving.EXCLUSIONS, saving.WORDS),
    Capability(
        lambda c: fp8.rules(
            c.fp8, c.model, c.mesh, c.precision, c.data, c.saving, c.parallel, c.gathering, c.memory
        ),
        fp8.EXCLUSIONS, fp8.WORDS, fp8.LACKING, fp8.settles,
    ),
    Capability(
        lambda c: mtp.rules(
            c.mtp, c.model, c.mesh, c.parallel, c.gathering, c.memory, c.tuning, c.optim, c.data, c.fp8
        ),
        mtp.EXCLUSIONS,
    ),
    Capability(lambda c: documents.rules(c.data, c.model, c.memory, c.optim), (), documents.WORDS),
)  # fmt: skip
"""The order is that of errors: of several things that are wrong, the first row's is reported. Exclusions are applied
before any rule; a value that one sets aside no longer counts for the next. Some files have two rows."""
