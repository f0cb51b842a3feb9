"""A tensor in another dtype, and the sum of two of different dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.functional.common import Grads, like
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Cast:
    """Saves nothing: the gradient is cast back."""

    dtype: DType

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dx = device.alloc(grad.shape, self.dtype, Kind.ACTIVATION_GRAD)
        device.kernel(0, device.backend.copy, grad.array, dx.array)
        return (dx,)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """Return x in `dtype`: itself if it has it. Shapes: x and result any, the same."""
    if x.dtype == dtype:
        return x
    out = like(x, dtype=dtype)
    x.device.kernel(0, x.device.backend.copy, x.array, out.array)
    return apply(Cast(x.dtype), out, x, op="cast")


def promoted_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the wider dtype of both."""
    wide = max(x.dtype, y.dtype, key=lambda one: one.itemsize)
    return cast(x, wide) + cast(y, wide)
