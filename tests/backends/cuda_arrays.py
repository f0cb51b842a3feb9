"""Arrays on a CUDA device for tests of kernels: the same values for NumPy's and CUDA's, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.numpy.cast import store
from zerosim.backends.numpy.ops import NUMPY_TYPES
from zerosim.dtypes import DType

Values = np.ndarray[Any, np.dtype[Any]]


def rounded(values: Any, dtype: DType) -> Values:
    """`values` in that type, on the host."""
    out = np.empty(np.shape(values), NUMPY_TYPES[dtype.name])
    store(np.asarray(values), out)
    return out


def to_device(values: Values, offset: int = 0) -> Any:
    """A contiguous copy on the device that begins `offset` elements into its memory."""
    array = cp.empty((values.size + offset,), values.dtype)[offset:].reshape(values.shape)
    array.set(np.ascontiguousarray(values))
    return array


def strided(values: Values) -> Any:
    """A copy on the device that is every other element of a row twice as long."""
    twice = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    twice[..., ::2] = values
    return to_device(twice)[..., ::2]


def junk(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Values:
    """What an output holds before a kernel fills it: nan, where the type has one."""
    return np.full(shape, 113 if dtype.kind in "iu" else np.nan).astype(dtype)


def from_device(array: Any) -> Values:
    """The elements as they are, of an array that may be a window."""
    if array.flags.c_contiguous:
        return np.asarray(array.get())
    whole = cp.empty(array.shape, array.dtype)
    cp.ElementwiseKernel("T x", "T y", "y = x", "gather_for_a_test")(array, whole)
    return np.asarray(whole.get())


def both(
    numpy_kernel: Callable[..., None],
    cuda_kernel: Callable[..., None],
    inputs: Sequence[Any],
    outputs: Sequence[Values | None],
    place: Callable[[Values], Any] = to_device,
) -> list[tuple[Values, Values]]:
    """Both kernels on the same inputs, arrays or anything else, and outputs: (CUDA's, NumPy's) of each, in float64.

    CUDA's runs twice and must give the same bits.
    """
    runs = []
    for _ in range(2):
        sent = [place(x) if isinstance(x, np.ndarray) else x for x in inputs]
        filled = [None if x is None else place(x) for x in outputs]
        cuda_kernel(*sent, *filled)
        runs.append([from_device(x) for x in filled if x is not None])
    assert [x.tobytes() for x in runs[0]] == [x.tobytes() for x in runs[1]], "two runs, two results"
    here = [None if x is None else x.copy() for x in outputs]
    with np.errstate(all="ignore"):
        numpy_kernel(*inputs, *here)
    wanted = [x for x in here if x is not None]
    return [(got.astype(np.float64), x.astype(np.float64)) for got, x in zip(runs[0], wanted, strict=True)]


def assert_close(got: Values, wanted: Values, stored: DType, slack: float | Values = 0.0, places: float = 1.0) -> None:
    """|got - wanted| <= `places` last places of the stored type + slack. Two correct roundings of nearly equal numbers
    may fall one place apart, so 1 is the least that can be asked."""
    bound = places * stored.eps * np.maximum(np.abs(wanted), stored.min_normal) + slack
    off = np.abs(got - wanted)
    assert got.shape == wanted.shape
    assert (off <= bound).all(), f"off by {np.nanmax(off)}, {np.nanmax(off / bound)} of what is allowed"
