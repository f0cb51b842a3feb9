"""From a RunConfig to a rank's strategy: who holds what, by which collectives it is exchanged, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.compression import COMPRESSED
from zerosim.parallel.ddp import DDP
from zerosim.parallel.exchange import AllReduce, KeepSlice, Owners, Slices
from zerosim.parallel.gathered import Elements, Gathered, Prefetch, Residency, Units
from zerosim.parallel.published import InForward
from zerosim.parallel.reducer import AfterDrain, AtOnce, InBuckets, OutOfBuffers, Reducer
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

STAGES: tuple[type[Stage], ...] = (DDP, Zero1, Zero2, Zero3)
EXCHANGES: Mapping[str, type[Slices]] = MappingProxyType({"reduce_scatter": Slices, "all_reduce": KeepSlice})


def exchange_class(config: RunConfig) -> type[Slices]:
    """By which collectives gradients and parameters are exchanged."""
    stage, compress = config.parallel.zero_stage, config.reduction.compress
    if stage == 0 or compress in COMPRESSED:
        return COMPRESSED.get(compress, AllReduce)
    if config.parallel.partition == "owner":
        return Owners
    return EXCHANGES[config.reduction.grad_reduction] if stage < 3 else Slices


IsTrained = Callable[[FlatSpec], bool]


def all_trained(flat: FlatSpec) -> bool:
    """That every flat buffer is."""
    return True


def rows_of(config: RunConfig, strategy: Strategy | None = None, is_trained: IsTrained = all_trained) -> RowsOf:
    """The rows of each flat buffer in a run: those of its stage, and what a `strategy` of one's own says of them."""
    exchange = strategy.exchange if isinstance(strategy, Stage) else exchange_class(config)
    stage = config.parallel.zero_stage
    if strategy is not None and strategy.stage is not None:
        stage = strategy.stage
    casts = stage == 3 and config.gathering.cast_shards and config.precision.has_masters
    rows = zero_rows(
        stage,
        exchange.partition,
        param="use" if casts else "always",
        grad="always" if config.grads.lasts else "step",
    )
    if strategy is not None:
        rows = rows_said(rows, keeps_params=strategy.keeps_params, keeps_grads=strategy.keeps_grads)
    trained, held = {**rows, **exchange.states}, frozen(rows)
    return lambda flat: trained if is_trained(flat) else held


def stage_chunks(config: RunConfig, whole: Model) -> list[list[range]]:
    """For each pipeline stage the runs of the whole model's units that it holds."""
    chunks = config.chunks
    names = [unit.name for unit in whole.units]
    sizes = config.layers_by_chunk(sum(is_block(name) for name in names))
    runs = cut_units(names, sizes, is_block)
    return [[runs[number] for number in chunks.of_stage(stage)] for stage in range(chunks.stages)]


def layout_of(
    config: RunConfig, model: Model, strategy: Strategy | None = None, is_trained: IsTrained = all_trained
) -> Layout:
    """Who holds what of a run of the whole `model`, before any rank is there."""
    stages = None
    if config.mesh.pp > 1:
        units = [[model.units[i] for run in runs for i in run] for runs in stage_chunks(config, model)]
        stages = [list(dict.fromkeys(flat.name for unit in held for flat in unit.all_flats)) for held in units]
    flats = [flat.spec for flat in model.flats]
    return Layout(config.mesh.axes, flats, rows_of(config, strategy, is_trained), stages)


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """This rank's strategy: a stage, of an exchange, a reducer, and when parameters are gathered."""
    choices, stage = config.gathering, STAGES[config.parallel.zero_stage]
    exchange = exchange_class(config)(config.reduction.allgather_bucket)
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
    return Zero3(comm, device, updater, reducer, Gathered(exchange, residency, prefetch))


def _reducer(config: RunConfig, exchange: Slices) -> Reducer:
    """When gradients are reduced."""
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
    """Give a stage that no configuration has built its place in a mesh of one axis."""
    mesh = Mesh(dp_shard=strategy.comm.size)
    rows = zero_rows(strategy.stage or 0)
    strategy.join(Groups(mesh, strategy.comm), Layout(mesh, [flat.spec for flat in flats], rows))
