"""Root-mean-square norm over the last dim (arXiv 1910.07467). M = product of the leading dims, D width.

Kept for backward beside x, as in `norm.py`: with `saves` 'lean' the statistic, M in the compute dtype;
with 'megatron' nothing, and backward computes it again, to the same bits.
"""

from __future__ import annotations

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply, layer_of


class RMSNorm:
    """Saves x and, where it is kept, rstd (M, in the compute dtype)."""

    def __init__(self, x: Tensor, weight: Operand, eps: float, rstd: Buffer | None) -> None:
        self.x = x
        self.weight = weight
        self.eps = eps
        self.rstd = rstd

    def saved(self) -> Saved:
        return {"input": self.x, "weight": self.weight, "rstd": self.rstd}

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight = self.weight.new_grad()
        rstd = self.rstd or self._again()
        device.kernel(
            8 * grad.numel,
            device.backend.rms_norm_backward,
            rows_of(grad.array),
            rows_of(self.x.array),
            self.weight.array,
            rstd.array,
            None if dx is None else rows_of(dx.array),
            dweight.array,
        )
        return dx, dweight

    def _again(self) -> Buffer:
        device, rows, rstd = self.x.device, rows_of(self.x.array), _new_stat(self.x, Kind.TEMP)
        device.kernel(2 * rows.size, device.backend.rms_norm_stats, rows, self.eps, rstd.array)
        return rstd


def _new_stat(x: Tensor, kind: Kind) -> Buffer:
    return x.device.alloc((x.buffer.numel // x.shape[-1],), compute_dtype(x.dtype), kind)


def rms_norm(x: Tensor, weight: Operand, eps: float = 1e-5, *, policy: ActivationPolicy = DEFAULT) -> Tensor:
    """x / sqrt(average of squares + eps) * weight over the last dim. Shapes: x (..., D), weight (D).

    Raises: InputError where weight is not one number for each column.
    """
    if weight.shape != x.shape[-1:]:
        raise InputError(f"rms_norm: x has {x.shape[-1]} columns, its weight has shape {weight.shape}")
    device, out, rows = x.device, like(x), rows_of(x.array)
    keeps = policy.saves == "lean"
    rstd = _new_stat(x, Kind.ACTIVATION if keeps else Kind.TEMP)
    device.kernel(4 * out.numel, device.backend.rms_norm, rows, weight.array, eps, rows_of(out.array), rstd.array)
    rule = RMSNorm(x, weight, eps, rstd if keeps else None)
    return apply(rule, out, x, weight, op=layer_of(weight, "rms_norm"), saved=rule.saved())
