"""The step of 1-bit Adam (arXiv 2102.02888, algorithm 1): Adam without bias correction, whose v freezes after the
warm-up.

After `warmup` steps the incoming gradient is the averaged momentum itself (`parallel/compression/onebit.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array
from zerosim.optim.elementwise import Elementwise, Now


@dataclass(frozen=True)
class OneBitAdamStep(Elementwise):
    """Two states, like Adam's. `Optimizer` documents its members."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 1
    flops: ClassVar[int] = 12

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        exp_avg, exp_avg_sq = states
        if now.step <= self.warmup:
            exp_avg *= self.beta1
            exp_avg += (1.0 - self.beta1) * g
            exp_avg_sq *= self.beta2
            exp_avg_sq += (1.0 - self.beta2) * (g * g)
        else:
            exp_avg[...] = g
        g[...] = exp_avg / (xp.sqrt(exp_avg_sq) + self.eps)
        if now.weight_decay:
            g += now.weight_decay * w
        g *= now.lr
        w -= g
