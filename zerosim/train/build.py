"""From a RunConfig to the parts of a run: model, optimizer step, strategy. One of each per rank, all alike."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.comm.collectives import Comm
from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World
from zerosim.config import RunConfig
from zerosim.config.model import ModelConfig
from zerosim.config.parts import OptimConfig, PrecisionConfig
from zerosim.device.device import Device
from zerosim.dtypes import DType, dtype
from zerosim.functional.policy import ActivationPolicy
from zerosim.models.flat import FlatConfig, build_flat
from zerosim.models.gpt import GPTConfig, build_gpt
from zerosim.models.llama import LlamaConfig, build_llama
from zerosim.models.mlp import MLPConfig, build_mlp
from zerosim.models.model import Model
from zerosim.optim.adam import Adam
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.precision import LossScaler
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
from zerosim.placement.mesh import COPIES, DATA
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys


def build_model(config: RunConfig, device: Device, *, first_micro_batch: int = 0) -> Model:
    """The model of a run, declared on `device` and not yet placed."""
    formats = dtype(config.precision.param_dtype), dtype(config.recipe_choices.grad_dtype)
    keys = DropoutKeys(device, config.data.seed, first_micro_batch)
    memory = config.memory
    policy = ActivationPolicy(memory.saves, memory.attention, memory.recompute)
    return _model(config.model, device, formats, keys, policy)


def _model(
    sizes: ModelConfig, device: Device, formats: tuple[DType, DType], keys: DropoutKeys, policy: ActivationPolicy
) -> Model:
    """Parameters and gradients are stored in `formats`."""
    if sizes.family == "mlp":
        return build_mlp(MLPConfig(sizes.layers, sizes.hidden, sizes.vocab), device, *formats)
    if sizes.family == "flat":
        assert sizes.params is not None  # config has filled them in
        assert sizes.units is not None
        return build_flat(FlatConfig(sizes.params, sizes.units, sizes.vocab), device, *formats)
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
        return build_llama(llama, device, *formats, policy)
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
    return build_gpt(gpt, device, *formats, keys, policy)


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
    if config.mesh.axes.size(*COPIES) > 1:
        strategy.replicate(groups, at_each_micro_batch=config.parallel.replica_reduction == "micro_batch")
    return model, strategy


def place_rank(ctx: Context, model: Model, strategy: Strategy, write: Callable[[Flat], None]) -> None:
    """Take memory for the weights and the optimizer's state, and write the weights."""
    strategy.place(model.flats, write)
    ctx.device.mark("after_init")


def build_updater(config: RunConfig, steps: int, make_control: Callable[..., StepControl] = StepControl) -> Updater:
    """Optimizer, learning rates and loss scaling of a run; one per rank, all alike."""
    optim = config.optim
    control = make_control(
        LRSchedule(optim.lr, optim.lr_schedule, optim.warmup, optim.min_lr, steps),
        scaler=_scaler(config.precision),
        clip_norm=optim.clip_norm,
        skip_nonfinite=config.precision.skip_nonfinite,
    )
    return Updater(_optimizer(optim), control, decay=optim.decay, upcast_grads=config.recipe_choices.upcast_grads)


def _optimizer(optim: OptimConfig) -> Optimizer:
    if optim.optimizer == "sgd":
        return SGD(optim.momentum, optim.resolved_weight_decay)
    return Adam(*optim.betas, optim.eps, optim.resolved_weight_decay, decoupled=optim.optimizer == "adamw")


def _scaler(precision: PrecisionConfig) -> LossScaler | None:
    scale = precision.resolved_loss_scale
    if scale is None:
        return None
    if not isinstance(scale, str):
        return LossScaler(scale, dynamic=False)
    return LossScaler(
        2.0**precision.initial_scale_power,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        minimum=precision.min_loss_scale,
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
