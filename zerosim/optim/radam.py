"""RAdam (Liu et al., 1908.03265), as PyTorch computes it: Adam whose first steps wait until v can be trusted.

    rho_inf = 2 / (1 - beta2) - 1,  rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
    rho > 5   w = w - lr * r * m_hat / (sqrt(v_hat) + eps),
              r^2 = (rho - 4)(rho - 2) rho_inf / ((rho_inf - 4)(rho_inf - 2) rho)
    else      w = w - lr * m_hat: momentum alone

The paper rectifies from rho > 4 on, which for beta2 = 0.999 is step 5, PyTorch from step 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array
from zerosim.optim.elementwise import Elementwise, Now


@dataclass(frozen=True)
class RAdam(Elementwise):
    """Decay is added to the gradient. Two states: 8 bytes per weight in fp32."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    flops: ClassVar[int] = 14
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def rectification(self, step: int) -> float | None:
        """Return r of step t = 1, 2, ...; None while the variance of v is not known to be finite."""
        most = 2.0 / (1.0 - self.beta2) - 1.0
        now = most - 2.0 * step * self.beta2**step / (1.0 - self.beta2**step)
        if now <= 5.0:
            return None
        return math.sqrt((now - 4.0) * (now - 2.0) * most / ((most - 4.0) * (most - 2.0) * now))

    @property
    def foreach_temporaries(self) -> int:
        """Roots, and gradients with decay added."""
        return 2 if self.weight_decay else 1

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        exp_avg, exp_avg_sq = states
        if now.weight_decay:
            g += now.weight_decay * w
        exp_avg += (1.0 - self.beta1) * (g - exp_avg)
        exp_avg_sq *= self.beta2
        exp_avg_sq += (1.0 - self.beta2) * g * g
        step_size, rectified = now.lr / (1.0 - self.beta1**now.step), self.rectification(now.step)
        if rectified is None:
            w -= step_size * exp_avg
        else:
            step_size *= rectified * math.sqrt(1.0 - self.beta2**now.step)
            w -= step_size * exp_avg / (xp.sqrt(exp_avg_sq) + self.eps)
