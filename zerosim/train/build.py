"""Build the parts of a run from a RunConfig: model, strategy, pipeline. Each rank has one of each, all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World, make_backend
from zerosim.comm.transports.fake import FakeTransport
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.dtypes import DType, dtype
from zerosim.functional.policy import ActivationPolicy
from zerosim.models.builder import Builder
from zerosim.models.decoder import build_decoder
from zerosim.models.flat import build_flat
from zerosim.models.mlp import build_mlp
from zerosim.models.model import Model
from zerosim.nn import Group, OffloadsSaves, Recompute, SavesOnHost, StoredInputs, Unit
from zerosim.nn.group import ONE_RANK
from zerosim.nn.rows import ALL_ROWS, OwnRows
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import ONE_STAGE, Pipeline, Schedule, schedule_of
from zerosim.parallel.sequence import RowBorders
from zerosim.parallel.tensor import Borders, TensorParallel
from zerosim.placement.families import DECODERS
from zerosim.placement.layout import Layout
from zerosim.placement.memories import HOST, NVME
from zerosim.placement.mesh import DATA, STATES
from zerosim.placement.spec import is_block
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys, LabelKeys
from zerosim.train.build_strategy import build_strategy, is_trained, layout_of, stage_chunks
from zerosim.train.check_model import check_model
from zerosim.train.repeated import Rehearsals, Rehearsed, RehearsedFlat, Repeated, rehearse

BUILDERS = {**dict.fromkeys(DECODERS, build_decoder), "mlp": build_mlp, "flat": build_flat}


class Whole(NamedTuple):
    """A run's whole model, declared without memory, and its layout. Each rank builds what it holds of it."""

    model: Model
    layout: Layout


def builder_of(config: RunConfig, device: Device, group: Group | None = None, *, first_micro_batch: int = 0) -> Builder:
    """Return the builder of a run's model and of its layers."""
    precision, memory = config.precision, config.memory
    return Builder(
        config.model,
        device,
        dtype(precision.stored),
        dtype(precision.grad_dtype),
        DropoutKeys(device, config.data.seed, first_micro_batch),
        ActivationPolicy(
            memory.saves, memory.attention, memory.recompute, memory.fp32_softmax, memory.offload_activations
        ),
        group or group_of(config),
        config.gathering.by_module,
        tuning=config.tuning,
        tiles=config.gathering.tiles,
    )


def declare(config: RunConfig) -> Whole:
    """Declare the whole model of a run. Raises: InputError if its buffers do not suit the configuration."""
    model = build_model(config, Device(0, make_backend("meta")))
    check_model(config, model)
    model.reach(trained_of(config, model))
    return Whole(model, layout_of(config, model))


def trained_of(config: RunConfig, model: Model) -> set[str]:
    """Return the names of the flat buffers that are trained."""
    return {flat.name for flat in model.flats if is_trained(config, flat.spec)}


def build_model(
    config: RunConfig,
    device: Device,
    group: Group | None = None,
    *,
    first_micro_batch: int = 0,
    only: Sequence[int] | None = None,
) -> Model:
    """Build the model of a run, declared on `device` and not yet placed; of its blocks `only` these numbers.

    Without a tensor-parallel `group` it has the first member's cut. Then it cannot run if the run has such a group.
    """
    new = replace(builder_of(config, device, group, first_micro_batch=first_micro_batch), only=only)
    model = BUILDERS[config.model.family](new)
    model.loss_mode = config.memory.loss
    model.label_keys = LabelKeys(device, config.data.seed, first_micro_batch)
    if (block := OPTIMIZERS[config.optim.optimizer].block) > 1:
        for flat in (flat for flat in model.flats if is_trained(config, flat.spec)):
            flat.spec = replace(flat.spec, block=block, members=config.mesh.shards)
    return model


