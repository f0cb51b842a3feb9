"""Linear maps.

I and O are the widths, M = product of the leading dims.
"""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply, layer_of


class Linear:
    """Saves x and the handles of weight and bias."""

    def __init__(self, x: Tensor, weight: Operand, bias: Operand | None, transposed: bool) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.transposed = transposed

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        x, weight, rows = rows_of(self.x.array), self.weight.array, rows_of(grad.array)
        flops = 2 * x.shape[0] * weight.size
        dx = None
        if self.x.requires_grad:
            dx = self.x.new_grad()
            across = weight if self.transposed else weight.T
            device.kernel(flops, k.matmul, rows, across, rows_of(dx.array))
        dweight = self.weight.new_grad()
        left, right = (rows.T, x) if self.transposed else (x.T, rows)
        device.kernel(flops, k.matmul, left, right, dweight.array)
        if self.bias is None:
            return dx, dweight
        dbias = self.bias.new_grad()
        device.kernel(rows.size, k.column_sum, rows, dbias.array)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Operand, bias: Operand | None = None, *, transposed: bool = False) -> Tensor:
    """y = x @ weight + bias.

    Shapes: x (..., I), weight (I, O) or, transposed, (O, I); bias (O); y (..., O).
    """
    width, wide = weight.shape[::-1] if transposed else weight.shape
    if x.shape[-1] != width:
        raise InputError(f"linear: x has {x.shape[-1]} columns, its weight of shape {weight.shape} takes {width}")
    out = like(x, *x.shape[:-1], wide)
    rows = rows_of(x.array)
    x.device.kernel(
        2 * rows.shape[0] * width * wide,
        x.device.backend.linear,
        rows,
        weight.array.T if transposed else weight.array,
        None if bias is None else bias.array,
        rows_of(out.array),
    )
    inputs = (x, weight) if bias is None else (x, weight, bias)
    saved: Saved = {"input": x, "weight": weight, "bias": bias}
    return apply(Linear(x, weight, bias, transposed), out, *inputs, op=layer_of(weight, "linear"), saved=saved)
