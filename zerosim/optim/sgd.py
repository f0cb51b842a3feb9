"""SGD, with momentum as PyTorch has it: buf = momentum * buf + g (no factor 1 - momentum), w = w - lr * buf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.backends.kernels import SGDStep
from zerosim.device.device import Buffer


@dataclass(frozen=True, slots=True)
class SGD:
    """Without momentum it keeps no state: K is the master alone. What its members are: `Optimizer`."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def foreach_temporaries(self) -> int:
        """Gradients with decay added (torch/optim/sgd.py)."""
        return 1 if self.weight_decay else 0

    def update(
        self,
        weights: Buffer,
        grad: Buffer,
        states: Mapping[str, Buffer],
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
            states["momentum_buffer"].array if self.momentum else None,
            SGDStep(grad_scale, lr, self.momentum, self.weight_decay if decays else 0.0, step),
        )