def group_of(config: RunConfig, rank: int = 0, groups: Groups | None = None) -> Group:
    """Return the group that divides a rank's layers; without `groups` it only describes how weights are cut."""
    mesh, parallel = config.mesh.axes, config.parallel
    if mesh.tp == 1:
        return ONE_RANK
    index, comm = mesh.index(rank, "tp"), None if groups is None else groups("tp")
    by_rows = parallel.sequence_parallel
    maps = TensorParallel(
        mesh.tp,
        index,
        comm,
        RowBorders() if by_rows else Borders(),
        keeps_gathered=parallel.keep_gathered or not by_rows,
        pads_vocab=parallel.pad_vocab,
    )
    return Group(maps, OwnRows(mesh.tp, index) if by_rows else ALL_ROWS)


def world_of(
    config: RunConfig, *, keep_events: bool = False, folder: Path | None = None, cluster: Cluster | None = None
) -> World:
    """Return the world of a run: on one node or, with a `cluster`, on its nodes. Data on NVMe are files in
    `folder`."""
    return World(
        ranks=config.mesh.ranks,
        max_running=config.world.max_running,
        backend=config.world.backend,
        transport=config.world.transport,
        per_process=config.world.ranks_per_process,
        algorithm=config.world.algorithm,
        bucket_bytes=config.parallel.bucket_bytes,
        capacity=config.memory.capacity,
        allocator=config.memory.allocator,
        allocator_conf=config.memory.allocator_conf,
        node_ranks=node_ranks(config, cluster),
        others=node_memories(config, cluster),
        folder=folder,
        keep_events=keep_events,
    )


def node_ranks(config: RunConfig, cluster: Cluster | None) -> int:
    """Return how many neighbouring ranks share a node: a cluster's GPUs per node, else `--ranks-per-node`, or all."""
    return min(config.mesh.ranks, cluster.node_gpus if cluster else config.mesh.ranks_per_node or config.mesh.ranks)


def node_memories(config: RunConfig, cluster: Cluster | None) -> dict[str, int | None]:
    """Return the bytes of a node's memories that limit a run; None: not known. A cluster's limit only offloaded
    states."""
    return node_has(config, cluster if config.offload.is_on else None)


def node_has(config: RunConfig, cluster: Cluster | None) -> dict[str, int | None]:
    """Return the bytes of a node's memories beside the devices', as --host-memory or the cluster's node says; None: not
    known."""
    host, drives = (None, None) if cluster is None else (cluster.host_bytes, cluster.nvme_bytes)
    return {HOST: config.offload.host_memory or host, NVME: drives}


MakeStrategy = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


class Built(NamedTuple):
    """A rank's objects for training: its share of the model, the strategy that places it, its pipeline stage."""

    model: Model
    strategy: Strategy
    pipeline: Pipeline


def build_rank(
    ctx: Context,
    config: RunConfig,
    updater: Updater,
    make_strategy: MakeStrategy | None = None,
    schedule: Schedule | None = None,
    *,
    whole: Whole | None = None,
    repeats: Rehearsals | None = None,
) -> Built:
    """Build what one rank holds of the `whole` model, and the strategy that will place it, without allocating memory.

    `make_strategy` and a pipeline's `schedule` replace those of the configuration. `repeats`: on
    shapes, identical blocks run once (`repeated.py`), and their calls are stored there.
    """
    declared, layout = whole or declare(config)
    mesh, parallel, groups = config.mesh.axes, config.parallel, Groups(config.mesh.axes, ctx.comm)
    first, stage = mesh.index(ctx.rank, *DATA) * config.data.accumulate, mesh.index(ctx.rank, "pp")
    chunks = stage_chunks(config, declared)[stage]
    names = [declared.units[i].name for chunk in chunks for i in chunk]
    only = [int(name.rpartition(".")[2]) for name in names if is_block(name)]
    model = build_model(config, ctx.device, group_of(config, ctx.rank, groups), first_micro_batch=first, only=only)
    _keep_inputs(model, config, groups)
    copies = config.memory.stash_window or config.memory.offload_activations  # which pass from block to block
    alike = not copies and not (config.gathering.by_module and _defers(config))
    if repeats is not None and config.model.has_blocks and alike:
        _repeat_blocks(model, config, ctx, groups, repeats)
    model, pipeline = model.cut(declared, chunks), ONE_STAGE
    if mesh.pp > 1:
        order = schedule or schedule_of(parallel)
        keeps_last = parallel.keep_last_inputs
        pipeline = Pipeline(config.chunks, stage, groups("pp"), order=order, keeps_last=keeps_last)
    strategy = (make_strategy or build_strategy)(config, model, groups(*STATES), ctx.device, updater)
    strategy.join(groups, layout if make_strategy is None else layout_of(config, declared, strategy), config.grads)
    return Built(model, strategy, pipeline)


