"""Adam (Kingma and Ba, 1412.6980) and AdamW (Loshchilov and Hutter, 1711.05101), as PyTorch computes them.

    g = gradient                    (Adam: g += weight_decay * w; AdamW: w *= 1 - lr * weight_decay)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

eps is added outside the root, after bias correction. The kernel is `backend.adam`; the rule is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import AdamStep, Array, Storing
from zerosim.device.device import Buffer
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.optim.optimizer import States, Step


@dataclass(frozen=True)
class Adam(Elementwise):
    """`decoupled` makes it AdamW. Two states: 8 bytes per weight in fp32. `Optimizer` documents its members."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    flops: ClassVar[int] = 15
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @property
    def foreach_temporaries(self) -> int:
        """The roots of exp_avg_sq and, if decay is added to gradients, those sums (torch/optim/adam.py)."""
        return 1 if self.decoupled or not self.weight_decay else 2

    @property
    def loop_temporaries(self) -> int:
        """The loop divides the roots by the bias correction into a new array (_single_tensor_adam)."""
        return self.foreach_temporaries + 1

    def update(
        self, weights: Buffer, grad: Buffer, states: States, now: Step, *, decays: bool, storing: Storing | None = None
    ) -> None:
        if storing is not None:
            super().update(weights, grad, states, now, decays=decays, storing=storing)
            return
        weights.device.kernel(
            self.flops * weights.numel,
            weights.device.backend.adam,
            weights.array,
            grad.array,
            states["exp_avg"].array,
            states["exp_avg_sq"].array,
            self.numbers(now, decays=decays),
        )

    def numbers(self, now: Step, *, decays: bool) -> AdamStep:
        """Return the backend kernel's numbers of a step."""
        weight_decay = self.weight_decay if decays else 0.0
        return AdamStep(
            now.grad_scale, now.lr, self.beta1, self.beta2, self.eps, weight_decay, self.decoupled, now.number
        )

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        """Give the kernel's bits, for weights stored in fewer bits than they are updated in."""
        exp_avg, exp_avg_sq = states
        if self.decoupled:
            w *= 1.0 - now.lr * now.weight_decay
        elif now.weight_decay:
            g += now.weight_decay * w
        exp_avg += (g - exp_avg) * (1.0 - self.beta1)
        exp_avg_sq *= self.beta2
        exp_avg_sq += g * (1.0 - self.beta2) * g
        root = xp.sqrt(exp_avg_sq)
        root /= math.sqrt(1.0 - self.beta2**now.step)
        root += self.eps
        w -= now.lr / (1.0 - self.beta1**now.step) * exp_avg / root
