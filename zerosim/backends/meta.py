"""The shape-only backend: arrays that have a shape and a size and hold nothing, kernels that do nothing.

A run on it passes every door of a real one (allocations, kernels, collectives), so the same bytes are
counted; no values are there to be computed. What a program reads from its device is 0.

Owns `MetaArray`, which knows shapes, strides and sizes as NumPy's arrays do. The kernels have the
names and the signatures of `kernels.py`, because a record names them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from zerosim.dtypes import DType


class Flags(NamedTuple):
    """What of NumPy's `flags` the program asks for."""

    c_contiguous: bool


class MetaArray:
    """A window of bytes that are not there: `shape` and `strides` in elements, `itemsize` in bytes."""

    __slots__ = ("itemsize", "shape", "size", "strides")

    def __init__(self, shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.itemsize = itemsize
        size = 1
        for length in shape:
            size *= length
        self.size = size
        self.strides = _contiguous_strides(shape) if strides is None else strides

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def flags(self) -> Flags:
        return Flags(self._is_contiguous())

    def _is_contiguous(self) -> bool:
        if self.size == 0:
            return True
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    def __getitem__(self, window: Any) -> MetaArray:
        """Basic slicing, as NumPy's: whole numbers, slices and one Ellipsis."""
        parts = window if isinstance(window, tuple) else (window,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            missing = len(self.shape) - len(parts) + 1
            parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
        if len(parts) > len(self.shape):
            raise IndexError(f"{len(parts)} indices for an array of {len(self.shape)} dimensions")
        shape: list[int] = []
        strides: list[int] = []
        for dim, (length, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            part = parts[dim] if dim < len(parts) else slice(None)
            if isinstance(part, slice):
                start, stop, step = part.indices(length)
                shape.append(len(range(start, stop, step)))
                strides.append(stride * step)
            elif not -length <= part < length:
                raise IndexError(f"index {part} is out of range for a dimension of {length}")
        return MetaArray(tuple(shape), self.itemsize, tuple(strides))

    def reshape(self, *shape: Any) -> MetaArray:
        """Another shape of as many elements; one length may be -1. Where NumPy would copy, it is refused."""
        lengths = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple) else list(shape)
        if -1 in lengths:
            rest = 1
            for length in lengths:
                rest *= length if length != -1 else 1
            lengths[lengths.index(-1)] = self.size // rest if rest else 0
        new = MetaArray(tuple(lengths), self.itemsize)
        if new.size != self.size or not self._is_contiguous():
            raise ValueError(f"{self.shape} with strides {self.strides} cannot be seen as {tuple(lengths)}")
        return new

    def transpose(self, *order: int) -> MetaArray:
        axes = order or tuple(reversed(range(len(self.shape))))
        return MetaArray(
            tuple(self.shape[axis] for axis in axes), self.itemsize, tuple(self.strides[axis] for axis in axes)
        )

    @property
    def T(self) -> MetaArray:
        return self.transpose()

    def swapaxes(self, first: int, second: int) -> MetaArray:
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self.transpose(*order)

    def __repr__(self) -> str:
        return f"MetaArray({self.shape}, {self.itemsize} bytes each)"


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    stride = 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


class MetaBackend:
    """The kernels' names, with nothing behind them."""

    name = "meta"

    def empty(self, shape: tuple[int, ...], dtype: DType) -> MetaArray:
        return MetaArray(tuple(shape), dtype.itemsize)

    def to_host(self, array: MetaArray) -> Any:
        """Zeros, all of them one: a view that takes no memory."""
        import numpy as np

        return np.broadcast_to(np.float64(0.0), array.shape)

    def to_host_later(self, array: MetaArray) -> Callable[[], Any]:
        return partial(self.to_host, array)

    # fmt: off
    def open_lane(self, *args: Any, **kwargs: Any) -> None: ...
    def native_collective(self, *args: Any, **kwargs: Any) -> None: ...
    def from_host(self, *args: Any, **kwargs: Any) -> None: ...
    def fill(self, *args: Any, **kwargs: Any) -> None: ...
    def copy(self, *args: Any, **kwargs: Any) -> None: ...
    def add(self, *args: Any, **kwargs: Any) -> None: ...
    def subtract(self, *args: Any, **kwargs: Any) -> None: ...
    def multiply(self, *args: Any, **kwargs: Any) -> None: ...
    def divide(self, *args: Any, **kwargs: Any) -> None: ...
    def exp(self, *args: Any, **kwargs: Any) -> None: ...
    def log(self, *args: Any, **kwargs: Any) -> None: ...
    def sqrt(self, *args: Any, **kwargs: Any) -> None: ...
    def tanh(self, *args: Any, **kwargs: Any) -> None: ...
    def sum_to(self, *args: Any, **kwargs: Any) -> None: ...
    def max_to(self, *args: Any, **kwargs: Any) -> None: ...
    def mask_future(self, *args: Any, **kwargs: Any) -> None: ...
    def matmul(self, *args: Any, **kwargs: Any) -> None: ...
    def linear(self, *args: Any, **kwargs: Any) -> None: ...
    def column_sum(self, *args: Any, **kwargs: Any) -> None: ...
    def layer_norm(self, *args: Any, **kwargs: Any) -> None: ...
    def layer_norm_stats(self, *args: Any, **kwargs: Any) -> None: ...
    def layer_norm_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def gelu(self, *args: Any, **kwargs: Any) -> None: ...
    def gelu_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def attention(self, *args: Any, **kwargs: Any) -> None: ...
    def attention_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def rms_norm(self, *args: Any, **kwargs: Any) -> None: ...
    def rms_norm_stats(self, *args: Any, **kwargs: Any) -> None: ...
    def rms_norm_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def rotary(self, *args: Any, **kwargs: Any) -> None: ...
    def swiglu(self, *args: Any, **kwargs: Any) -> None: ...
    def swiglu_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def flash_attention(self, *args: Any, **kwargs: Any) -> None: ...
    def flash_attention_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def embedding(self, *args: Any, **kwargs: Any) -> None: ...
    def embedding_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def cross_entropy(self, *args: Any, **kwargs: Any) -> None: ...
    def cross_entropy_backward(self, *args: Any, **kwargs: Any) -> None: ...
    def dropout_mask(self, *args: Any, **kwargs: Any) -> None: ...
    def dropout(self, *args: Any, **kwargs: Any) -> None: ...
    def reduce(self, *args: Any, **kwargs: Any) -> None: ...
    def sum_squares(self, *args: Any, **kwargs: Any) -> None: ...
    def finite_probe(self, *args: Any, **kwargs: Any) -> None: ...
    def adam(self, *args: Any, **kwargs: Any) -> None: ...
    def sgd(self, *args: Any, **kwargs: Any) -> None: ...
    # fmt: on
