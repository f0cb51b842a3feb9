"""AdaGrad (Duchi et al., 2011) and RMSProp (Tieleman and Hinton, 2012), as PyTorch computes them: one state each.

    AdaGrad  sum = sum + g^2;                    w = w - lr * g / (sqrt(sum) + eps)
    RMSProp  v = alpha v + (1 - alpha) g^2;      w = w - lr * g / (sqrt(v) + eps)

eps is added outside the root. AdaGrad's steps only ever shrink; RMSProp forgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array
from zerosim.optim.elementwise import Elementwise, Now


@dataclass(frozen=True)
class AdaGrad(Elementwise):
    """Decay is added to the gradient."""

    eps: float = 1e-10
    weight_decay: float = 0.0
    flops: ClassVar[int] = 7
    states: ClassVar[tuple[str, ...]] = ("sum",)

    @property
    def foreach_temporaries(self) -> int:
        """Roots, and gradients with decay added."""
        return 2 if self.weight_decay else 1

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        (total,) = states
        if now.weight_decay:
            g += now.weight_decay * w
        total += g * g
        w -= now.lr * g / (xp.sqrt(total) + self.eps)


@dataclass(frozen=True)
class RMSProp(Elementwise):
    """Decay is added to the gradient. It has no momentum and is not centred."""

    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    flops: ClassVar[int] = 9
    states: ClassVar[tuple[str, ...]] = ("square_avg",)

    @property
    def foreach_temporaries(self) -> int:
        """Roots, and gradients with decay added."""
        return 2 if self.weight_decay else 1

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        (square_avg,) = states
        if now.weight_decay:
            g += now.weight_decay * w
        square_avg *= self.alpha
        square_avg += (1.0 - self.alpha) * g * g
        w -= now.lr * g / (xp.sqrt(square_avg) + self.eps)
