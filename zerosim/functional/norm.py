"""Normalisation over the last dim. M = product of the leading dims, D width."""

from __future__ import annotations

from zerosim.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor import Operand, Tensor, apply


class LayerNorm:
    """Saves x, and mean and rstd (M each, in the compute dtype)."""

    def __init__(self, x: Tensor, weight: Operand, bias: Operand, mean: Buffer, rstd: Buffer) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.mean = mean
        self.rstd = rstd

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dx = self.x.new_grad() if self.x.requires_grad else None
        dweight, dbias = self.weight.new_grad(), self.bias.new_grad()
        device.kernel(
            11 * grad.numel,
            device.backend.layer_norm_backward,
            rows_of(grad.array),
            rows_of(self.x.array),
            self.weight.array,
            self.mean.array,
            self.rstd.array,
            None if dx is None else rows_of(dx.array),
            dweight.array,
            dbias.array,
        )
        return dx, dweight, dbias


def layer_norm(x: Tensor, weight: Operand, bias: Operand, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim. Shapes: x (..., D), weight, bias (D)."""
    device, out = x.device, like(x)
    rows = rows_of(x.array)
    stats = compute_dtype(x.dtype)
    mean = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    rstd = device.alloc((rows.shape[0],), stats, Kind.ACTIVATION)
    device.kernel(
        7 * out.numel,
        device.backend.layer_norm,
        rows,
        weight.array,
        bias.array,
        eps,
        rows_of(out.array),
        mean.array,
        rstd.array,
    )
    return apply(LayerNorm(x, weight, bias, mean, rstd), out, x, weight, bias)
