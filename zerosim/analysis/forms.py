"""The closed forms of a run: which ones its configuration calls for. Every table and every comparison reads them here.

    forms(config)[Key("sent", "all_gather", "states")]    # ring(N) · w · Ψ, and so on

A capability adds its forms and nothing else; `letters.letters_of` has values for the letters. Forms of one key are
added: an optimizer's sums ride on the operation that reduces gradients. What depends on the layout (padding, owners,
unequal costs) is a number of the layout, no form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter, Form, Volume
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS


class Key(NamedTuple):
    """What a form is about: the subject, a kind of memory or an operation, and what its group is for.

    states, upcast, between   bytes of a model state per rank: when backward ends, in the optimizer step, between steps
    sent                      bytes per rank and step for model states, by operation and what the group is for
    exchanged                 the same for activations, by operation and axis
    copied                    bytes of blocks' inputs that are moved to the host and back
    kept                      bytes of one block's activations
    """

    subject: str
    name: str
    axis: str = ""


def forms(config: RunConfig, cost: BytesPerParameter | None = None, passes: int = 1) -> dict[Key, Form]:
    """Every closed form of a run, in bytes per rank. `cost` is what a parameter costs, where states are asked for;
    `passes`: 2 in a step that an estimate of curvature follows."""
    found: dict[Key, Form] = {}
    for capability in CAPABILITIES:
        for key, form in capability(config, passes):
            found[key] = found.get(key, Form()) + form
    if cost is not None:
        found |= dict(_states(config, cost))
    return found


def of(found: dict[Key, Form], subject: str) -> dict[tuple[str, str], Form]:
    """One subject's forms by name and axis."""
    return {(key.name, key.axis): form for key, form in found.items() if key.subject == subject}


Forms = Iterator[tuple[Key, Form]]


def _states(config: RunConfig, cost: BytesPerParameter) -> Forms:
    stage, grads, optim = config.states_stage, config.grads, config.optim
    at = {
        "states": formulas.model_states(stage, cost),
        "upcast": formulas.optimizer_step_states(stage, cost, upcast_grads=grads.upcast, sub_group=optim.sub_group),
        "between": formulas.after_step_states(stage, cost, persistent_grads=grads.lasts, keep_upcast=grads.keep_upcast),
    }
    for subject, by_kind in at.items():
        for kind, form in by_kind.items():
            yield Key(subject, kind), form


def zero_volume(config: RunConfig, passes: int = 1) -> Volume:
    """What ZeRO itself sends: gradients and parameters."""
    gathering, stage = config.gathering, config.parallel.zero_stage
    volume = formulas.volume(
        stage,
        micro_batches=config.data.accumulate,
        passes=passes,
        tied=config.model.has_blocks and config.model.tie_embeddings,
        reshard_after_forward=gathering.reshard_after_forward,
        keep_last_unit=gathering.keep_last_unit and config.mesh.pp == 1,
        grad_reduction=operations(config)[0],
        all_reduce=all_reduce_times(config, config.mesh.shards),
        keep_root_units=gathering.keep_root_units,
        persistent=gathering.persistent_numel > 0,
        again=gathering.by_module,
        sync=config.grads.sync,
        in_forward=config.reduction.in_forward,
        casts=config.reduction.compress != "none",
    )
    if gathering.keep_last_unit and config.mesh.pp > 1 and stage == 3 and gathering.reshard_after_forward:
        return volume.keeping(passes)
    return volume


def _zero(config: RunConfig, passes: int) -> Forms:
    for name, form in zip(operations(config), zero_volume(config, passes), strict=True):
        if name:
            yield Key("sent", name, "states"), form


def _optimizer_sums(config: RunConfig, passes: int) -> Forms:
    if OPTIMIZERS[config.optim.optimizer].cut == "sums" and is_sliced(config):
        form = formulas.optimizer_sums(all_reduce=all_reduce_times(config, config.mesh.shards))
        yield Key("sent", "all_reduce", "states"), form


def _replicas(config: RunConfig, passes: int) -> Forms:
    """Hybrid sharding, once a step or for each micro-batch that is reduced."""
    parallel = config.parallel
    each = parallel.replica_reduction == "micro_batch" and config.grads.sync
    by_micro_batch = each and parallel.zero_stage >= 2
    times = passes * (config.data.accumulate if by_micro_batch else 1)
    if config.mesh.dp_replicate > 1:
        form = formulas.replica_bytes(config.mesh.dp_replicate, reductions=times, pairs=is_by_pairs(config))
        yield Key("sent", "all_reduce", "replicas"), form


