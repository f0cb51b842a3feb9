"""Shapes and strides: contiguity, and views worked out by NumPy on an array over no memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy._state import absent

GHOST_BASE = 1 << 40


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


class _Ghost:
    def __init__(self, shape: tuple[int, ...], typestr: str, base: int, strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (base, False),
            "strides": strides,
            "version": 3,
        }


def ghost_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> np.ndarray:
    """A NumPy array of this layout at GHOST_BASE, never to be read."""
    return np.asarray(_Ghost(shape, f"|V{itemsize}", GHOST_BASE, strides))
