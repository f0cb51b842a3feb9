"""From a RunConfig to the parts of a run: model, strategy, pipeline. One of each per rank, all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World
from zerosim.config import RunConfig
from zerosim.config.model import ModelConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.dtypes import DType, dtype
from zerosim.functional.policy import ActivationPolicy
from zerosim.models.flat import FlatConfig, build_flat
from zerosim.models.gpt import GPTConfig, build_gpt
from zerosim.models.llama import LlamaConfig, build_llama
from zerosim.models.mlp import MLPConfig, build_mlp
from zerosim.models.model import Model
from zerosim.nn import Alone, KeptInputs, Recompute
from zerosim.optim.updater import Updater
from zerosim.parallel.all_reduce import AllReduceZero1, AllReduceZero2
from zerosim.parallel.base import Strategy
from zerosim.parallel.bucket import ReduceBuffers
from zerosim.parallel.ddp import DDP
from zerosim.parallel.owner import OwnerZero1, OwnerZero2, OwnerZero3
from zerosim.parallel.pipeline import ONE_STAGE, SCHEDULES, Pipeline, Schedule
from zerosim.parallel.sequence import SequenceParallel
from zerosim.parallel.tensor import TensorParallel, vocab_padding
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Ahead, Zero3
from zerosim.placement.layout import Layout, Rows
from zerosim.placement.mesh import DATA, Mesh
from zerosim.placement.spec import is_block
from zerosim.placement.stages import cut_units
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys, LabelKeys


def build_model(config: RunConfig, device: Device, group: Alone | None = None, *, first_micro_batch: int = 0) -> Model:
    """The model of a run, declared on `device` and not yet placed.

    Without a tensor-parallel `group` it is cut as the first member of one holds it, and cannot run where there is one.
    """
    formats = dtype(config.precision.stored), dtype(config.precision.grad_dtype)
    keys = DropoutKeys(device, config.data.seed, first_micro_batch)
    memory = config.memory
    policy = ActivationPolicy(memory.saves, memory.attention, memory.recompute)
    group = group or tensor_group(config)
    padding = vocab_padding(config.model.vocab, config.mesh.axes.tp, padded=config.parallel.pad_vocab)
    by_module = config.gathering.by_module
    model = _model(config.model, device, formats, keys, policy, group, padding, by_module=by_module)
    model.loss_mode = config.memory.loss
    model.label_keys = LabelKeys(device, config.data.seed, first_micro_batch)
    if (block := OPTIMIZERS[config.optim.optimizer].block) > 1:
        for flat in model.flats:
            flat.spec = replace(flat.spec, block=block, members=config.mesh.dp_shard)
    return model


def tensor_group(config: RunConfig, rank: int = 0, groups: Groups | None = None) -> Alone:
    """A rank's tensor-parallel group; without `groups` it only says how weights are cut."""
    mesh = config.mesh.axes
    if mesh.tp == 1:
        return Alone()
    index, comm = mesh.index(rank, "tp"), None if groups is None else groups("tp")
    if config.parallel.sequence_parallel:
        return SequenceParallel(mesh.tp, index, comm, keeps_gathered=config.parallel.keep_gathered)
    return TensorParallel(mesh.tp, index, comm)


def _model(
    sizes: ModelConfig,
    device: Device,
    formats: tuple[DType, DType],
    keys: DropoutKeys,
    policy: ActivationPolicy,
    group: Alone,
    padding: int,
    *,
    by_module: bool,
) -> Model:
    """Parameters and gradients are stored in `formats`."""
    if sizes.family == "mlp":
        return build_mlp(MLPConfig(sizes.layers, sizes.hidden, sizes.vocab), device, *formats, by_module=by_module)
    if sizes.family == "flat":
        assert sizes.params is not None  # config has filled them in
        assert sizes.units is not None
        return build_flat(FlatConfig(sizes.params, sizes.units, sizes.vocab), device, *formats, group)
    if sizes.family == "llama":
        llama = LlamaConfig(
            sizes.layers,
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.ffn,
            sizes.vocab,
            sizes.tie_embeddings,
            sizes.norm_eps,
            sizes.rope_base,
        )
        return build_llama(llama, device, *formats, policy, group, padding, by_module=by_module)
    gpt = GPTConfig(
        sizes.layers,
        sizes.hidden,
        sizes.heads,
        sizes.positions,
        sizes.vocab,
        sizes.tie_embeddings,
        sizes.dropout,
        sizes.ffn,
        sizes.norm_eps,
    )
    return build_gpt(gpt, device, *formats, keys, policy, group, padding, by_module=by_module)


def world_of(config: RunConfig, *, keep_events: bool = False) -> World:
    """The world that a run asks for."""
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
        keep_events=keep_events,
    )


MakeStrategy = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


class Built(NamedTuple):
    """What a rank trains: its part of the model, the strategy that places it, its stage of the pipeline."""

    model: Model
    strategy: Strategy
    pipeline: Pipeline


