"""Shapes and strides: contiguity, and views worked out by NumPy on an array of zeros."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cupy._state import absent


class Flags:
    def __init__(self, array: Any) -> None:
        self.c_contiguous = contiguous(array.shape, array.strides, array.itemsize)
        self.f_contiguous = contiguous(array.shape[::-1], array.strides[::-1], array.itemsize)

    def __getattr__(self, name: str) -> Any:
        raise absent("ndarray.flags", name)


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


@cache
def _blank(bits: int) -> np.ndarray:
    zeros = np.zeros(1 << bits, np.uint8)
    zeros.flags.writeable = False
    return zeros


def ghost_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[np.ndarray, int]:
    """A NumPy array of this layout over zeros, and its address. NumPy works out views on it.

    Its memory is real, for a test's report prints the arrays of the frames that failed: over an address where nothing
    is, that ended pytest in a segmentation fault.
    """
    span = itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    ghost = np.ndarray(shape, f"|V{itemsize}", _blank(span.bit_length()), strides=strides)
    return ghost, address_of(ghost)


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
