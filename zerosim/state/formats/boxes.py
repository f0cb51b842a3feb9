"""Join the pieces of a tensor: boxes that fill it, each in a file of its own rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerosim.errors import InputError, printable
from zerosim.state.formats.whole import Tensor, host_dtype

_MOST_PAIRS = 4096  # boxes that are compared with one another


class Box(NamedTuple):
    """A piece of a tensor: where it begins, its sizes, and how to read it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Any]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def from_boxes(name: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[Box], where: str) -> Tensor:
    """Return the tensor that the boxes make up. Raises: InputError, with its name, for a hole, an overlap, or a box
    that is not inside of it."""

    def fail(text: str) -> InputError:
        return InputError(f"{where}: tensor {printable(name[:200])!r} {text}")

    for box in boxes:
        fits = len(box.offsets) == len(box.sizes) == len(shape)
        if not fits or any(a < 0 or n < 0 or a + n > of for a, n, of in zip(*box[:2], shape, strict=True)):
            raise fail(f"has shape {shape} and a piece of {box.sizes} at {box.offsets}, outside of it")
    whole = math.prod(shape)
    filled = [box for box in boxes if box.numel]
    if pair := _overlap(filled):
        raise fail(f"has two pieces that overlap, at {pair[0].offsets} and {pair[1].offsets}")
    count = sum(box.numel for box in filled)
    if count != whole:
        raise fail(f"has {count:,} of its {whole:,} elements in all pieces: get the files of all ranks")
    return Tensor(name, dtype, shape, partial(_read, name, dtype, shape, filled, where))


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes with an element in common, None if there are none."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    ordered = sorted(boxes, key=lambda box: box.offsets)
    begins = np.array([box.offsets for box in ordered], np.int64)
    ends = begins + np.array([box.sizes for box in ordered], np.int64)
    for at in range(len(ordered) - 1):
        rest = slice(at + 1, at + 1 + _MOST_PAIRS)
        both = (begins[rest] < ends[at]).all(1) & (ends[rest] > begins[at]).all(1)
        if both.any():
            return ordered[at], ordered[at + 1 + int(both.argmax())]
    return None


def _read(name: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[Box], where: str) -> Any:
    if len(boxes) == 1:
        return _checked(boxes[0], name, dtype, where)
    whole = np.empty(shape, host_dtype(dtype))
    for box in boxes:
        whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] = _checked(
            box, name, dtype, where
        )
    return whole


def _checked(box: Box, name: str, dtype: str, where: str) -> Any:
    values = box.read()
    if values.shape != box.sizes or values.dtype.name != dtype:
        raise InputError(
            f"{where}: tensor {printable(name[:200])!r} has a piece of {values.dtype.name} {values.shape}, expected "
            f"{dtype} {box.sizes}: the files are not of one checkpoint"
        )
    return values
