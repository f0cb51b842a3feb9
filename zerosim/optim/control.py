"""Decide each step: loss scaling, skipping, clipping, the learning rate. The decision is the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zerosim.errors import NonFiniteGradient
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.precision import LossScaler


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step's decisions. `grad_norm` is unscaled and before clipping (None: no norm was computed); `loss_scale` is
    the scale used; `estimated`: a second forward and backward followed, for an estimate of curvature."""

    grad_norm: float | None
    loss_scale: float
    skipped: bool
    lr: float
    estimated: bool = False


class StepControl:
    """Decides from the norm of the summed gradients. `updates` counts the steps not skipped."""

    def __init__(
        self,
        schedule: LRSchedule,
        *,
        scaler: LossScaler | None = None,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        self.schedule, self.scaler = schedule, scaler
        self.clip_norm, self.skip_nonfinite = clip_norm, skip_nonfinite
        self.updates = 0
        self.reports: list[StepReport] = []

    @property
    def stops_at_nonfinite(self) -> bool:
        """Whether `decide` raises for a norm that is not finite, instead of skipping the step."""
        return self.scaler is None and not self.skip_nonfinite

    @property
    def loss_scale(self) -> float:
        """The factor of the next step's loss: 1 without a scaler."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def lr(self) -> float:
        """The learning rate of the last decided step."""
        return self.reports[-1].lr

    def decide(self, scaled_norm: float) -> float | None:
        """Return the factor of the gradients, or None to skip this step, and record the decision.

        `scaled_norm` is the norm of all ranks' gradients, still times the loss scale.

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

    def decide_unseen(self) -> float:
        """Decide before there are gradients: nothing is clipped, and no step is skipped. Return their factor."""
        self.reports.append(StepReport(None, self.loss_scale, False, self.schedule(self.updates)))
        self.updates += 1
        return 1.0 / self.loss_scale

    def is_due(self, every: int) -> bool:
        """Return whether an estimate follows the last decided step. Skipped steps count too."""
        return every > 0 and len(self.reports) % every == 0

    def unscale(self, scaled_norm: float) -> float | None:
        """Return the factor of an estimate's gradients, or None if they are not finite: then the earlier estimate
        stays. The loss scale does not change. The decision is recorded.

        Raises: NonFiniteGradient in the same cases as `decide`.
        """
        self.reports[-1] = replace(self.reports[-1], estimated=True)
        if math.isfinite(scaled_norm):
            return 1.0 / self.loss_scale
        if self.stops_at_nonfinite:
            raise NonFiniteGradient("a gradient is not finite")
        return None
