"""The ZeRO stages: what they send and hold, before any other capability changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.in_backward import frees
from zerosim.analysis.capability import Capability, Forms, Kept, Key, Sent, Step, when
from zerosim.analysis.facts import frozen_of, operations, reduce_times, reductions
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.analysis.zero_gathers import schedule_of
from zerosim.config import RunConfig
from zerosim.config.parts.offload import has_host_buffers
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import dtype
from zerosim.optim.adam8bit import MIN_8BIT_SIZE
from zerosim.units import counted


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    stage, (reduces, gathers) = config.parallel.zero_stage, operations(config)
    times = reductions(config, step.passes)
    grads = {(reduces, "states"): formulas.reduced(times * (reduce_times(config) if reduces == "all_reduce" else 1))}
    if not gathers:
        return Sent(grads)
    in_forward = config.reduction.in_forward
    params = (
        formulas.gathered(schedule_of(config, step.passes))
        if stage == 3
        else formulas.published(step.passes if in_forward else 1)
    )
    return Sent(grads, {(gathers, "states"): params}, fetched(config, params))


def fetched(config: RunConfig, params: formulas.Form) -> formulas.Form:
    """Return the bytes of whole parameters that these gathers bring together."""
    return params.where(w=dtype(config.precision.stored).itemsize).elements


def gathers_again(config: RunConfig) -> bool:
    """Return whether stage 3 gathers a table outside the blocks for each of its uses."""
    moved = schedule_of(config)
    return config.parallel.zero_stage == 3 and moved.reshard_after_forward and not moved.keep_root_units


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    """Yield an optimizer's sums, and reduction buffers that live from start to end: stage 0's buckets, stage 3's
    constant size."""
    if OPTIMIZERS[config.optim.optimizer].cut == "sums" and is_sliced(config.parallel):
        form = formulas.optimizer_sums(all_reduce=reduce_times(config))
        yield Key("sent", "all_reduce", "states"), form
    how = config.reduction
    form = formulas.reduction_buffers(
        dtype(config.precision.grad_dtype).itemsize,
        frozen_of(config),
        copies=config.grads.bucket_copies,
        numel=how.bucket * how.buffers if config.parallel.zero_stage == 3 else 0,
    )
    if form.terms:
        yield Key("buffers", "comm"), form


def _held(config: RunConfig, cost: BytesPerParameter) -> Forms:
    stage, grads, optim, frozen = config.states_stage, config.grads, config.optim, frozen_of(config)
    buffered = has_host_buffers(grads, config.offload, config.precision)
    at = {
        "states": formulas.model_states(stage, cost, frozen),
        "upcast": formulas.optimizer_step_states(
            stage, cost, frozen, upcast_grads=grads.upcast, sub_group=optim.sub_group
        ),
        "between": formulas.after_step_states(
            stage,
            cost,
            frozen,
            persistent_grads=grads.lasts or buffered or grads.keep_shards,
            keep_upcast=grads.keep_upcast,
        ),
    }
    for subject, by_kind in at.items():
        yield from ((Key(subject, kind), form) for kind, form in by_kind.items())


def _kept(config: RunConfig, kept: Kept) -> Kept:
    return kept._replace(casts=config.parallel.zero_stage == 3 and config.gathering.cast_shards)


def _about(config: RunConfig) -> Iterator[str]:
    """Yield the cost of stages 2 and 3 with many microbatches in a pipeline."""
    times, stage = config.data.accumulate, config.parallel.zero_stage
    if config.mesh.pp == 1 or stage < 2:
        return
    often = f"for each forward and backward, {2 * times:,} times"
    if not config.gathering.reshard_after_forward:
        often = counted(times, "time")
    gathers = f", and gathers parameters {often}" if stage == 3 else ""
    yield (
        f"ZeRO-{stage} in a pipeline reduces gradients once per microbatch, {counted(times, 'time')} a step, where "
        f"ZeRO-1 does once{gathers}. DeepSpeed refuses ZeRO-2 and 3 with its PipelineEngine; Megatron uses ZeRO-1."
    )


def _holds(config: RunConfig) -> Iterator[str]:
    """Yield what a rank keeps, as the end of a sentence."""
    ranks, gathering = config.mesh.shards, config.gathering
    if config.parallel.zero_stage == 1:
        until = "" if config.states_stage == 1 else " until they are reduced"
        stay = "parameters stay whole, gradients" if frees(config) else "parameters and gradients stay whole"
        yield f"1/{ranks} of the optimizer states; {stay}{' until their update' if frees(config) else until}"
    if config.parallel.zero_stage == 2:
        grads = " and, until its update, of each gradient" if frees(config) else " and gradients"
        yield f"1/{ranks} of the optimizer states{grads}; parameters stay whole"
    if config.parallel.zero_stage == 3:
        when = "only while it is used" if gathering.reshard_after_forward else "once, for forward and backward"
        yield f"1/{ranks} of every model state, and gathers a {gathering.gather}'s parameters {when}"


def _each_microbatch(config: RunConfig) -> list[str]:
    times = config.data.accumulate if config.parallel.zero_stage >= 2 else 1
    return when(times > 1, f"Each of {times:,} microbatches is reduced (derived; the paper has one).")


def _gathered(config: RunConfig) -> Iterator[str]:
    """Yield what stage 3 gathers at a time, and what it prefetches."""
    gathering = config.gathering
    yield f"A {gathering.gather} is gathered, used and freed at a time. This is the largest."
    if gathering.prefetch:
        yield f"The parameters of {gathering.prefetch:,} more are prefetched."
    if gathering.prefetch_elements:
        limit = f" while fewer than {gathering.max_live:,} elements are there" if gathering.max_live else ""
        more = f"At each turn {gathering.prefetch_elements:,} more elements are launched{limit}"
        yield f"{more}; one tensor may go beyond."


def _hiding(config: RunConfig) -> list[str]:
    """Return the flag that overlaps more than was asked for."""
    overlap, most = config.parallel.overlap, config.replace(overlap="all").parallel.overlap
    has_all = overlap == most or (overlap == "gather" and config.clock.overlap_comm)
    return when(not has_all, f"--overlap {most}")


def _warned(config: RunConfig) -> list[str]:
    recipe, shards = config.parallel.recipe, config.mesh.shards
    is_torchao = config.optim.optimizer == "adam8bit-torchao" and recipe == "fsdp2"
    return [
        *when(
            is_torchao and config.parallel.zero_stage >= 2 and shards > 1,
            f"torchao decides by a rank's rows of a tensor: below {MIN_8BIT_SIZE * shards:,} elements in all, or where "
            "256 do not divide the rows, states are floats. Here the whole tensor decides",
        ),
        *when(
            not config.grads.sync and recipe.endswith("deepspeed") and config.data.accumulate > 1,
            "DeepSpeed's no_sync refuses ZeRO stages 2 and 3, which reduce every microbatch: --stage 1 reduces once",
        ),
    ]


def _first_step(config: RunConfig) -> list[str]:
    """Return how the first step differs from the later ones, whose time is shown."""
    return when(
        config.parallel.zero_stage == 0 and config.parallel.recipe == "ddp" and config.mesh.shards > 1,
        "In PyTorch's first step one bucket has all gradients, and nothing overlaps.",
    )


def keeps_gradients(config: RunConfig) -> bool:
    """Return whether gradients keep their buffers from step to step."""
    return config.grads.persistent


def most_gathered(config: RunConfig) -> int:
    """Return how many gathered elements stay after a use at most; 0 where none do."""
    return config.gathering.max_live or 0


def without_prefetch(config: RunConfig) -> Iterator[Mapping[str, int]]:
    """Yield the values that turn a prefetch off, which costs only time."""
    if config.gathering.prefetch:
        yield {"prefetch": 0}
    if config.gathering.prefetch_elements:  # a limit has no effect without it
        yield {"prefetch_elements": 0, **({"max_live": 0} if config.given.get("max_live") else {})}


CAPABILITY = Capability(
    sent=_sent,
    forms=_forms,
    held=_held,
    kept=_kept,
    notes={
        "about": _about, "holds": _holds, "volume": _each_microbatch, "gathered": _gathered, "hiding": _hiding,
        "first_step": _first_step,
        "warned": _warned,
        "piece": lambda c: [c.gathering.piece],
    },
    axes={"dp_shard": "N"},
)  # fmt: skip
