"""Adam (Kingma and Ba, 1412.6980) and AdamW (Loshchilov and Hutter, 1711.05101), as PyTorch computes them.

    g = gradient                    (Adam: g += weight_decay * w; AdamW: w *= 1 - lr * weight_decay)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

eps stands outside the root, after bias correction. The kernel is `backend.adam`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosim.backends.kernels import AdamStep
from zerosim.device.device import Buffer


@dataclass(frozen=True, slots=True)
class Adam:
    """`decoupled` makes it AdamW. Two states: 8 bytes per weight in fp32. What its members are: `Optimizer`."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def foreach_temporaries(self) -> int:
        """The roots of exp_avg_sq and, where decay is added to gradients, those sums (torch/optim/adam.py)."""
        return 1 if self.decoupled or not self.weight_decay else 2

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
        weight_decay = self.weight_decay if decays else 0.0
        weights.device.kernel(
            15 * weights.numel,
            weights.device.backend.adam,
            weights.array,
            grad.array,
            states["exp_avg"].array,
            states["exp_avg_sq"].array,
            AdamStep(grad_scale, lr, self.beta1, self.beta2, self.eps, weight_decay, self.decoupled, step),
        )
