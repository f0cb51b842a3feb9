"""Normalisation over the last dim. M = product of the leading dims, D width.

Kept for backward beside x: with `saves` 'lean' the statistics, 2 M in the compute dtype, as PyTorch's
kernel does; with 'megatron' nothing, as 2205.05198 counts (section 4.1: 2 sbh a norm), and backward
computes them again, to the same bits.
"""

from __future__ import annotations

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply, layer_of


class LayerNorm:
    """Saves x and, where they are kept, mean and rstd (M each, in the compute dtype)."""

    def __init__(
        self, x: Tensor, weight: Operand, bias: Operand, eps: float, stats: tuple[Buffer, Buffer] | None
    ) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.stats = stats

    def saved(self) -> Saved:
        mean, rstd = self.stats or (None, None)
        return {"input": self.x, "weight": self.weight, "bias": self.bias, "mean": mean, "rstd": rstd}

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight, dbias = self.weight.new_grad(), self.bias.new_grad()
        mean, rstd = self.stats or self._again()
        device.kernel(
            11 * grad.numel,
            device.backend.layer_norm_backward,
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
        mean, rstd = _new_stats(self.x, Kind.TEMP)
        device.kernel(4 * rows.size, device.backend.layer_norm_stats, rows, self.eps, mean.array, rstd.array)
        return mean, rstd


def _new_stats(x: Tensor, kind: Kind) -> tuple[Buffer, Buffer]:
    rows, dtype = x.buffer.numel // x.shape[-1], compute_dtype(x.dtype)
    return x.device.alloc((rows,), dtype, kind), x.device.alloc((rows,), dtype, kind)


def layer_norm(
    x: Tensor, weight: Operand, bias: Operand, eps: float = 1e-5, *, policy: ActivationPolicy = DEFAULT
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim. Shapes: x (..., D), weight, bias (D)."""
    device, out = x.device, like(x)
    keeps = policy.saves == "lean"
    mean, rstd = stats = _new_stats(x, Kind.ACTIVATION if keeps else Kind.TEMP)
    device.kernel(
        7 * out.numel,
        device.backend.layer_norm,
        rows_of(x.array),
        weight.array,
        bias.array,
        eps,
        rows_of(out.array),
        mean.array,
        rstd.array,
    )
    rule = LayerNorm(x, weight, bias, eps, stats if keeps else None)
    return apply(rule, out, x, weight, bias, op=layer_of(weight, "layer_norm"), saved=rule.saved())
