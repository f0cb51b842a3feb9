"""Llama's layers on the device against NumPy's: types, odd sizes, strides, nothing at all; and the same bits twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_arrays import Values, assert_close, both, from_device, junk, rounded, strided, to_device

from zerosim.backends.cuda import llama as cuda_llama
from zerosim.backends.numpy import llama as numpy_llama
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp32

every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
EVERY_ROWS = [(1, 1), (5, 37), (130, 48), (3, 1500), (2, 17000), (0, 4)]
ROWS = pytest.mark.parametrize("shape", EVERY_ROWS, ids=str)


def numbers(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(shape)


def stats_of(x: Values, dtype: DType) -> Values:
    rstd = np.empty(len(x), rounded(0.0, compute_dtype(dtype)).dtype)
    numpy_llama.rms_norm_stats(x, 1e-5, rstd)
    return rstd


@every_dtype
@pytest.mark.parametrize(("shape", "place"), [((5, 37), strided), *((shape, to_device) for shape in EVERY_ROWS)])
def test_rms_norm(dtype: DType, shape: tuple[int, int], place: Any) -> None:
    x, weight = rounded(3 * numbers(*shape), dtype), rounded(numbers(shape[1], seed=1), dtype)
    outputs = [junk(x.shape, x.dtype), junk(shape[:1], stats_of(x, dtype).dtype)]
    out, rstd = both(numpy_llama.rms_norm, cuda_llama.rms_norm, [x, weight, 1e-5], outputs, place)
    eps = compute_dtype(dtype).eps
    few = 16 + shape[1] ** 0.5  # additions in another order
    assert_close(*rstd, compute_dtype(dtype), few * eps * np.abs(rstd[1]))
    assert_close(*out, dtype, few * eps * np.abs(out[1]))


@every_dtype
@ROWS
def test_statistics_alone_are_the_norms(dtype: DType, shape: tuple[int, int]) -> None:
    x, weight = to_device(rounded(numbers(*shape), dtype)), to_device(rounded(numbers(shape[1]), dtype))
    nothing = junk(shape[:1], rounded(0.0, compute_dtype(dtype)).dtype)
    with_norm, alone = to_device(nothing), to_device(nothing)
    cuda_llama.rms_norm(x, weight, 1e-5, to_device(junk(shape, x.dtype)), with_norm)
    cuda_llama.rms_norm_stats(x, 1e-5, alone)
    assert from_device(with_norm).tobytes() == from_device(alone).tobytes()


@every_dtype
@ROWS
@pytest.mark.parametrize("wants_dx", [True, False])
def test_rms_norm_backward(dtype: DType, shape: tuple[int, int], wants_dx: bool) -> None:
    x, grad, weight = (rounded(numbers(*s, seed=i), dtype) for i, s in enumerate((shape, shape, shape[1:])))
    inputs = [grad, x, weight, stats_of(x, dtype)]
    outputs = [junk(x.shape, x.dtype) if wants_dx else None, junk(weight.shape, x.dtype)]
    *dx, dweight = both(numpy_llama.rms_norm_backward, cuda_llama.rms_norm_backward, inputs, outputs)
    eps = compute_dtype(dtype).eps
    if dx and x.size:
        assert_close(*dx[0], dtype, 64 * eps * np.abs(dx[0][1]).max())
    assert_close(*dweight, dtype, (8 + shape[0]) * eps * (shape[0] ** 0.5))


def test_rms_norm_backward_in_mixed_types_and_strides() -> None:
    x, grad, weight = (rounded(numbers(*s), d) for s, d in (((9, 20), bf16), ((9, 20), fp32), ((20,), bf16)))
    outputs = [junk(s, grad.dtype) for s in ((9, 20), (20,))]
    for got, wanted in both(
        numpy_llama.rms_norm_backward,
        cuda_llama.rms_norm_backward,
        [grad, x, weight, stats_of(x, bf16)],
        outputs,
        strided,
    ):
        assert_close(got, wanted, fp32, 64 * fp32.eps)


@every_dtype
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 7, 3, 1, 6), (3, 50, 4, 2, 32), (1, 3000, 2, 0, 8)], ids=str)
def test_rotary(dtype: DType, shape: tuple[int, ...], inverse: bool) -> None:
    """Angles are those of the compute dtype, up to 3,000 radians, on both sides: only cos and sin may differ, and the
    power, whose last place an angle multiplies."""
    batch, tokens, heads, rest, width = shape
    x = rounded(numbers(batch, tokens, (heads + rest) * width), dtype)
    for place in (to_device, strided):
        ((got, wanted),) = both(
            numpy_llama.rotary,
            cuda_llama.rotary,
            [x, width, heads, 10000.0, inverse],
            [junk(x.shape, x.dtype)],
            place,
        )
        turned = heads * width
        assert np.array_equal(got[..., turned:], wanted[..., turned:])
        angle = np.arange(tokens)[:, None]
        assert_close(got, wanted, dtype, compute_dtype(dtype).eps * (8 + angle) * 4)


@every_dtype
@pytest.mark.parametrize(
    ("shape", "place"), [((1, 1), to_device), ((5, 37), to_device), ((5, 37), strided), ((0, 3), to_device)]
)
def test_swiglu(dtype: DType, shape: tuple[int, int], place: Any) -> None:
    x, grad = rounded(4 * numbers(shape[0], 2 * shape[1]), dtype), rounded(numbers(*shape, seed=1), dtype)
    ((got, wanted),) = both(numpy_llama.swiglu, cuda_llama.swiglu, [x], [junk(shape, x.dtype)], place)
    eps = compute_dtype(dtype).eps
    assert_close(got, wanted, dtype, 16 * eps * np.abs(wanted))
    ((got, wanted),) = both(
        numpy_llama.swiglu_backward, cuda_llama.swiglu_backward, [grad, x], [junk(x.shape, x.dtype)], place
    )
    assert_close(got, wanted, dtype, 64 * eps * 16)


def test_swiglu_far_out() -> None:
    """exp of a large number is inf, and the gate then 0 or itself."""
    x = rounded([[-1000.0, 1000.0, 0.0, 2.0, 2.0, 2.0]], fp32)
    ((got, wanted),) = both(numpy_llama.swiglu, cuda_llama.swiglu, [x], [junk((1, 3), x.dtype)])
    assert np.array_equal(got, wanted)
    assert np.array_equal(got, [[0.0, 2000.0, 0.0]])
