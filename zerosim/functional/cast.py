"""A tensor or a weight in another dtype, the sum of two of different dtypes, and a result beside what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.functional.common import Grads, like
from zerosim.tensor.tensor import Operand, Tensor, apply, layer_of


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


@dataclass(frozen=True, slots=True)
class CastWeight:
    """Saves the weight's handle: its gradient is cast into its window."""

    weight: Operand

    def backward(self, grad: Buffer) -> Grads:
        dweight = self.weight.new_grad()
        grad.device.kernel(0, grad.device.backend.copy, grad.array, dweight.array)
        return (dweight,)


def cast_weight(weight: Operand, dtype: DType) -> Tensor:
    """Return a weight in `dtype`, in a buffer of its own. Shapes: weight and result any, the same."""
    out, values = weight.device.alloc(weight.shape, dtype, Kind.ACTIVATION), weight.buffer
    weight.device.kernel(0, weight.device.backend.copy, values.array, out.array)
    return apply(CastWeight(weight), out, weight, op=layer_of(weight, "linear"), saved={"weight cast": out})


@dataclass(frozen=True, slots=True)
class Keeping:
    """Saves tensors that other ops have made, and passes the gradient on."""

    kept: Sequence[Buffer]

    def backward(self, grad: Buffer) -> Grads:
        return (grad,)


def keeping(y: Tensor, kept: Sequence[Buffer], op: str) -> Tensor:
    """Return y, which keeps these buffers until its backward; `op` names what made them."""
    saved = {f"cast {number}": one for number, one in enumerate(kept, 2)}
    return apply(Keeping(kept), y.buffer, y, op=op, saved=saved) if kept else y


def promoted_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the wider dtype of both."""
    wide = max(x.dtype, y.dtype, key=lambda one: one.itemsize)
    return cast(x, wide) + cast(y, wide)