def build_rank(
    ctx: Context,
    config: RunConfig,
    updater: Updater,
    make_strategy: MakeStrategy | None = None,
    schedule: Schedule | None = None,
) -> Built:
    """One rank's model, and the strategy that will place it; nothing takes memory yet.

    `make_strategy` and a pipeline's `schedule` take the place of those that the configuration names.
    """
    groups = Groups(config.mesh.axes, ctx.comm)
    data_rank = config.mesh.axes.index(ctx.rank, *DATA)
    group = tensor_group(config, ctx.rank, groups)
    whole = build_model(config, ctx.device, group, first_micro_batch=data_rank * config.data.accumulate)
    _keep_inputs(whole, config, groups)
    mesh, parallel = config.mesh.axes, config.parallel
    model, pipeline = whole, ONE_STAGE
    if mesh.pp > 1:
        stage = mesh.index(ctx.rank, "pp")
        order = schedule or SCHEDULES[parallel.pipeline_schedule]
        pipeline = Pipeline(mesh.pp, stage, groups("pp"), order=order, chunks=parallel.num_chunks)
        model = whole.cut(stage_chunks(config, whole)[stage])
    strategy = (make_strategy or build_strategy)(config, model, groups("dp_shard"), ctx.device, updater)
    if mesh != Mesh(dp_shard=mesh.world_size):
        at_each = parallel.replica_reduction == "micro_batch"
        strategy.join(groups, layout_of(config, whole, strategy.rows()), at_each_micro_batch=at_each)
    return Built(model, strategy, pipeline)


def _keep_inputs(model: Model, config: RunConfig, groups: Groups) -> None:
    """How blocks that run again keep their inputs: whole, in parts over tp, on the host."""
    comm = groups("tp") if config.partitions_inputs else None
    inputs = KeptInputs(comm, on_host=config.memory.cpu_checkpointing)
    for unit in model.units:
        if isinstance(unit, Recompute):
            unit.inputs = inputs


def stage_chunks(config: RunConfig, whole: Model) -> list[list[range]]:
    """For each pipeline stage the runs of the whole model's units that it holds."""
    pp, chunks = config.mesh.pp, config.parallel.num_chunks
    names = [unit.name for unit in whole.units]
    sizes = config.layers_by_chunk(sum(is_block(name) for name in names))
    runs = cut_units(names, sizes, is_block)
    return [[runs[chunk * pp + stage] for chunk in range(chunks)] for stage in range(pp)]


def place_rank(ctx: Context, model: Model, strategy: Strategy, write: Callable[[Flat, Alone], None]) -> None:
    """Take memory for the weights and the optimizer's state, and write the weights."""
    strategy.place(model.flats, lambda flat: write(flat, model.group))
    ctx.device.mark("after_init")


def strategy_class(config: RunConfig) -> type[Strategy]:
    """The strategy of `--stage` 0..3. Stage 0 has no partition."""
    owner, all_reduce = config.parallel.partition == "owner", config.reduction.grad_reduction == "all_reduce"
    if config.parallel.zero_stage == 0:
        return DDP
    if config.parallel.zero_stage == 1:
        return OwnerZero1 if owner else AllReduceZero1 if all_reduce else Zero1
    if config.parallel.zero_stage == 2:
        return OwnerZero2 if owner else AllReduceZero2 if all_reduce else Zero2
    return OwnerZero3 if owner else Zero3


def layout_of(config: RunConfig, model: Model, rows: Rows | None = None) -> Layout:
    """Who holds what of a run of the whole `model`, before any rank is there."""
    stages = None
    if config.mesh.pp > 1:
        units = [[model.units[i] for run in runs for i in run] for runs in stage_chunks(config, model)]
        stages = [list(dict.fromkeys(flat.name for unit in held for flat in unit.all_flats)) for held in units]
    flats = [flat.spec for flat in model.flats]
    return Layout(config.mesh.axes, flats, rows or strategy_class(config).rows(), stages)


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """This rank's strategy; what stays gathered is stage 3's choice."""
    reduction, kind = config.reduction, strategy_class(config)
    if issubclass(kind, Zero3):
        strategy: Strategy = _zero3(config, model, kind, comm, device, updater)
    else:
        strategy = kind(comm, device, updater)
    if reduction.bucket:
        lasting = not strategy.keeps_params
        strategy.buffers = ReduceBuffers(device, reduction.bucket, count=reduction.buffers, lasting=lasting)
    strategy.allgather_bucket = reduction.allgather_bucket
    strategy.overlaps = reduction.overlaps
    return strategy


def _zero3(config: RunConfig, model: Model, kind: type[Zero3], comm: Comm, device: Device, updater: Updater) -> Zero3:
    choices = config.gathering
    return kind(
        comm,
        device,
        updater,
        kept=[] if choices.reshard_after_forward else [turn.name for unit in model.units for turn in unit.turns()],
        keep_next=choices.keep_last_unit,
        root=[unit.name for unit in model.units if choices.keep_root_units and not is_block(unit.name)],
        persistent=[flat.name for flat in model.flats if choices.stays(flat.spec.num_parameters)],
        cast_shards=choices.cast_shards,
        prefetch=choices.prefetch,
        ahead=Ahead(choices.prefetch_elements, choices.max_live),
    )
