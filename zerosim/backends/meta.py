"""The shape-only backend: arrays with a shape and a size but no values, and kernels that do nothing.

A run on this backend makes every call of a real run (allocations, kernels, collectives), so the same bytes are
counted. It computes no values: a program that reads from its device gets 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from zerosim.backends.kernels import Backend
from zerosim.dtypes import DType


class Flags(NamedTuple):
    """The part of NumPy's `flags` that the program asks for."""

    c_contiguous: bool


CONTIGUOUS = Flags(True)


class MetaArray:
    """A view of imaginary memory: `shape` and `strides` in elements, `itemsize` in bytes.

    An array never changes, and equal arrays are interchangeable: `_array` makes each of them once.
    """

    __slots__ = ("flags", "itemsize", "nbytes", "shape", "size", "strides")

    def __init__(self, shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.itemsize = itemsize
        self.size, contiguous = _size_and_strides(shape)
        self.nbytes = self.size * itemsize
        self.strides = contiguous if strides is None else strides
        self.flags = CONTIGUOUS if self.strides == contiguous else Flags(self._is_contiguous(contiguous))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _is_contiguous(self, contiguous: tuple[int, ...]) -> bool:
        """Ignore the strides of dims of one element, and all strides of an empty array."""
        dims = zip(self.shape, self.strides, contiguous, strict=True)
        return self.size == 0 or all(length == 1 or stride == expected for length, stride, expected in dims)

    def __getitem__(self, window: Any) -> MetaArray:
        """Basic slicing, as NumPy's: whole numbers, slices and one Ellipsis."""
        if isinstance(window, slice) and self.shape:  # rows, or a slice of a flat array: by far the most frequent case
            return _rows(self, window.start, window.stop, window.step)
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
        return _array(tuple(shape), self.itemsize, tuple(strides))

    def reshape(self, *shape: Any) -> MetaArray:
        """Return a view of another shape with as many elements; one length may be -1. Refuse where NumPy would copy."""
        return _reshaped(self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape)

    def transpose(self, *order: int) -> MetaArray:
        return _transposed(self, order)

    @property
    def T(self) -> MetaArray:
        return self.transpose()

    def swapaxes(self, first: int, second: int) -> MetaArray:
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self.transpose(*order)

    def __repr__(self) -> str:
        return f"MetaArray({self.shape}, {self.itemsize} bytes each)"


# A program has few shapes and asks for each of them many times.
@lru_cache(maxsize=16384)
def _array(shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None = None) -> MetaArray:
    return MetaArray(shape, itemsize, strides)


@lru_cache(maxsize=16384)
def _rows(array: MetaArray, start: int | None, stop: int | None, step: int | None) -> MetaArray:
    first, last, stride = slice(start, stop, step).indices(array.shape[0])
    rows = len(range(first, last, stride))
    return _array((rows, *array.shape[1:]), array.itemsize, (array.strides[0] * stride, *array.strides[1:]))


@lru_cache(maxsize=16384)
def _reshaped(array: MetaArray, shape: tuple[int, ...]) -> MetaArray:
    lengths = list(shape)
    if -1 in lengths:
        rest = math.prod(length for length in lengths if length != -1)
        lengths[lengths.index(-1)] = array.size // rest if rest else 0
    new = _array(tuple(lengths), array.itemsize)
    if new.size == array.size and array.flags.c_contiguous:
        return new
    strides = _strides_as(array, lengths) if new.size == array.size else None
    if strides is None:
        raise ValueError(f"{array.shape} with strides {array.strides} cannot be seen as {tuple(lengths)}")
    return _array(tuple(lengths), array.itemsize, strides)


def _strides_as(array: MetaArray, lengths: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a strided array whose dims are cut into `lengths`; None where dims would be joined."""
    strides, rest = list[int](), list(lengths)
    for length, stride in zip(array.shape, array.strides, strict=True):
        parts, numel = list[int](), 1
        while rest and (numel < length or (numel == length and rest[0] == 1)):
            parts.append(rest.pop(0))
            numel *= parts[-1]
        if numel != length:
            return None
        strides += [stride * inner for inner in _size_and_strides(tuple(parts))[1]]
    return tuple(strides)


@lru_cache(maxsize=16384)
def _transposed(array: MetaArray, order: tuple[int, ...]) -> MetaArray:
    axes = order or tuple(reversed(range(len(array.shape))))
    return _array(
        tuple(array.shape[axis] for axis in axes), array.itemsize, tuple(array.strides[axis] for axis in axes)
    )


@lru_cache(maxsize=4096)
def _size_and_strides(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the number of elements, and the strides of a contiguous array of that shape."""
    strides: list[int] = []
    stride = 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return stride, tuple(reversed(strides))


class MetaBackend(Backend):
    """The kernels exactly as the protocol declares them, with empty bodies."""

    name = "meta"

    def empty(self, shape: tuple[int, ...], dtype: DType) -> MetaArray:
        return _array(tuple(shape), dtype.itemsize)

    def to_host(self, array: MetaArray) -> Any:
        """Return zeros: a view of a single one, which takes no memory."""
        import numpy as np

        return np.broadcast_to(np.float64(0.0), array.shape)

    def to_host_later(self, array: MetaArray) -> Callable[[], Any]:
        return partial(self.to_host, array)
