"""From a RunConfig to the parts of a run: model, optimizer step, strategy. One of each per rank, all alike."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context
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
    stored = dtype(config.precision)
    grads = dtype(config.schedule_choices.grad_dtype)
    keys = DropoutKeys(device, config.seed, first_micro_batch)
    if config.family == "mlp":
        return build_mlp(MLPConfig(config.layers, config.hidden, config.vocab), device, stored, grads)
    if config.family == "flat":
        assert config.params is not None  # config has filled them in
        assert config.units is not None
        return build_flat(FlatConfig(config.params, config.units, config.vocab), device, stored, grads)
    policy = ActivationPolicy(config.saves, config.attention, config.recompute)
    if config.family == "llama":
        llama = LlamaConfig(
            config.layers,
            config.hidden,
            config.heads,
            config.kv_heads,
            config.ffn,
            config.vocab,
            config.tie_embeddings,
            config.norm_eps,
            config.rope_base,
        )
        return build_llama(llama, device, stored, grads, policy)
    gpt = GPTConfig(
        config.layers,
        config.hidden,
        config.heads,
        config.positions,
        config.vocab,
        config.tie_embeddings,
        config.dropout,
        config.ffn,
        config.norm_eps,
    )
    return build_gpt(gpt, device, stored, grads, keys, policy)


MakeStrategy = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


def build_rank(
    ctx: Context, config: RunConfig, updater: Updater, make_strategy: MakeStrategy | None = None
) -> tuple[Model, Strategy]:
    """One rank's model, and the strategy that will place it; nothing takes memory yet."""
    groups = Groups(config.mesh, ctx.comm)
    data_rank = config.mesh.index(ctx.rank, *DATA)
    model = build_model(config, ctx.device, first_micro_batch=data_rank * config.accumulate)
    strategy = (make_strategy or build_strategy)(config, model, groups("dp_shard"), ctx.device, updater)
    if config.dp_replicate > 1:
        strategy.replicate(groups, at_each_micro_batch=config.replica_reduction == "micro_batch")
    return model, strategy


def place_rank(ctx: Context, model: Model, strategy: Strategy, write: Callable[[Flat], None]) -> None:
    """Take memory for the weights and the optimizer's state, and write the weights."""
    strategy.place(model.flats, write)
    ctx.device.mark("after_init")


def build_updater(config: RunConfig, steps: int, make_control: Callable[..., StepControl] = StepControl) -> Updater:
    """Optimizer, learning rates and loss scaling of a run; one per rank, all alike."""
    control = make_control(
        Schedule(config.lr, config.schedule, config.warmup, config.min_lr, steps),
        scaler=_scaler(config),
        clip_norm=config.clip_norm,
        skip_nonfinite=config.skip_nonfinite,
    )
    return Updater(_optimizer(config), control, decay=config.decay, upcast_grads=config.schedule_choices.upcast_grads)


def _optimizer(config: RunConfig) -> Optimizer:
    if config.optimizer == "sgd":
        return SGD(config.momentum, config.resolved_weight_decay)
    decoupled = config.optimizer == "adamw"
    return Adam(*config.betas, config.eps, config.resolved_weight_decay, decoupled)


def _scaler(config: RunConfig) -> LossScaler | None:
    scale = config.resolved_loss_scale
    if scale is None:
        return None
    if not isinstance(scale, str):
        return LossScaler(scale, dynamic=False)
    return LossScaler(
        2.0**config.initial_scale_power,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        minimum=config.min_loss_scale,
    )


def strategy_class(config: RunConfig) -> type[Strategy]:
    """The strategy of `--stage` 0..3. Stage 0 has no partition."""
    owner, all_reduce = config.partition == "owner", config.schedule_choices.grad_reduction == "all_reduce"
    if config.stage == 0:
        return DDP
    if config.stage == 1:
        return OwnerZero1 if owner else AllReduceZero1 if all_reduce else Zero1
    if config.stage == 2:
        return OwnerZero2 if owner else AllReduceZero2 if all_reduce else Zero2
    return OwnerZero3 if owner else Zero3


def layout_of(config: RunConfig, model: Model) -> Layout:
    """Who holds what of a run, before any rank is there."""
    return Layout(config.mesh, [flat.spec for flat in model.flats], strategy_class(config).rows())


def build_strategy(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
    """This rank's strategy; what stays gathered is stage 3's choice."""
    choices, kind = config.schedule_choices, strategy_class(config)
    if not issubclass(kind, Zero3):
        return kind(comm, device, updater)
    return kind(
        comm,
        device,
        updater,
        kept=[] if config.reshard_after_forward else [unit.name for unit in model.units],
        keep_next=config.keep_last_unit,
        root=[unit.name for unit in model.units if choices.keep_root_units and not is_block(unit.name)],
        persistent=[flat.name for flat in model.flats if flat.numel < choices.persistent_numel],
        cast_shards=choices.cast_shards,
    )


def is_block(name: str) -> bool:
    """One of a list of equal units, such as h.3 or layers.3; the others are the root's."""
    return name.rpartition(".")[2].isdigit()
