"""Build the updater from a RunConfig: the optimizer, its learning rates, loss scaling and the rounding of weights."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.config import RunConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.optim.adafactor import Adafactor, AdafactorHF
from zerosim.optim.adagrad import AdaGrad, RMSProp
from zerosim.optim.adam import Adam
from zerosim.optim.adam8bit import Adam8bit
from zerosim.optim.control import StepControl
from zerosim.optim.lion import Lion
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.muon import Muon
from zerosim.optim.onebit_adam import OneBitAdamStep
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.precision import LossScaler
from zerosim.optim.radam import RAdam
from zerosim.optim.rounding import Rounding
from zerosim.optim.sage import AdamSAGE
from zerosim.optim.sgd import SGD
from zerosim.optim.sophia import SophiaG
from zerosim.optim.updater import Updater
from zerosim.placement.memories import NVME


def build_updater(
    config: RunConfig,
    steps: int,
    make_control: Callable[..., StepControl] = StepControl,
    optimizer: Optimizer | None = None,
) -> Updater:
    """Build one updater per rank, all alike. A custom `optimizer` replaces the configuration's."""
    optim = config.optim
    control = make_control(
        LRSchedule(optim.lr, optim.lr_schedule, optim.warmup, optim.min_lr, steps),
        scaler=_scaler(config.precision),
        clip_norm=optim.clip_norm,
        skip_nonfinite=config.precision.skip_nonfinite,
    )
    kind = config.precision.rounding
    return Updater(
        optimizer or _compressed(config) or _optimizer(optim, config.global_batch * config.model.seq),
        control,
        decay=optim.decay,
        sub_group=optim.sub_group or int(config.offload.memory_of("optimizer") == NVME),  # a tile: one flat or more
        foreach=optim.foreach,
        lazy=optim.lazy_states,
        rounding=None if kind is None else Rounding(kind, config.data.seed),
    )


def _compressed(config: RunConfig) -> Optimizer | None:
    """Return the update step of a gradient compression; None: the optimizer's own."""
    optim, how = config.optim, config.reduction
    if how.compress == "onebit-adam":
        return OneBitAdamStep(*optim.betas, optim.eps, optim.weight_decay, how.warmup)
    return SGD(0.0, optim.weight_decay) if how.compress == "dgc" else None  # the exchange applies the momentum


def _optimizer(optim: OptimConfig, tokens: int) -> Optimizer:
    """Build the optimizer. `tokens`: targets in the global batch."""
    name, betas, eps, decay = optim.optimizer, optim.betas, optim.eps, optim.weight_decay
    makes: dict[str, Callable[[], Optimizer]] = {
        "adam": lambda: Adam(*betas, eps, decay),
        "adamw": lambda: Adam(*betas, eps, decay, decoupled=True),
        "adam8bit": lambda: Adam8bit(*betas, eps, decay),
        "radam": lambda: RAdam(*betas, eps, decay),
        "adam-sage": lambda: AdamSAGE(*betas, eps=eps, weight_decay=decay),
        "lion": lambda: Lion(*betas, decay),
        "sophia": lambda: SophiaG(tokens, *betas, decay, estimates_every=OPTIMIZERS[name].estimates_every),
        "adagrad": lambda: AdaGrad(eps, decay),
        "rmsprop": lambda: RMSProp(eps=eps, weight_decay=decay),
        "adafactor": lambda: Adafactor(decay),
        "adafactor-hf": lambda: AdafactorHF(
            decay, optim.momentum or None, optim.scale_parameter, relative_step=optim.relative_step
        ),
        "muon": lambda: Muon(
            optim.momentum,
            decay,
            Adam(*betas, eps, decay, decoupled=True),
            optim.aux_lr / optim.lr,
        ),
        "sgd": lambda: SGD(optim.momentum, decay, ema=optim.momentum_form == "ema", nesterov=optim.nesterov),
    }
    return makes[name]()


def _scaler(precision: PrecisionConfig) -> LossScaler | None:
    scale = precision.loss_scale
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
