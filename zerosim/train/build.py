"""From a RunConfig to the parts of a run: model, optimizer step, strategy. One of each per rank, all alike."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.dtypes import dtype
from zerosim.functional.policy import ActivationPolicy
from zerosim.models.flat import FlatConfig, build_flat
from zerosim.models.gpt import GPTConfig, build_gpt
from zerosim.models.llama import LlamaConfig, build_llama
from zerosim.models.mlp import MLPConfig, build_mlp
from zerosim.models.model import Model
from zerosim.optim.adam import Adam
from zerosim.optim.control import StepControl
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.precision import LossScaler
from zerosim.optim.schedule import Schedule
from zerosim.optim.sgd import SGD
from zerosim.optim.updater import Updater
from zerosim.parallel.all_reduce import AllReduceZero1, AllReduceZero2
from zerosim.parallel.base import Strategy
from zerosim.parallel.ddp import DDP
from zerosim.parallel.owner import OwnerZero1, OwnerZero2, OwnerZero3
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import DATA
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys


def build_model(config: RunConfig, device: Device, *, first_micro_batch: int = 0) -> Model:
    """The model of a run, declared on `device` and not yet placed."""
    stored = dtype(config.precision.param_dtype)
    grads = dtype(config.recipe_choices.grad_dtype)
    keys = DropoutKeys(device, config.data.seed, first_micro_batch)
    if config.model.family == "mlp":
        return build_mlp(MLPConfig(config.model.layers, config.model.hidden, config.model.vocab), device, stored, grads)
    if config.model.family == "flat":
        assert config.model.params is not None  # config has filled them in
        assert config.model.units is not None
        return build_flat(
            FlatConfig(config.model.params, config.model.units, config.model.vocab), device, stored, grads
        )
    policy = ActivationPolicy(config.memory.saves, config.memory.attention, config.memory.recompute)
    if config.model.family == "llama":
        llama = LlamaConfig(
            config.model.layers,
            config.model.hidden,
            config.model.heads,
            config.model.kv_heads,
            config.model.ffn,
            config.model.vocab,
            config.model.tie_embeddings,
            config.model.norm_eps,
            config.model.rope_base,
        )
        return build_llama(llama, device, stored, grads, policy)
    gpt = GPTConfig(
        config.model.layers,
        config.model.hidden,
        config.model.heads,
        config.model.positions,
        config.model.vocab,
        config.model.tie_embeddings,
        config.model.dropout,
        config.model.ffn,
        config.model.norm_eps,
    )
    return build_gpt(gpt, device, stored, grads, keys, policy)


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
        keep_events=keep_events,
    )


MakeStrategy = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


def build_rank(
    ctx: Context, config: RunConfig, updater: Updater, make_strategy: MakeStrategy | None = None
) -> tuple[Model, Strategy]:
    """One rank's model, and the strategy that will place it; nothing takes memory yet."""
    groups = Groups(config.mesh.axes, ctx.comm)
    data_rank = config.mesh.axes.index(ctx.rank, *DATA)
    model = build_model(config, ctx.device, first_micro_batch=data_rank * config.data.accumulate)
    strategy = (make_strategy or build_strategy)(config, model, groups("dp_shard"), ctx.device, updater)
    if config.mesh.dp_replicate > 1:
        strategy.replicate(groups, at_each_micro_batch=config.parallel.replica_reduction == "micro_batch")
    return model, strategy


def place_rank(ctx: Context, model: Model, strategy: Strategy, write: Callable[[Flat], None]) -> None:
    """Take memory for the weights and the optimizer's state, and write the weights."""
    strategy.place(model.flats, write)
    ctx.device.mark("after_init")


def build_updater(config: RunConfig, steps: int, make_control: Callable[..., StepControl] = StepControl) -> Updater:
    """Optimizer, learning rates and loss scaling of a run; one per rank, all alike."""
    control = make_control(
        Schedule(config.optim.lr, config.optim.lr_schedule, config.optim.warmup, config.optim.min_lr, steps),
        scaler=_scaler(config),
        clip_norm=config.optim.clip_norm,
        skip_nonfinite=config.precision.skip_nonfinite,
    )
    return Updater(
        _optimizer(config), control, decay=config.optim.decay, upcast_grads=config.recipe_choices.upcast_grads
    )


def _optimizer(config: RunConfig) -> Optimizer:
    if config.optim.optimizer == "sgd":
        return SGD(config.optim.momentum, config.optim.resolved_weight_decay)
    decoupled = config.optim.optimizer == "adamw"
    return Adam(*config.optim.betas, config.optim.eps, config.optim.resolved_weight_decay, decoupled)


def _scaler(config: RunConfig) -> LossScaler | None:
    scale = config.precision.resolved_loss_scale
    if scale is None:
        return None
    if not isinstance(scale, str):
        return LossScaler(scale, dynamic=False)
    return LossScaler(
        2.0**config.precision.initial_scale_power,
        window=config.precision.loss_scale_window,
        hysteresis=config.precision.hysteresis,
        minimum=config.precision.min_loss_scale,
    )


def strategy_class(config: RunConfig) -> type[Strategy]:
    """The strategy of `--stage` 0..3. Stage 0 has no partition."""
    owner, all_reduce = config.parallel.partition == "owner", config.recipe_choices.grad_reduction == "all_reduce"
    if config.parallel.zero_stage == 0:
        return DDP
    if config.parallel.zero_stage == 1:
        return OwnerZero1 if owner else AllReduceZero1 if all_reduce else Zero1
    if config.parallel.zero_stage == 2:
        return OwnerZero2 if owner else AllReduceZero2 if all_reduce else Zero2
    return OwnerZero3 if owner else Zero3


def layout_of(config: RunConfig, model: Model) -> Layout:
    """Who holds what of a run, before any rank is there."""
    return Layout(config.mesh.axes, [flat.spec for flat in model.flats], strategy_class(config).rows())


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """This rank's strategy; what stays gathered is stage 3's choice."""
    choices, kind = config.recipe_choices, strategy_class(config)
    if not issubclass(kind, Zero3):
        return kind(comm, device, updater)
    return kind(
        comm,
        device,
        updater,
        kept=[] if config.parallel.reshard_after_forward else [unit.name for unit in model.units],
        keep_next=config.parallel.keep_last_unit,
        root=[unit.name for unit in model.units if choices.keep_root_units and not is_block(unit.name)],
        persistent=[flat.name for flat in model.flats if flat.numel < choices.persistent_numel],
        cast_shards=choices.cast_shards,
    )


def is_block(name: str) -> bool:
    """One of a list of equal units, such as h.3 or layers.3; the others are the root's."""
    return name.rpartition(".")[2].isdigit()
