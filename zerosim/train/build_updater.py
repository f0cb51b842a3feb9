"""Build the updater from a RunConfig: the optimizer, its learning rates, loss scaling and the rounding of weights."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.config import RunConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.precision import LossScaler
from zerosim.optim.rounding import Rounding
from zerosim.optim.temporaries import Temporaries
from zerosim.optim.updater import Updater
from zerosim.train.pieces import pieces_of


def build_updater(
    config: RunConfig,
    steps: int,
    make_control: Callable[..., StepControl] = StepControl,
    optimizer: Optimizer | None = None,
) -> Updater:
    """Build one updater per rank, all alike. A custom `optimizer` replaces the configuration's."""
    optim, made = config.optim, pieces_of(config)
    control = make_control(
        LRSchedule(optim.lr, optim.lr_schedule, optim.warmup, optim.min_lr, steps),
        scaler=_scaler(config.precision),
        clip_norm=optim.clip_norm or None,
        skip_nonfinite=config.precision.skip_nonfinite,
    )
    kind, rule = config.precision.rounding, optimizer or made.optimizer()
    return made.updater(
        rule,
        control,
        decay=optim.decay,
        sub_group=made.sub_group,
        cpu_steps=made.cpu_steps,
        temporaries=Temporaries(rule, foreach=optim.foreach, for_loop=optim.for_loop),
        lazy=optim.lazy_states,
        rounding=None if kind is None else Rounding(kind, config.data.seed),
    )


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
