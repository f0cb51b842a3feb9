"""Adafactor (Shazeer and Stern, 1804.04235), as PyTorch has it and as Hugging Face's transformers has it.

PyTorch's (torch/optim/_adafactor.py), t counted from 1, rms(x) = sqrt(mean of x^2), e the dtype's epsilon:

    alpha = max(1e-3, rms(w)) min(lr, t^-1/2)       w before it decays
    w = w (1 - lr weight_decay)
    R += t^-0.8 (row means of g^2 - R)              C likewise; vectors: v of g^2 itself
    U = g / sqrt(max(R C / max(mean R, e), e^2))
    w -= alpha U / max(1, rms(U))

transformers' (optimization.py):

    u = g^2 + 1e-30
    R = (1 - t^-0.8) R + t^-0.8 row means of u      C likewise; vectors: v of u itself
    U = (R / mean R)^-1/2 C^-1/2 g                  then U /= max(1, rms(U)), U *= step
    m = beta1 m + (1 - beta1) U, U = m              if beta1 is given
    w -= weight_decay step w,  w -= U
    step = lr, or with relative_step min(lr, t^-1/2); times max(1e-3, rms(w)) with scale_parameter

`lr` is the schedule's rate of the step. transformers' relative steps use none: their bound is 1e-2, the default here,
or with warmup_init 1e-6 t, a warm-up of 10,000 steps to 1e-2. A given learning rate turns them off.

Without fp32 masters (`--precision bf16-pure`) transformers' has states in fp32, and fp32 copies of the weight and the
gradient in turn; it computes in fp32 and rounds the weight once. PyTorch's has states and temporaries in bf16, and
e = 2^-7, so that gradients below 2^-7 make small updates. It rounds after every operation; here a step is computed in
fp32, and what is stored (states, g^2, R C, U and weights) is rounded once.

Bytes of states: a matrix needs 4 (r + c), another tensor 4 per weight, and beta1 adds 4 per weight of
any tensor. With a master K = 4 + 4 (r + c) / (r c); PyTorch's without one has 2 bytes in place of 4.
`factored.py` describes exchanges and cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, NamedTuple

from zerosim.backends.kernels import Array, Rule
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import VECTOR, KernelWork
from zerosim.optim.factored import Average, Estimate, Factored, by_parts
from zerosim.optim.optimizer import Step

LEAST_RMS = 1e-3
"""Weights smaller than this move as if they had this size (eps2; eps[1])."""


class Rates(NamedTuple):
    """One tensor's numbers in one step: the update's divisor and factor, and the weights' decay."""

    clip: float
    step: float
    decay: float


@dataclass(frozen=True)
class Adafactor(Factored):
    """PyTorch's Adafactor."""

    weight_decay: float = 0.0

    of_rows: ClassVar[str] = "row_var"
    of_columns: ClassVar[str] = "col_var"
    of_numbers: ClassVar[str] = "variance"
    temporaries: ClassVar[int] = 1
    tiny: ClassVar[float] = 0.0

    def average(self, xp: Any, kept: Array, sums: Array, now: Average) -> None:
        kept += now.fresh * (sums / now.divisor - kept)

    def direction(self, xp: Any, u: Array, g: Array, now: Estimate) -> None:
        if now.is_factored:
            u /= max(now.mean, now.eps)
        u[...] = 1.0 / xp.sqrt(xp.maximum(u, now.eps**2)) * g

    def rates(self, now: Step, rms_weight: float, rms_update: float, *, decays: bool) -> Rates:
        step = max(LEAST_RMS, rms_weight) * min(now.lr, now.number**-0.5)
        return Rates(1.0, step / max(1.0, rms_update), now.lr * self.weight_decay if decays else 0.0)

    def move(self, xp: Any, w: Array, u: Array, now: Rates, *moments: Array) -> None:
        if now.decay:
            w *= 1.0 - now.decay
        w -= now.step * u


@dataclass(frozen=True)
class AdafactorHF(Factored):
    """transformers' Adafactor."""

    weight_decay: float = 0.0
    beta1: float | None = None
    scale_parameter: bool = True
    relative_step: bool = True

    of_rows: ClassVar[str] = "exp_avg_sq_row"
    of_columns: ClassVar[str] = "exp_avg_sq_col"
    of_numbers: ClassVar[str] = "exp_avg_sq"
    temporaries: ClassVar[int] = 2
    widened: ClassVar[int] = 4
    tiny: ClassVar[float] = 1e-30

    @property
    def moments(self) -> tuple[str, ...]:
        return () if self.beta1 is None else ("exp_avg",)

    def average(self, xp: Any, kept: Array, sums: Array, now: Average) -> None:
        kept *= 1.0 - now.fresh
        kept += now.fresh * (sums / now.divisor)

    def factors(self, device: Device, kept: list[Buffer], means: Sequence[float]) -> list[Buffer]:
        made = [device.alloc(each.shape, each.dtype, Kind.TEMP) for each in kept]
        for each, root, ratios in zip(kept, made, (means, [1.0]), strict=True):
            work = KernelWork("adafactorhf_root", VECTOR, 3 * each.numel, each.nbytes, root.nbytes)
            size = each.numel // len(ratios)
            rules = [
                (slice(n * size, (n + 1) * size), Rule(inverse_root, ratio, 1.0)) for n, ratio in enumerate(ratios)
            ]
            device.kernels([work], by_parts, device.backend, rules, each.array, root.array)
        return made

    def direction(self, xp: Any, u: Array, g: Array, now: Estimate) -> None:
        if now.is_factored:
            u *= g
        else:
            u[...] = 1.0 / xp.sqrt(u) * g

    def rates(self, now: Step, rms_weight: float, rms_update: float, *, decays: bool) -> Rates:
        step = min(now.lr, 1.0 / sqrt(now.number)) if self.relative_step else now.lr
        if self.scale_parameter:
            step *= max(LEAST_RMS, rms_weight)
        return Rates(max(1.0, rms_update), step, self.weight_decay * step if decays else 0.0)

    def move(self, xp: Any, w: Array, u: Array, now: Rates, *moments: Array) -> None:
        u /= now.clip
        u *= now.step
        for m in moments:
            assert self.beta1 is not None
            m *= self.beta1
            m += (1.0 - self.beta1) * u
            u = m
        if now.decay:
            w -= now.decay * w
        w -= u


def inverse_root(xp: Any, out: Array, x: Array, mean: float) -> None:
    out[...] = 1.0 / xp.sqrt(x / mean)
