"""The closed forms of a run, chosen by its configuration. Every table and every comparison reads them here.

    forms(config)[Key("sent", "all_gather", "states")]    # ring(N) · w · Ψ, and so on

A capability adds its forms and nothing else. `letters.letters_of` has values for the letters. Forms with the same key
add up: an optimizer's sums go with the operation that reduces gradients. Padding, owners and
unequal costs depend on the layout. They are numbers of the layout, not forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerosim.analysis import formulas, zeropp
from zerosim.analysis.formulas import BytesPerParameter, Form, Volume
from zerosim.config import RunConfig
from zerosim.config.parts.reduction import CASTS
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import dtype
from zerosim.placement.memories import DEVICE, HOST


class Key(NamedTuple):
    """The key of a form: its subject, a kind of memory or an operation, and the purpose of its group.

    states, upcast, between   bytes of a model state per rank: when backward ends, in the optimizer step, between steps
    buffers                   bytes per rank of the buffers from which gradients are reduced, from start to end
    sent                      bytes per rank and step for model states, by operation and the group's purpose
    exchanged                 the same for activations, by operation and axis
    copied                    bytes that move between a rank's memories: blocks' inputs, offloaded model states
    lies                      bytes of a model state in one memory when backward ends, where states are offloaded
    kept                      bytes of one block's activations
    """

    subject: str
    name: str
    axis: str = ""


def forms(
    config: RunConfig, cost: BytesPerParameter | None = None, passes: int = 1, step: int = 0, *, late: bool = True
) -> dict[Key, Form]:
    """Return every closed form of a run, in bytes per rank. `cost` is the bytes per parameter, needed for states.
    `passes`: 2 in a step with an estimate of curvature. `step`: its number, if the first steps send differently.
    `late`: whether a delayed update runs beside the step, if updates are delayed."""
    found = dict(_zero(config, passes, step))
    for capability in CAPABILITIES:
        for key, form in capability(config, passes):
            found[key] = found.get(key, Form()) + form
    if cost is not None:
        found |= dict(_states(config, cost, late))
    return found


def of(found: dict[Key, Form], subject: str) -> dict[tuple[str, str], Form]:
    """Return one subject's forms by name and axis."""
    return {(key.name, key.axis): form for key, form in found.items() if key.subject == subject}


Forms = Iterator[tuple[Key, Form]]


def late_states(config: RunConfig, cost: BytesPerParameter, late: bool = True) -> dict[str, Form]:
    """Return what a delayed update adds to model states; empty without one."""
    return formulas.late_states(cost, frozen_of(config)) if late and config.grads.late else {}


def local_states(config: RunConfig, cost: BytesPerParameter, late: bool = True) -> dict[str, Form]:
    """Return a rank's bytes of local shards beside whole states: the additions of a delayed update, and at stage 1 an
    offloaded local shard of the gradients."""
    found, own = late_states(config, cost, late), _own_grads(config, cost)
    return found if own is None else found | {"grad": own + found.get("grad", Form())}


def _own_grads(config: RunConfig, cost: BytesPerParameter) -> Form | None:
    """Return the local shard's copy in another memory, beside whole gradients on the device; None without one."""
    if config.states_stage != 1 or config.offload.memory_of("grads") == DEVICE:
        return None
    return formulas.model_states(2, cost, frozen_of(config))["grad"]


def _states(config: RunConfig, cost: BytesPerParameter, late: bool) -> Forms:
    stage, grads, optim = config.states_stage, config.grads, config.optim
    held = frozen_of(config)
    at = {
        "states": formulas.model_states(stage, cost, held),
        "upcast": formulas.optimizer_step_states(
            stage, cost, held, upcast_grads=grads.upcast, sub_group=optim.sub_group
        ),
        "between": formulas.after_step_states(
            stage, cost, held, persistent_grads=grads.lasts, keep_upcast=grads.keep_upcast
        ),
    }
    more = late_states(config, cost, late)
    for subject, by_kind in at.items():
        for kind, form in by_kind.items():
            if kind in more and (kind == "grad" or subject != "between"):
                form = form + more[kind]
            if kind == "optim" and config.reduction.is_encoded:
                form = form + formulas.KEPT
            if kind == "param" and config.mesh.secondary_shard:
                form = form + zeropp.second(config)
            yield Key(subject, kind), form
    if not config.offload.is_on:
        return
    for kind, memory in config.offload.by_state.items():
        whole, beside = at["states"][kind], more.get(kind, Form())
        if kind == "optim" and config.reduction.is_encoded:  # only where the states are on the device
            whole = whole + formulas.KEPT
        if kind == "param" and memory == DEVICE and more:  # new ones wait on the host
            yield Key("lies", kind, HOST), beside
        elif stage > 1 or kind != "grad":
            whole = whole + beside
        if kind == "param" and config.mesh.secondary_shard:  # hpZ's shard is on the device wherever the primary one is
            if memory == DEVICE:
                whole = whole + zeropp.second(config)
            else:
                yield Key("lies", kind), zeropp.second(config)
        if kind == "grad" and (own := _own_grads(config, cost)) is not None:
            yield from (
                (Key("lies", kind), whole),
                (Key("lies", kind, memory), own + beside),
                (Key("states", kind), whole + own + beside),
            )
        else:
            yield Key("lies", kind, "" if memory == DEVICE else memory), whole


