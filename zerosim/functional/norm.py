"""Normalisation over the last dim: layer norm and RMS norm (arXiv 1910.07467).

Kept for backward beside x: with `saves` 'lean' the statistics, as PyTorch's kernels do, one number a row
each in the compute dtype; with 'megatron' nothing, as 2205.05198 counts (section 4.1: 2 sbh a norm), and
backward computes them again, to the same bits. D is the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.discarded import Held, held
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Saves x and, where they are kept, mean and rstd."""

    x: Held
    weight: Operand
    bias: Operand
    eps: float
    stats: tuple[Buffer, Buffer] | None

    def saved(self) -> Saved:
        mean, rstd = self.stats or (None, None)
        return {"input": self.x, "weight": self.weight, "bias": self.bias, "mean": mean, "rstd": rstd}

    def backward(self, grad: Buffer) -> Grads:
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight, dbias = self.weight.new_grad(), self.bias.new_grad()
        mean, rstd = self.stats or self._again()
        grad.device.kernel(
            11 * grad.numel,
            grad.device.backend.layer_norm_backward,
            rows_of(grad.array),
            rows_of(self.x.array),
            self.weight.array,
            mean.array,
            rstd.array,
            None if dx is None else rows_of(dx.array),
            dweight.array,
            dbias.array,
        )
        return dx, dweight, dbias

    def _again(self) -> tuple[Buffer, Buffer]:
        device, rows = self.x.device, rows_of(self.x.array)
        mean, rstd = _statistic(self.x, Kind.TEMP), _statistic(self.x, Kind.TEMP)
        device.kernel(4 * rows.size, device.backend.layer_norm_stats, rows, self.eps, mean.array, rstd.array)
        return mean, rstd


def layer_norm(
    x: Tensor, weight: Operand, bias: Operand, eps: float = 1e-5, *, policy: ActivationPolicy = DEFAULT
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim. Shapes: x (..., D), weight, bias (D).

    Source: arXiv 1607.06450.
    """
    out, rows, keeps = like(x), rows_of(x.array), policy.saves == "lean"
    kind = Kind.ACTIVATION if keeps else Kind.TEMP
    mean, rstd = _statistic(x, kind), _statistic(x, kind)
    arrays = rows_of(out.array), mean.array, rstd.array
    x.device.kernel(7 * out.numel, x.device.backend.layer_norm, rows, weight.array, bias.array, eps, *arrays)
    rule = LayerNorm(held(x), weight, bias, eps, (mean, rstd) if keeps else None)
    return apply(rule, out, x, weight, bias, op=layer_of(weight, "layer_norm"), saved=rule.saved())


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Saves x and, where it is kept, rstd."""

    x: Held
    weight: Operand
    eps: float
    rstd: Buffer | None

    def saved(self) -> Saved:
        return {"input": self.x, "weight": self.weight, "rstd": self.rstd}

    def backward(self, grad: Buffer) -> Grads:
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight = self.weight.new_grad()
        rstd = self.rstd or self._again()
        grad.device.kernel(
            8 * grad.numel,
            grad.device.backend.rms_norm_backward,
            rows_of(grad.array),
            rows_of(self.x.array),
            self.weight.array,
            rstd.array,
            None if dx is None else rows_of(dx.array),
            dweight.array,
        )
        return dx, dweight

    def _again(self) -> Buffer:
        device, rows, rstd = self.x.device, rows_of(self.x.array), _statistic(self.x, Kind.TEMP)
        device.kernel(2 * rows.size, device.backend.rms_norm_stats, rows, self.eps, rstd.array)
        return rstd


def rms_norm(x: Tensor, weight: Operand, eps: float = 1e-5, *, policy: ActivationPolicy = DEFAULT) -> Tensor:
    """x / sqrt(average of squares + eps) * weight over the last dim. Shapes: x (..., D), weight (D).

    Raises: InputError where weight is not one number for each column.
    """
    if weight.shape != x.shape[-1:]:
        raise InputError(f"rms_norm: x has {x.shape[-1]} columns, its weight has shape {weight.shape}")
    device, out, rows = x.device, like(x), rows_of(x.array)
    keeps = policy.saves == "lean"
    rstd = _statistic(x, Kind.ACTIVATION if keeps else Kind.TEMP)
    device.kernel(4 * out.numel, device.backend.rms_norm, rows, weight.array, eps, rows_of(out.array), rstd.array)
    rule = RMSNorm(held(x), weight, eps, rstd if keeps else None)
    return apply(rule, out, x, weight, op=layer_of(weight, "rms_norm"), saved=rule.saved())


def _statistic(x: Held, kind: Kind) -> Buffer:
    """Room for one number a row."""
    return x.device.alloc((math.prod(x.shape[:-1]),), compute_dtype(x.dtype), kind)
