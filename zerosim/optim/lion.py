"""Lion (Chen et al., 2302.06675): the sign of an average of gradients, and one state.

    w = w (1 - lr * weight_decay)
    w = w - lr * sign(beta1 m + (1 - beta1) g)
    m = beta2 m + (1 - beta2) g             last: the step weights g differently from the stored average

Every weight moves by lr. Lion needs a learning rate 3 to 10 times smaller than Adam's, and a correspondingly larger
decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array
from zerosim.optim.elementwise import Elementwise, Now


@dataclass(frozen=True)
class Lion(Elementwise):
    """One state: 4 bytes per weight in fp32."""

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    flops: ClassVar[int] = 9
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        (exp_avg,) = states
        w *= 1.0 - now.lr * now.weight_decay
        w -= now.lr * xp.sign(self.beta1 * exp_avg + (1.0 - self.beta1) * g)
        exp_avg *= self.beta2
        exp_avg += (1.0 - self.beta2) * g