def zero_volume(config: RunConfig, passes: int = 1) -> Volume:
    """Return the forms of ZeRO's own traffic: gradients and parameters."""
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
        casts=config.reduction.compress in CASTS,
        frozen=config.tuning.is_on,
        quantized=config.tuning.base is not None,
    )
    if gathering.keep_last_unit and config.mesh.pp > 1 and stage == 3 and gathering.reshard_after_forward:
        return volume.keeping(passes)
    return volume


def _zero(config: RunConfig, passes: int, step: int) -> Forms:
    volume, (reduces, gathers) = zero_volume(config, passes), operations(config)
    if config.reduction.quantized_gradients:
        yield from ((Key("sent", *operation), form) for operation, form in zeropp.grads_sent(config, passes))
    elif config.reduction.is_exact(step) or not config.reduction.is_encoded:
        yield Key("sent", reduces, "states"), volume.grads
    else:
        yield from _encoded(config, passes)
    if zeropp.gathers_otherwise(config):
        yield from ((Key("sent", *operation), form) for operation, form in zeropp.params_sent(config, passes))
    elif gathers:
        yield Key("sent", gathers, "states"), volume.params


def _encoded(config: RunConfig, passes: int) -> Forms:
    """Return the forms of gradients sent as codes."""
    stage, name = config.parallel.zero_stage, config.reduction.compress
    each = stage >= 2 and config.grads.sync
    form = formulas.encoded_volume(reductions=passes * (config.data.accumulate if each else 1))
    if name in formulas.REDUCED:
        times = 1 if stage else all_reduce_times(config, config.mesh.shards)
        yield Key("sent", "reduce_scatter" if stage else "all_reduce", "states"), times * form
        return
    if stage or name == "onebit-adam":
        yield Key("sent", "all_to_all", "states"), form
    if not stage:
        yield Key("sent", "all_gather", "states"), form


def _optimizer_sums(config: RunConfig, passes: int) -> Forms:
    if OPTIMIZERS[config.optim.optimizer].cut == "sums" and is_sliced(config):
        form = formulas.optimizer_sums(all_reduce=all_reduce_times(config, config.mesh.shards))
        yield Key("sent", "all_reduce", "states"), form


def _replicas(config: RunConfig, passes: int) -> Forms:
    """Return the forms of hybrid sharding, once a step or once per reduced microbatch."""
    parallel = config.parallel
    each = parallel.replica_reduction == "micro_batch" and config.grads.sync
    by_micro_batch = each and parallel.zero_stage >= 2
    times = passes * (config.data.accumulate if by_micro_batch else 1)
    if config.mesh.dp_replicate > 1:
        form = formulas.replica_bytes(
            config.mesh.dp_replicate, reductions=times, pairs=is_by_pairs(config), frozen=config.tuning.is_on
        )
        yield Key("sent", "all_reduce", "replicas"), form


def _shared_grads(config: RunConfig, passes: int) -> Forms:
    """Return the forms of a weight's gradient on several ranks: over tp, and for a tied table over pp."""
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
    frozen, side_by_side = config.tuning.is_on, config.model.has_blocks and config.model.decoder.block.parallel
    if not config.model.has_blocks:
        by_operation = formulas.flat_parallel(all_reduce=times)
    elif config.model.is_second:
        by_operation = formulas.second_parallel(again, all_reduce=times)
    elif parallel.sequence_parallel:
        by_operation = formulas.sequence_parallel(
            again, all_reduce=times, keep_gathered=parallel.keep_gathered, frozen=frozen, side_by_side=side_by_side
        )
    else:
        by_operation = formulas.tensor_parallel(again, all_reduce=times, frozen=frozen, side_by_side=side_by_side)
    for name, form in by_operation.items():
        yield Key("exchanged", name, "tp"), form
    if config.model.has_blocks and config.model.decoder.block.qk_norm == "all":
        sums = formulas.head_norm_sums(all_reduce=times, frozen=frozen)
        yield Key("exchanged", "all_reduce", "tp"), sums
    if config.partitions_inputs:
        yield Key("exchanged", "all_gather", "tp"), formulas.input_gathers()


