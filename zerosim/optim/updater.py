"""One optimizer step, whichever the optimizer: masters and moments, unscaling, clipping, skipping, decay.

Owns what all ranks must decide alike (`judge`) and the update of one flat's own slice (`update`).
Holds no collectives: a strategy brings the norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerosim.device.device import Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import NonFiniteGradient
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.precision import LossScaler
from zerosim.optim.schedule import Schedule
from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step decided. `grad_norm` is unscaled and before clipping; `loss_scale` the one used."""

    grad_norm: float
    loss_scale: float
    skipped: bool
    lr: float


class Updater:
    """The same on every rank; `updates` counts the steps that were not skipped."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        scaler: LossScaler | None = None,
        clip_norm: float | None = None,
        decay: str = "all",
        skip_nonfinite: bool = False,
        upcast_grads: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.decay = decay
        self.skip_nonfinite = skip_nonfinite
        self.upcast_grads = upcast_grads
        self.updates = 0
        self.reports: list[StepReport] = []

    @property
    def stops_at_nonfinite(self) -> bool:
        return self.scaler is None and not self.skip_nonfinite

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def allocate(self, flat: Flat) -> None:
        """Master (half types only) and moments of the own slice, zeroed; live from start to end."""
        device, size, stored = flat.device, flat.own.size, compute_dtype(flat.dtype)
        count = self.optimizer.num_moments + flat.dtype.is_half
        states = [device.alloc((size,), stored, Kind.OPTIM, padding=flat.own.padding) for _ in range(count)]
        for state in states:
            device.kernel(0, device.backend.fill, state.array, 0.0)
        if flat.dtype.is_half:
            flat.master = states.pop()
        flat.moments = states

    def judge(self, scaled_norm: float) -> float | None:
        """What gradients are to be multiplied by, or None when this step is skipped; recorded.

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

    def update(self, flat: Flat, grad_scale: float) -> None:
        """Move the own slice of one flat by one step."""
        lr = self.reports[-1].lr
        weights, grad = flat.weights(), flat.grad_shard
        if grad is None:
            assert flat.own.size == 0
            return
        for start, stop, decays in _decay_ranges(flat, self.decay):
            self.optimizer.update(
                weights[start:stop],
                grad[start:stop],
                [moment[start:stop] for moment in flat.moments],
                grad_scale=grad_scale,
                lr=lr,
                step=self.updates,
                decays=decays,
            )


def _decay_ranges(flat: Flat, decay: str) -> list[tuple[int, int, bool]]:
    """The own slice cut where weight decay begins or ends, in elements from its start."""
    ranges: list[tuple[int, int, bool]] = []
    for mine in flat.spec.within(flat.own):
        stop = mine.at + mine.numel
        decays = decay == "all" or len(mine.weight.shape) >= 2
        if ranges and ranges[-1][2] == decays:
            ranges[-1] = (ranges[-1][0], stop, decays)
        else:
            ranges.append((mine.at, stop, decays))
    return ranges