def _shared_grads(config: RunConfig, passes: int) -> Forms:
    """Gradients of one weight on several ranks: over tp, and of a tied table over pp."""
    divided = config.parallel.zero_stage > 0 and config.mesh.shards > 1
    if config.mesh.tp > 1:
        copies = max(1, config.mesh.tp // config.model.kv_heads) if config.model.has_blocks else 1
        form = formulas.shared_grads(copies=copies, divided=divided, pairs=is_by_pairs(config))
        yield Key("sent", "all_reduce", "tp"), form
    if config.mesh.pp > 1:
        yield Key("sent", "all_reduce", "pp"), formulas.tied_grads(passes=passes, divided=divided)


def _tensor(config: RunConfig, passes: int) -> Forms:
    if config.mesh.tp == 1:
        return
    times, parallel, again = all_reduce_times(config, config.mesh.tp), config.parallel, config.memory.recompute
    if not config.model.has_blocks:
        by_operation = formulas.flat_parallel(all_reduce=times)
    elif parallel.sequence_parallel:
        by_operation = formulas.sequence_parallel(again, all_reduce=times, keep_gathered=parallel.keep_gathered)
    else:
        by_operation = formulas.tensor_parallel(again, all_reduce=times)
    for name, form in by_operation.items():
        yield Key("exchanged", name, "tp"), form
    if config.partitions_inputs:
        yield Key("exchanged", "all_gather", "tp"), formulas.input_gathers()


def _pipeline(config: RunConfig, passes: int) -> Forms:
    if config.mesh.pp > 1:
        parallel = config.parallel
        form = formulas.border_sends(parallel.pipeline_schedule, divided=parallel.sequence_parallel)
        yield Key("exchanged", "send", "pp"), passes * form


def _offload(config: RunConfig, passes: int) -> Forms:
    """Blocks' inputs that wait in the host's memory."""
    if config.memory.cpu_checkpointing:
        moved = formulas.inputs_moved(divided=config.partitions_inputs or config.parallel.sequence_parallel)
        yield Key("copied", "device to host"), moved
        yield Key("copied", "host to device"), moved


def _activations(config: RunConfig, passes: int) -> Forms:
    """One block's; where every K-th one runs again whole, one that keeps all."""
    if config.model.has_blocks:
        yield Key("kept", "block"), block_form(config)


CAPABILITIES = (_zero, _optimizer_sums, _replicas, _shared_grads, _tensor, _pipeline, _offload, _activations)
"""In the order in which their operations are shown."""


def block_form(config: RunConfig, block: int = 0) -> Form:
    """Bytes of activations that this block keeps."""
    again = config.memory.again
    return formulas.block_activations(
        again.of_block(block) if again.every else config.memory.recompute,
        sequence_parallel=config.parallel.sequence_parallel,
        keep_gathered=config.parallel.keep_gathered,
        partitioned=config.partitions_inputs,
        on_host=config.memory.cpu_checkpointing,
        fp32_softmax=config.memory.fp32_softmax,
    )


# -- what a configuration means for the forms -----------------------------------------------------
def operations(config: RunConfig) -> tuple[str, str]:
    """What reduces gradients and what brings parameters."""
    if config.parallel.zero_stage == 0:
        return "all_reduce", ""
    if is_owned(config):
        return "reduce", "broadcast"
    return config.reduction.grad_reduction if config.parallel.zero_stage < 3 else "reduce_scatter", "all_gather"


def is_owned(config: RunConfig) -> bool:
    """Whole units belong to ranks. Stage 0 divides nothing."""
    return config.parallel.partition == "owner" and config.parallel.zero_stage > 0


def is_sliced(config: RunConfig) -> bool:
    return config.parallel.partition == "slices" and config.parallel.zero_stage > 0


def is_by_pairs(config: RunConfig) -> bool:
    """Whether an all_reduce sends whole buffers to all others."""
    return config.world.algorithm == "pairs"


def all_reduce_times(config: RunConfig, ranks: int) -> int:
    """What an all_reduce of so many ranks moves of its payload, before the factor (N-1)/N."""
    return formulas.all_reduce_volume(ranks, pairs=is_by_pairs(config))
