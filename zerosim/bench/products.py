"""The bare matrix products of a training step: the floor under it.

Which products those are is not worked out but seen: for one step `np.matmul` is replaced by one that notes
the shapes, types and memory layouts of its operands. They are then run again, in that order,
on arrays of the same shapes and layouts, with nothing in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np


class Layout(NamedTuple):
    """All that a product's speed depends on in an operand. `strides` in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Product(NamedTuple):
    """One call of np.matmul; `out` None: the call made its own result."""

    left: Layout
    right: Layout
    out: Layout | None

    @property
    def flops(self) -> int:
        leading = np.broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2])
        rows, inner, columns = self.left.shape[-2], self.left.shape[-1], self.right.shape[-1]
        return 2 * int(np.prod(leading, dtype=np.int64)) * rows * inner * columns


def watch(step: Callable[[], object]) -> list[Product]:
    """The products that `step` calls, in order."""
    seen: list[Product] = []
    matmul: Callable[..., Any] = np.matmul

    def noting(left: Any, right: Any, out: Any = None) -> Any:
        if min(left.ndim, right.ndim) >= 2:  # a vector of ones is how kernels add rows: no product of the model
            seen.append(Product(_layout(left), _layout(right), None if out is None else _layout(out)))
        return matmul(left, right, out=out)

    with mock.patch.object(np, "matmul", noting):
        step()
    return seen


def _layout(array: Any) -> Layout:
    return Layout(tuple(array.shape), tuple(array.strides), array.dtype.str)


class BareProducts:
    """A contestant: the products of a step and nothing else, in the step's order."""

    def __init__(self, products: list[Product]) -> None:
        arrays: dict[tuple[Layout, int], Any] = {}

        def array(layout: Layout | None, place: int) -> Any:
            if layout is None:
                return None
            if (layout, place) not in arrays:
                arrays[layout, place] = _filled(layout, seed=place)
            return arrays[layout, place]

        self.flops = sum(product.flops for product in products)
        self._calls = [(array(left, 0), array(right, 1), array(out, 2)) for left, right, out in products]

    def step(self) -> float:
        matmul = np.matmul
        started = time.perf_counter()
        for left, right, out in self._calls:
            matmul(left, right, out=out)
        return time.perf_counter() - started


def _filled(layout: Layout, seed: int) -> Any:
    """Normals in an array of that layout, gaps between its rows included."""
    shape, strides, dtype = layout
    itemsize = np.dtype(dtype).itemsize
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) // itemsize + 1
    values = np.random.default_rng(seed).standard_normal(span, np.float32).astype(dtype)
    return np.lib.stride_tricks.as_strided(values, shape, strides)
