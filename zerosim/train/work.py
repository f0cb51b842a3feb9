"""Estimate the work of a configuration before it starts, and refuse what no one would wait for.

The time of a plan or a run is proportional to the events of its record: the kernels and buffers of every unit, and the
calls into which buckets cut a collective. A run also computes. The estimates are right to about a factor of two, which
is enough to tell minutes from days.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import owns_units
from zerosim.dtypes import dtype
from zerosim.errors import InputError, wrong
from zerosim.train.delayed import planned_steps
from zerosim.train.pieces import pieces_of
from zerosim.units import format_count

MOST_EVENTS = 20_000_000
"""The limit for one plan, or for one step of a run: some minutes, and a laptop's memory if events are kept."""

MOST_FLOPS = 10**16
"""The limit for one step of a run: two days at 50 GFLOP/s."""

LONG_FLOPS = 10**14
"""The limit for a comparison of ZeRO stages: half an hour at 50 GFLOP/s."""

_PER_BLOCK, _PER_UNIT, _MODULES, _OF_MAPS = 170, 50, 12, 8
_PER_CALL = 4  # events of one collective: its launch and wait, the copies and buffers around it
_PER_ROUND = 10  # one round of a ring, in events of the same duration


class Work(NamedTuple):
    """Events by origin: kernels and buffers of `units`, `calls` of buckets, `rounds` of rings."""

    units: int
    calls: int
    rounds: int

    @property
    def events(self) -> int:
        return sum(self)


def expected_work(config: RunConfig, *, micro_batches: int, ranks: int = 1) -> Work:
    """Estimate the events of one step of `config` with that number of microbatches, on that number of ranks per
    pipeline stage."""
    model, mesh = config.model, config.mesh
    steps = planned_steps(config) * ranks
    units = (model.units or 1) if model.family == "flat" else model.layers + 2
    made = pieces_of(config)
    modules = _MODULES + _OF_MAPS * (made.tiles - 1) if made.by_module and model.has_blocks else 1
    each = (_PER_BLOCK if model.has_blocks else _PER_UNIT) + 8 * (modules - 1)
    if owns_units(config.parallel) and ranks == 1:  # owners of different units differ
        steps *= min(mesh.shards, units * modules)
    bucket = config.parallel.bucket_bytes
    nbytes = _numel(config, model.experts) // mesh.tp * dtype(config.precision.stored).itemsize
    # ZeRO-3 gathers twice and reduces once in every microbatch; the other stages gather and reduce once.
    passes = 3 * micro_batches if config.parallel.zero_stage == 3 else 1 + config.parallel.zero_stage // 2
    collectives = passes * (units + (0 if bucket is None else nbytes // bucket))
    rounds = mesh.shards - 1 if config.world.algorithm == "ring" else 0
    return Work(
        steps * micro_batches * units * each,
        steps * collectives * _PER_CALL,
        steps * collectives * rounds * _PER_ROUND,
    )


def check_plan(config: RunConfig, micro_batches: int, *, every_rank: bool = False) -> None:
    """Check a plan. Raises: InputError for more than `MOST_EVENTS`, with the option that makes it so large."""
    mesh = config.mesh
    ranks = mesh.ranks // mesh.pp if every_rank else 1
    _check_events(config, expected_work(config, micro_batches=micro_batches, ranks=ranks), micro_batches, "a plan")


def check_run(config: RunConfig) -> None:
    """Check a run. Raises: InputError if one step would take days, with the option that makes it so large."""
    step, mesh = config.replace(steps=1), config.mesh
    work = expected_work(step, micro_batches=config.data.accumulate, ranks=mesh.ranks // mesh.pp)
    _check_events(step, work, config.data.accumulate, "a step")
    flops = step_flops(config)
    if flops > MOST_FLOPS:
        tokens = config.tokens
        raise InputError(
            f"{config.model.name} on {tokens:,} tokens a step is about {flops:.1e} floating-point operations; the "
            f"limit is {MOST_FLOPS:.0e}: choose a smaller model or batch, or count it with zerosim plan"
        )


def step_flops(config: RunConfig) -> int:
    """Estimate the floating-point operations of one step of a run: of a layer's experts the chosen ones work."""
    model = config.model
    attention = 12 * model.layers * model.hidden * model.seq if model.has_blocks else 0
    return config.tokens * (6 * _numel(config, model.top_k) + attention)


def _check_events(config: RunConfig, work: Work, micro_batches: int, what: str) -> None:
    events, bucket = work.events, config.parallel.bucket_bytes
    if events <= MOST_EVENTS:
        return
    times = f"{what} would record about {format_count(events)} events; the limit is {format_count(MOST_EVENTS)}"
    steps, over = config.optim.steps or 1, events / MOST_EVENTS
    if bucket is not None and work.calls + work.rounds > work.units:
        right = 10 ** math.ceil(math.log10(2 * over * bucket))
        raise wrong("bucket_bytes", f" {bucket}: {times}; choose {right} or more, or none for one call per unit")
    if work.rounds > work.units:
        raise wrong("collective", f" 'ring' over {config.mesh.shards} ranks: {times}; choose direct, or fewer ranks")
    size = "units" if config.model.family == "flat" else "layers"
    found = {"steps": steps, "accumulate": micro_batches, size: getattr(config.model, size) or 1}
    name = max(found, key=lambda field: found[field])
    raise wrong(name, f" {found[name]}: {times}; choose {max(1, int(found[name] / (2 * over)))} or fewer")


def _numel(config: RunConfig, experts: int) -> int:
    """Estimate the model's parameters: its matrices and tables. So many `experts` of a layer count."""
    model = config.model
    if model.family == "flat":
        return model.params or 1
    if not model.has_blocks:
        return model.layers * 2 * model.hidden * model.ffn + model.vocab * model.hidden
    numel = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    for (block, _), layers in zip(model.decoder.stacks, model.depths, strict=True):
        for one in (one for branch in block.branches for one in branch.inward):
            inner = model.width(one.inner) if one.inner else model.hidden
            numel += layers * inner * sum(model.width(out.wide) for out in one.outs)
        rows = model.width(block.attention.rows.inner or "heads") * (len(block.branches) - 1) + model.ffn
        numel += layers * model.hidden * rows
        each = len(block.mlp.columns.outs) + 1  # matrices of a feed-forward
        wide = experts * model.expert_ffn + model.width("shared")
        mixed = sum(model.kind(number).has_experts for number in range(layers)) if model.has_experts else 0
        numel += mixed * model.hidden * (each * (wide - model.ffn) + model.experts)
    return numel
