"""Bare matrix products: those of a training step, the floor under it, and one large square product on a GPU.

The products of a step are observed, not derived: for one step a wrapper replaces `np.matmul` and notes
the shapes, dtypes and memory layouts of its operands. The benchmark then repeats the products in that order,
on arrays of the same shapes and layouts, with nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from zerosim.bench.contest import Contestant, Timing, timed
from zerosim.comm.runtime import make_backend
from zerosim.dtypes import dtype


class Layout(NamedTuple):
    """The properties of an operand that decide a product's speed. `strides` in bytes."""

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
    """Record the products that `step` calls, in order."""
    seen: list[Product] = []
    matmul: Callable[..., Any] = np.matmul

    def noting(left: Any, right: Any, out: Any = None) -> Any:
        if min(left.ndim, right.ndim) >= 2:  # a sum of rows is a product with ones, not the model's
            seen.append(Product(_layout(left), _layout(right), None if out is None else _layout(out)))
        return matmul(left, right, out=out)

    with mock.patch.object(np, "matmul", noting):
        step()
    return seen


def _layout(array: Any) -> Layout:
    return Layout(tuple(array.shape), tuple(array.strides), array.dtype.str)


class BareProducts(Contestant):
    """A contestant: the products of a step and nothing else, in the step's order."""

    def __init__(self, products: list[Product]) -> None:
        arrays: dict[tuple[Layout, int], Any] = {}

        def array(layout: Layout | None, place: int) -> Any:
            if layout is None:
                return None
            if (layout, place) not in arrays:
                arrays[layout, place] = _filled(layout, seed=place)
            return arrays[layout, place]

        self._flops = sum(product.flops for product in products)
        self._calls = [(array(left, 0), array(right, 1), array(out, 2)) for left, right, out in products]

    @property
    def flops(self) -> Mapping[str, int]:
        return {"matmul": self._flops}

    def step(self) -> Timing:
        return timed(self._multiply)

    def _multiply(self) -> None:
        matmul = np.matmul
        for left, right, out in self._calls:
            matmul(left, right, out=out)


def _filled(layout: Layout, seed: int) -> Any:
    """Return an array of that layout with normal random numbers, gaps between rows included."""
    shape, strides, type_ = layout
    itemsize = np.dtype(type_).itemsize
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) // itemsize + 1
    values = np.random.default_rng(seed).standard_normal(span, np.float32).astype(type_)
    return np.lib.stride_tricks.as_strided(values, shape, strides)


class SquareProduct(Contestant):
    """A contestant: `repeats` products of two (n, n) matrices of normals, through the same backend and nothing else.

    Holds three matrices on GPU 0 while it lives: 6 n² bytes.
    """

    def __init__(self, n: int, precision: str, repeats: int) -> None:
        self._flops = 2 * n**3 * repeats
        self._repeats = repeats
        self._backend = make_backend("cuda")
        stream: Any = self._backend.open_stream(0)
        self._stream = stream
        self._timer = stream.timer()
        values = np.random.default_rng(0).standard_normal((n, n), np.float32)
        with stream.use():
            self._left, self._right, self._out = (self._backend.empty((n, n), dtype(precision)) for _ in range(3))
            self._backend.from_host(values, self._left)
            self._backend.from_host(values, self._right)
        stream.synchronize()

    @property
    def flops(self) -> Mapping[str, int]:
        return {"matmul": self._flops}

    def step(self) -> Timing:
        with self._stream.use():
            return timed(self._multiply, self._timer)

    def _multiply(self) -> None:
        for _ in range(self._repeats):
            self._backend.matmul(self._left, self._right, self._out)