def _pipeline(config: RunConfig, passes: int) -> Forms:
    if config.mesh.pp > 1:
        parallel = config.parallel
        form = formulas.boundary_sends(
            parallel.pipeline_schedule, divided=parallel.sequence_parallel, frozen=config.tuning.is_on
        )
        yield Key("exchanged", "send", "pp"), passes * form


def _offload(config: RunConfig, passes: int) -> Forms:
    """Return the forms of blocks' inputs in the host's memory, and of model states there or on NVMe."""
    if config.offload.is_on and not is_owned(config):
        data, optim, stage = config.data, config.optim, config.parallel.zero_stage
        each = stage > 1 and config.grads.sync and config.mesh.dp_replicate * config.mesh.tp * config.mesh.pp == 1
        kept = formulas.MASTER_BYTES * (1 + formulas.num_moments(optim.optimizer, optim.momentum))
        param, grad = (dtype(name).itemsize for name in (config.precision.stored, config.precision.grad_dtype))
        gathers, times = zero_volume(config).params.where(w=param).elements, data.accumulate if each else 1
        if config.mesh.secondary_shard:  # later gathers read hpZ's shard, which is on the device
            wide = zeropp.gathers_of(config, passes)
            gathers = param * (wide.forward + wide.after)
        memories, frozen = config.offload.by_state, config.tuning.is_on
        is_read_ahead = memories["param"] == "nvme" and config.mesh.pp > 1  # a read may serve the next use too
        for way, form in formulas.offloaded(memories, gathers, (param, grad, kept), times, frozen=frozen):
            if not (is_read_ahead and way == "nvme to host"):
                yield Key("copied", way), form
    if config.memory.cpu_checkpointing:
        moved = formulas.inputs_moved(divided=config.partitions_inputs or config.parallel.sequence_parallel)
        yield Key("copied", "device to host"), moved
        yield Key("copied", "host to device"), moved


def _buffers(config: RunConfig, passes: int) -> Forms:
    """Return the forms of reduction buffers that live from start to end: stage 0's buckets, stage 3's constant size."""
    how = config.reduction
    form = formulas.reduction_buffers(
        dtype(config.precision.grad_dtype).itemsize,
        frozen_of(config),
        copies=config.grads.bucket_copies,
        numel=how.bucket * how.buffers if config.parallel.zero_stage == 3 else 0,
    )
    if form.terms:
        yield Key("buffers", "comm"), form


def _activations(config: RunConfig, passes: int) -> Forms:
    """Return the forms of one block; if every K-th block is recomputed, of a block that saves everything. The bytes
    saved for frozen maps depend on the maps, and have no form."""
    if config.model.has_blocks and not config.tuning.is_on:
        yield Key("kept", "block"), block_form(config)


CAPABILITIES = (_optimizer_sums, _replicas, _shared_grads, _tensor, _pipeline, _offload, _buffers, _activations)
"""Operations in the order of the tables."""


def block_form(config: RunConfig, block: int = 0) -> Form:
    """Return the form of the activation bytes that this block saves."""
    again = config.memory.again
    return formulas.block_activations(
        again.of_block(block) if again.every else config.memory.recompute,
        sequence_parallel=config.parallel.sequence_parallel,
        keep_gathered=config.parallel.keep_gathered,
        partitioned=config.partitions_inputs,
        on_host=config.memory.cpu_checkpointing,
        fp32_softmax=config.memory.fp32_softmax,
    )


# -- facts of a configuration for the forms -----------------------------------------------------
def operations(config: RunConfig) -> tuple[str, str]:
    """Return the operation that reduces gradients and the one that brings parameters."""
    if config.parallel.zero_stage == 0:
        return "all_reduce", ""
    if is_owned(config):
        return "reduce", "broadcast"
    return config.reduction.grad_reduction if config.parallel.zero_stage < 3 else "reduce_scatter", "all_gather"


def frozen_of(config: RunConfig) -> formulas.Frozen | None:
    """Return the bytes per frozen parameter; None if all are trained."""
    if not config.tuning.is_on:
        return None
    return formulas.Frozen(dtype(config.precision.stored).itemsize, config.tuning.base is not None)


def is_owned(config: RunConfig) -> bool:
    """Return whether ranks own whole units. ZeRO stage 0 divides nothing."""
    return config.parallel.partition == "owner" and config.parallel.zero_stage > 0


def is_sliced(config: RunConfig) -> bool:
    return config.parallel.partition == "slices" and config.parallel.zero_stage > 0


def is_by_pairs(config: RunConfig) -> bool:
    """Return whether an all_reduce sends whole buffers to all other ranks."""
    return config.world.algorithm == "pairs"


def all_reduce_times(config: RunConfig, ranks: int) -> int:
    """Return the multiple of its payload that an all_reduce of that many ranks moves, before the factor (N-1)/N."""
    return formulas.all_reduce_volume(ranks, pairs=is_by_pairs(config))
