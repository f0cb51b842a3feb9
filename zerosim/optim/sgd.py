"""SGD with momentum: PyTorch's, the textbooks', and Nesterov's.

torch     buf = momentum * buf + g, at step 1 buf = g: no factor 1 - momentum
ema       buf = momentum * buf + (1 - momentum) * g, starting at 0: steps are shorter by that factor
nesterov  the step is along g + momentum * buf
w = w - lr * buf
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array
from zerosim.optim.elementwise import Elementwise, Now


@dataclass(frozen=True)
class SGD(Elementwise):
    """Without momentum it has no state: K is only the master. `Optimizer` documents its members."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    ema: bool = False
    nesterov: bool = False
    flops: ClassVar[int] = 4

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def foreach_temporaries(self) -> int:
        """Gradients with decay added (torch/optim/sgd.py)."""
        return 1 if self.weight_decay else 0

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        if now.weight_decay:
            g += now.weight_decay * w
        for buf in states:
            if self.ema:
                buf *= self.momentum
                buf += (1.0 - self.momentum) * g
            elif now.step == 1:
                buf[...] = g
            else:
                buf *= self.momentum
                buf += g
            if self.nesterov:
                g += self.momentum * buf
            else:
                g[...] = buf
        g *= now.lr
        w -= g
