"""SGD, with momentum as PyTorch has it: buf = momentum * buf + g (no factor 1 - momentum), w = w - lr * buf."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer


@dataclass(frozen=True, slots=True)
class SGD:
    """Without momentum it keeps no state: K is the master alone."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def num_moments(self) -> int:
        return 1 if self.momentum else 0

    def update(
        self,
        weights: Buffer,
        grad: Buffer,
        moments: list[Buffer],
        *,
        grad_scale: float,
        lr: float,
        step: int,
        decays: bool,
    ) -> None:
        weights.device.kernel(
            4 * weights.numel,
            weights.device.backend.sgd,
            weights.array,
            grad.array,
            moments[0].array if moments else None,
            grad_scale=grad_scale,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay if decays else 0.0,
            step=step,
        )
