"""Sophia-G (Liu et al., 2305.14342): a step that an estimate of the curvature scales, and a clip bounds where the loss
is flat.

    m = beta1 m + (1 - beta1) g
    w = w (1 - lr * weight_decay)
    w = w - lr * sign(m) * min(|m| / (rho * tokens * h + 1e-15), 1)
    h = beta2 h + (1 - beta2) g_hat^2      after every 10th step

`g_hat` is the gradient of the mean loss on labels drawn from the model (Gauss-Newton-Bartlett), from a second forward
and backward on the step's inputs (`EstimatesCurvature`). `tokens` are those of the global batch. Until the first
estimate h is 0 and every weight moves by lr, as with Lion.

Bytes: two states, 8 per weight in fp32, as Adam. Traffic: an estimate gathers and reduces like forward and backward,
and publishes nothing. Over ten steps that is 1 + 1/10 of a step's forward and backward: 2.2 Psi for DDP, 2.1 Psi for
ZeRO-1 and 2, 3.3 Psi for ZeRO-3.

Source: the authors' code (sophia.py, train_sophiag.py), which differs from the paper's text in its constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from zerosim.backends.kernels import Array, Rule
from zerosim.device.work import VECTOR, KernelWork
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.tensor.flat import Flat


@dataclass(frozen=True)
class SophiaG(Elementwise):
    """Decoupled decay. `tokens`: targets in the global batch, the authors' bs."""

    tokens: int
    beta1: float = 0.965
    beta2: float = 0.99
    weight_decay: float = 0.1
    rho: float = 0.04
    estimates_every: int = 10
    flops: ClassVar[int] = 11
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "hessian")

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        exp_avg, hessian = states
        exp_avg *= self.beta1
        exp_avg += (1.0 - self.beta1) * g
        w *= 1.0 - now.lr * now.weight_decay
        ratio = xp.minimum(xp.abs(exp_avg) / (self.rho * self.tokens * hessian + 1e-15), 1.0)
        w -= now.lr * xp.sign(exp_avg) * ratio

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        grad, hessian, device = flat.grad_shard, flat.states["hessian"], flat.device
        assert grad is not None, f"{flat.name} has no gradient"
        kept = hessian.nbytes
        work = KernelWork("hessian", VECTOR, 5 * hessian.numel, kept + grad.nbytes, kept)
        k = device.backend
        device.kernels([work], k.elementwise, Rule(self.average, self.beta2, grad_scale), grad.array, hessian.array)

    @staticmethod
    def average(xp: Any, hessian: Array, g: Array, beta2: float) -> None:
        """Update h; a rule for `Backend.elementwise`."""
        hessian *= beta2
        hessian += (1.0 - beta2) * g * g