def _keep_inputs(model: Model, config: RunConfig, groups: Groups) -> None:
    """Set how recomputed blocks save their inputs: whole, in shards over tp, or on the host; and the window of blocks
    whose saved buffers wait on the host."""
    comm = groups("tp") if config.partitions_inputs else None
    memory = config.memory
    inputs = StoredInputs(comm, on_host=memory.cpu_checkpointing, window=memory.stash_window)
    saves = SavesOnHost(memory.stash_window)
    for unit in model.units:
        if isinstance(unit, Recompute):
            unit.inputs = inputs
        elif isinstance(unit, OffloadsSaves):
            unit.saves = saves


def _repeat_blocks(model: Model, config: RunConfig, ctx: Context, groups: Groups, found: Rehearsals) -> None:
    """Replace each block by a unit that repeats a block rehearsed on a separate device."""
    comm = groups("tp") if config.mesh.tp > 1 else None
    place = config.mesh.axes.index(ctx.rank, "tp")
    held = {unit.name: _kind(config, unit) for unit in model.units if is_block(unit.name)}

    def rehearsed(unit: Unit, shape: tuple[int, ...], dtype: DType) -> Rehearsed:
        flats = [(flat.adds_at_once, flat.dummies and flat.dummies.shapes) for flat in unit.all_flats]
        key = place, isinstance(unit, Recompute), unit.sends_back, shape, dtype.name, *flats, held[unit.name]
        if (one := found.get(key)) is None:
            one = found[key] = _rehearsed(config, ctx, unit, shape, dtype)
        return one

    model.units[:] = [Repeated(unit, comm, rehearsed) if is_block(unit.name) else unit for unit in model.units]


def _kind(config: RunConfig, unit: Unit) -> tuple[object, ...]:
    """Return what makes a block another one: what it has of its own, its parameters by their places in it, buffer by
    buffer, and whether the buffer is trained."""
    weights = [[weight.name.partition(f"{unit.name}.")[2] for weight in flat.spec.weights] for flat in unit.all_flats]
    kind = config.model.kind(int(unit.name.rpartition(".")[2]))
    return kind, *map(tuple, weights), *(is_trained(config, flat.spec) for flat in unit.all_flats)


def _rehearsed(config: RunConfig, ctx: Context, unit: Unit, shape: tuple[int, ...], dtype: DType) -> Rehearsed:
    """Rehearse a block like this one, on a device that is not counted."""
    device, world = Device(ctx.rank, ctx.device.backend), ctx.comm
    alone = Comm(device, FakeTransport(), world.ranks, algorithm=world.algorithm, bucket_bytes=world.bucket_bytes)
    groups = Groups(config.mesh.axes, alone)
    new = builder_of(config, device, group_of(config, ctx.rank, groups))
    model = BUILDERS[config.model.family](replace(new, flat=RehearsedFlat, only=[int(unit.name.rpartition(".")[2])]))
    _keep_inputs(model, config, groups)
    block = next(one for one in model.units if is_block(one.name))
    ranks = groups("tp").ranks
    pairs = zip(block.all_flats, unit.all_flats, strict=True)
    block.reach(unit.sends_back, {own.name for own, flat in pairs if flat.is_trained})
    return rehearse(block, unit, device, shape, dtype, ranks=ranks, defers=_defers(config))


def _defers(config: RunConfig) -> bool:
    """Return whether weights' gradients are computed separately from their inputs' gradients."""
    return config.mesh.pp > 1 and config.parallel.pipeline_schedule in ("zb-h1", "zb-v")


def place_rank(ctx: Context, model: Model, strategy: Strategy, write: Callable[[Flat, Group], None]) -> None:
    """Allocate memory for the weights and the optimizer's states, and write the weights."""
    strategy.place(model.flats, lambda flat: write(flat, model.group))
    ctx.device.mark("after_init")
