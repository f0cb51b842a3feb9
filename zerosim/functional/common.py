"""What rules share: rows of any tensor, and buffers like another."""

from __future__ import annotations

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.tensor.tensor import Tensor

Grads = tuple[Buffer | None, ...]


def rows_of(array: Array) -> Array:
    """(..., D) as (M, D), without a copy."""
    return array.reshape(-1, array.shape[-1])


def like(x: Tensor, *shape: int, dtype: DType | None = None) -> Buffer:
    """A new activation of x's shape and dtype, or of those given."""
    return x.device.alloc(shape or x.shape, dtype or x.dtype, Kind.ACTIVATION)


def one_like(x: Buffer) -> Buffer:
    """A new gradient of x, all of it 1."""
    grad = grad_like(x)
    grad.device.kernel(0, grad.device.backend.fill, grad.array, 1.0)
    return grad


def grad_like(x: Buffer) -> Buffer:
    """A new gradient of an activation, of x's shape and dtype."""
    return x.device.alloc(x.shape, x.dtype, Kind.ACTIVATION_GRAD)
