"""Whether a step is taken, and with what: loss scaling, clipping, the learning rate. The same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zerosim.errors import NonFiniteGradient
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.precision import LossScaler


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step decided. `grad_norm` is unscaled and before clipping; `loss_scale` the one used; `estimated`: a
    second forward and backward followed, for an estimate of curvature."""

    grad_norm: float
    loss_scale: float
    skipped: bool
    lr: float
    estimated: bool = False


class StepControl:
    """Decides from the norm of the summed gradients. `updates` counts the steps that were not skipped."""

    def __init__(
        self,
        schedule: LRSchedule,
        *,
        scaler: LossScaler | None = None,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.schedule = schedule
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.updates = 0
        self.reports: list[StepReport] = []

    @property
    def stops_at_nonfinite(self) -> bool:
        """Whether `decide` raises for a norm that is not finite, rather than skip the step."""
        return self.scaler is None and not self.skip_nonfinite

    @property
    def loss_scale(self) -> float:
        """What the loss of the coming step is multiplied by: 1 without a scaler."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def lr(self) -> float:
        """The learning rate of the step that was decided last."""
        return self.reports[-1].lr

    def decide(self, scaled_norm: float) -> float | None:
        """What gradients are to be multiplied by, or None when this step is skipped; recorded.

        `scaled_norm` is that of all ranks' gradients as they are, still times the loss scale.

        Raises: NonFiniteGradient without a scaler (unless `skip_nonfinite`), LossScaleExhausted.
        """
        scale = self.loss_scale
        finite = math.isfinite(scaled_norm)
        if self.scaler is not None:
            self.scaler.update(not finite)
        elif not finite and not self.skip_nonfinite:
            raise NonFiniteGradient("a gradient is not finite")
        norm = scaled_norm / scale
        self.reports.append(StepReport(norm, scale, not finite, self.schedule(self.updates)))
        if not finite:
            return None
        # Clipping always multiplies (PyTorch's clip_grad_norm_: by at most 1), it never branches.
        clip = min(1.0, self.clip_norm / (norm + 1e-6)) if self.clip_norm is not None else 1.0
        self.updates += 1
        return clip / scale

    def is_due(self, every: int) -> bool:
        """Whether an estimate follows the step that was decided last: every so many steps, skipped ones too."""
        return every > 0 and len(self.reports) % every == 0

    def unscale(self, scaled_norm: float) -> float | None:
        """What an estimate's gradients are to be multiplied by, or None when they are not finite: what was estimated
        before stays. The loss scale is not told. Recorded.

        Raises: NonFiniteGradient where `decide` does.
        """
        self.reports[-1] = replace(self.reports[-1], estimated=True)
        if math.isfinite(scaled_norm):
            return 1.0 / self.loss_scale
        if self.stops_at_nonfinite:
            raise NonFiniteGradient("a gradient is not finite")
        return None
