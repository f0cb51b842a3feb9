"""Loss scaling as DeepSpeed 0.19 does it, and a norm whose bits do not depend on who holds what."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.device.device import Device, Kind
from zerosim.dtypes import DType, fp16, fp32, fp64
from zerosim.errors import LossScaleExhausted
from zerosim.optim.precision import LossScaler, norm_partials, total_norm
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, Slice, nothing, slice_of, slice_size, whole
from zerosim.tensor.tensor import cpu

pytestmark = pytest.mark.bits


def scales(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    """The scale after each step."""
    seen = []
    for overflow in overflows:
        scaler.update(overflow)
        seen.append(scaler.scale)
    return seen


# -- the loss scale ------------------------------------------------------------------------------------------


def test_at_the_minimum_an_overflow_is_an_error() -> None:
    scaler = LossScaler(4.0, hysteresis=1, minimum=1.0)
    assert scales(scaler, [True, True]) == [2, 1]
    with pytest.raises(LossScaleExhausted, match="step 2: gradients overflow at the smallest loss scale, 1"):
        scaler.update(True)
    scaler = LossScaler(1.0, hysteresis=2)
    scaler.update(True)  # forgiven, at the minimum as well
    with pytest.raises(LossScaleExhausted):
        scaler.update(True)


def test_a_static_scale_stays() -> None:
    assert set(scales(LossScaler(128.0, dynamic=False, window=1), [True, False, False] * 5)) == {128.0}


@given(
    st.lists(st.booleans() | st.just(False), max_size=80),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 16.0, 2.0**16]),
    st.sampled_from([0.25, 1.0, 3.0]),
)
def test_the_rule_transcribed(
    overflows: list[bool], window: int, hysteresis: int, start: float, minimum: float
) -> None:
    """DeepSpeed 0.19.8's rule, written down from its description and independent of ours."""
    scaler = LossScaler(start, window=window, hysteresis=hysteresis, minimum=minimum)
    scale, left, last_overflow_iter = start, hysteresis, -1
    for iteration, overflow in enumerate(overflows):
        if overflow and left == 1 and scale <= minimum:
            with pytest.raises(LossScaleExhausted):
                scaler.update(True)
            return
        scaler.update(overflow)
        if overflow:
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last_overflow_iter = iteration
        else:
            k = iteration - last_overflow_iter - 1
            if k > 0 and k % window == 0:
                left = hysteresis
                scale *= 2
        assert scaler.scale == scale


# -- the norm --------------------------------------------------------------------------------------------------
def holding(values: np.ndarray, own: Slice, device: Device, dtype: DType) -> Flat:
    """A flat that holds `own` of a gradient; padding is nan, so that using it would show."""
    flat = Flat("flat", device, dtype, dtype)
    flat.declare("p", (values.size,))
    flat.held = Held(own, values.size)
    if own.size:
        padded = np.concatenate([values, np.full(own.stop - min(own.stop, values.size), np.nan)])
        flat.grad_shard = device.alloc((own.size,), dtype, Kind.GRAD)
        device.backend.from_host(padded[own.start : own.stop], flat.grad_shard.array)
    return flat


def added(parts: list[np.ndarray]) -> np.ndarray:
    """As all_reduce adds them: in rank order."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=3),
    st.integers(1, 7),
    st.sampled_from([fp64, fp32, fp16]),
    st.integers(0, 2**32 - 1),
)
def test_partials_are_the_same_bits_whoever_holds_what(sizes: list[int], ranks: int, dtype: DType, seed: int) -> None:
    device, random = cpu(), np.random.default_rng(seed)
    grads = [random.standard_normal(size) for size in sizes]

    def partials(own: list[Slice]) -> np.ndarray:
        flats = [holding(grad, part, device, dtype) for grad, part in zip(grads, own, strict=True)]
        return norm_partials(device, flats, ranks).array

    everything = partials([whole(size) for size in sizes])
    sliced = added([partials([slice_of(size, rank, ranks) for size in sizes]) for rank in range(ranks)])
    owned = added(
        [
            partials([whole(size) if i % ranks == rank else nothing(size) for i, size in enumerate(sizes)])
            for rank in range(ranks)
        ]
    )
    assert everything.shape == (len(sizes), ranks)
    assert (everything == sliced).all()
    assert (everything == owned).all()
    stored = np.concatenate(grads).astype({fp64: "f8", fp32: "f4", fp16: "f2"}[dtype]).astype(np.float64)
    norm = total_norm(device, _buffer(device, everything))
    assert norm == pytest.approx(np.linalg.norm(stored), rel=1e-12)


def test_a_window_of_a_whole_gradient_counts_as_a_slice() -> None:
    """ZeRO-1: the own slice lies inside the whole gradient, padding included."""
    device, values = cpu(), np.random.default_rng(0).standard_normal(10)
    flat = holding(values, Slice(0, 12, 10), device, fp32)
    assert flat.grad_shard is not None
    parts = []
    full = flat.grad_shard
    for rank in range(3):
        flat.held = Held(slice_of(10, rank, 3), 12)
        flat.grad_shard = full[flat.own.start : flat.own.stop]
        parts.append(norm_partials(device, [flat], 3).array)
    assert slice_size(10, 3) == 4
    assert (added(parts) == norm_partials(device, [holding(values, whole(10), device, fp32)], 3).array).all()


@pytest.mark.parametrize(("value", "norm"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_shows(value: float, norm: float) -> None:
    device = cpu()
    values = np.ones(10)
    values[7] = value
    partials = norm_partials(device, [holding(values, whole(10), device, fp16)], 4)
    assert np.isfinite(partials.array[0]).tolist() == [True, True, False, True]
    assert total_norm(device, partials) == pytest.approx(norm, nan_ok=True)


def test_squares_of_half_types_do_not_overflow() -> None:
    device = cpu()
    partials = norm_partials(device, [holding(np.full(4, 60000.0), whole(4), device, fp16)], 1)
    assert total_norm(device, partials) == 2 * float(np.float16(60000))


def _buffer(device: Device, values: np.ndarray):  # type: ignore[no-untyped-def]
    buffer = device.alloc(values.shape, fp64, Kind.TEMP)
    buffer.array[...] = values
    return buffer
