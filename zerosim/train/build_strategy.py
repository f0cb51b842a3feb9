"""Build a rank's strategy from a RunConfig: the layout, the exchange, and the time of each collective."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.ddp import DDP
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathered import Elements, Gathered, Prefetch, Residency, Units
from zerosim.parallel.published import InForward
from zerosim.parallel.reducer import AfterDrain, AtOnce, InBuckets, OutOfBuffers, Reducer
from zerosim.parallel.secondary import Secondary
from zerosim.parallel.stage import Stage
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.placement.layout import Layout, RowsOf
from zerosim.placement.mesh import Mesh
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.placement.stages import cut_units
from zerosim.placement.zero import frozen, rows_said, zero_rows
from zerosim.tensor.flat import Flat
from zerosim.train.build_exchange import make_exchange, with_second

STAGES: tuple[type[Stage], ...] = (DDP, Zero1, Zero2, Zero3)


def is_trained(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether a flat buffer is trained: all of its parameters are, or none (`nn/halves.py`)."""
    return config.tuning.trains(flat.weights[0].name)


def rows_of(config: RunConfig, strategy: Strategy | None = None) -> RowsOf:
    """Return the rows of each flat buffer in a run: those of its ZeRO stage, changed by a custom `strategy`."""
    exchange = strategy.exchange if isinstance(strategy, Stage) else make_exchange(config)
    stage = config.parallel.zero_stage
    if strategy is not None and strategy.stage is not None:
        stage = strategy.stage
    casts = stage == 3 and config.gathering.cast_shards and config.precision.has_masters
    rows = zero_rows(
        stage,
        exchange.partition,
        param="use" if casts else "always",
        grad="always" if config.grads.lasts else "step",
        memories=config.offload.by_state,
    )
    if strategy is not None:
        rows = rows_said(rows, keeps_params=strategy.keeps_params, keeps_grads=strategy.keeps_grads)
    trained, held = with_second(config, {**rows, **exchange.states}), frozen(rows)
    return lambda flat: trained(flat) if is_trained(config, flat) else held


def stage_chunks(config: RunConfig, whole: Model) -> list[list[range]]:
    """Return for each pipeline stage its runs of the whole model's units."""
    chunks = config.chunks
    names = [unit.name for unit in whole.units]
    sizes = config.layers_by_chunk(sum(is_block(name) for name in names))
    runs = cut_units(names, sizes, is_block)
    return [[runs[number] for number in chunks.of_stage(stage)] for stage in range(chunks.stages)]


def layout_of(config: RunConfig, model: Model, strategy: Strategy | None = None) -> Layout:
    """Return the layout of a run of the whole `model`, before any rank exists."""
    stages = None
    if config.mesh.pp > 1:
        units = [[model.units[i] for run in runs for i in run] for runs in stage_chunks(config, model)]
        stages = [list(dict.fromkeys(flat.name for unit in held for flat in unit.all_flats)) for held in units]
    flats = [flat.spec for flat in model.flats]
    return Layout(config.mesh.axes, flats, rows_of(config, strategy), stages)


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """Build this rank's strategy: a ZeRO stage with its exchange, its reducer, and its gathered parameters."""
    choices, stage = config.gathering, STAGES[config.parallel.zero_stage]
    exchange = make_exchange(config)
    reducer = _reducer(config, exchange)
    if stage is not Zero3:
        return stage(comm, device, updater, reducer, InForward(exchange) if config.reduction.in_forward else None)
    turns = [turn.name for unit in model.units for turn in unit.turns()]
    residency = Residency(
        kept=frozenset(() if choices.reshard_after_forward else turns),
        keep_next=choices.keep_last_unit,
        root=frozenset(unit.name for unit in model.units if choices.keep_root_units and not is_block(unit.name)),
        persistent=frozenset(flat.name for flat in model.flats if choices.stays(flat.spec.num_parameters)),
    )
    prefetch: Prefetch | None = Units(choices.prefetch) if choices.prefetch else None
    if choices.prefetch_elements:
        prefetch = Elements(choices.prefetch_elements, choices.max_live)
    gathered = Secondary if config.mesh.secondary_shard else Gathered
    return Zero3(comm, device, updater, reducer, gathered(exchange, residency, prefetch))


def _reducer(config: RunConfig, exchange: Slices) -> Reducer:
    """Build the reducer, which decides when gradients are reduced."""
    stage, how, averages = config.parallel.zero_stage, config.reduction, "after"
    overlaps = config.parallel.overlap in ("reduce", "all")
    if stage > 1:
        each = config.parallel.replica_reduction == "micro_batch"
        averages = "each" if each else "last" if overlaps else "after"
    if how.bucket:
        lasting = stage == 3
        reducer: Reducer = OutOfBuffers(exchange, how.bucket, count=how.buffers, lasting=lasting, averages=averages)
    elif stage < 2:
        reducer = InBuckets(exchange, config.parallel.bucket_bytes, late=how.overlaps)
    else:
        reducer = AtOnce(exchange, late=how.overlaps, averages=averages)
    drains = config.mesh.pp > 1 and stage < 2 and not overlaps
    return AfterDrain(reducer) if drains else reducer


def join_by_itself(strategy: Strategy, flats: Sequence[Flat]) -> None:
    """Give a ZeRO stage that was built without a configuration its place in a mesh of one axis."""
    mesh = Mesh(dp_shard=strategy.comm.size)
    rows = zero_rows(strategy.stage or 0)
    strategy.join(Groups(mesh, strategy.comm), Layout(mesh, [flat.spec for flat in flats], rows))
