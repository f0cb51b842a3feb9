"""Gradients of a run against what narrow formats hold: counted by casts, checked by exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerosim.backends.numpy.narrow import NARROW, Fates, cast, exponents, fates
from zerosim.config import RunConfig
from zerosim.train.gradients import FORMATS, POWERS, Gradients, count_gradients
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8, micro_batch=2, vocab=256, ranks=1, stage=0)
# Digits after the point, the least exponent of a number that has them all, and the largest number.
BY_HAND = {"fp16": (10, -14, 65504.0), "e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0), "bf16": (7, -126, 2.0**128)}


def by_hand(value: float, name: str) -> str:
    """Where a positive number ends up, in exact arithmetic, half to even."""
    digits, least, largest = BY_HAND[name]
    exact = Fraction(value)
    exponent = max(int(np.frexp(value)[1]) - 1, least)
    gap = Fraction(2) ** (exponent - digits)
    rounded = round(exact / gap) * gap  # Python rounds halves to even
    if rounded == 0:
        return "to_zero"
    if rounded > Fraction(largest):
        return "overflowed"
    return "full" if rounded >= Fraction(2) ** least else "fewer_digits"


@pytest.mark.parametrize("name", FORMATS)
def test_fates_are_those_of_exact_arithmetic(name: str) -> None:
    """At each limit, half way to the next number, and a bit to both sides of it."""
    limits = NARROW[name]
    edges = [limits.smallest / 2, limits.smallest, 1.5 * limits.smallest, limits.min_normal, limits.largest]
    top = limits.largest * (1 + 2.0 ** -(BY_HAND[name][0] + 2))
    with np.errstate(over="ignore"):
        values = np.array([*edges, 0.75 * limits.min_normal, 1.0, min(top, 3e38)], np.float32)
        values = np.concatenate([values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(1e30))])
    values = values[(values > 0) & np.isfinite(values)]
    if name == "bf16":
        values = values[values < 3e38]
    for value in values:
        expected = by_hand(float(value), name)
        assert fates(np.array([value, -value]), name)._asdict()[expected] == 2, (value, expected)


def test_limits_are_those_of_all_patterns() -> None:
    kinds = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    for name, kind in kinds.items():
        every = np.arange(1, 128, dtype=np.uint8).view(kind).astype(np.float64)
        every = every[np.isfinite(every)]
        assert (NARROW[name].smallest, NARROW[name].largest) == (every.min(), every.max())
        assert np.array_equal(cast(every.astype(np.float32), name), every)
    half = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    assert (NARROW["fp16"].smallest, NARROW["fp16"].largest) == (half.min(), half.max())


def test_exponents_are_those_of_the_powers_of_two() -> None:
    values = np.array([1.0, 1.999, -2.0, 0.5, 2.0**-149, -(2.0**100)], np.float32)
    assert exponents(values) == {0: 2, 1: 1, -1: 1, -149: 1, 100: 1}


def test_gradients_are_those_that_the_step_uses() -> None:
    """SGD with a learning rate of 1 subtracts the gradient: the same histogram, from the weights of a run in fp32."""
    config = RunConfig(**SMALL, precision="fp32", optimizer="sgd", steps=1, clip_norm=None)
    found = count_gradients(config)
    before, after = (run(config.replace(lr=lr)).weights for lr in (1e-30, 1.0))
    moved = np.concatenate([(before[name].astype(np.float64) - after[name]).ravel() for name in before])
    large = {power: count for power, count in found.exponents.items() if power >= -10}
    sizes = np.frexp(np.abs(moved[moved != 0]))[1] - 1
    assert found.num == moved.size
    assert sum(found.exponents.values()) == found.num - found.zeros
    # The subtraction rounds: what lies at a power of two may cross it.
    assert sum(large.values()) == pytest.approx(int((sizes >= -10).sum()), rel=0.01)
    assert sum(large.values()) > 100


def test_every_gradient_of_every_step_has_one_fate_in_each_cast() -> None:
    found = count_gradients(RunConfig(**SMALL, steps=3, accumulate=2, clip_norm=1e-6))
    assert found.steps == 3
    assert found.num == 3 * run(RunConfig(**SMALL, steps=1)).num_parameters
    assert set(found.fates) == {(name, power) for name in FORMATS for power in POWERS}
    for name in FORMATS:
        assert {sum(found.fates[name, power]) for power in POWERS} == {found.num - found.zeros}
        zeros, over = zip(
            *((found.fates[name, p].to_zero, found.fates[name, p].overflowed) for p in POWERS), strict=True
        )
        assert list(zeros) == sorted(zeros, reverse=True)
        assert list(over) == sorted(over)
    assert found.fates["bf16", 0] == Fates(found.num - found.zeros, 0, 0, 0)
    assert found.fates["e4m3", 0].to_zero > found.fates["e5m2", 0].to_zero > found.fates["fp16", 0].to_zero
    most = max(found.exponents)  # clipping to 1e-6 comes later: these are the gradients that backward left
    assert most > -10


def test_the_mesh_and_the_precision_of_a_configuration_are_set_aside() -> None:
    plain, other = (RunConfig(**{**SMALL, **changes}, steps=1) for changes in ({}, dict(ranks=4, stage=3)))
    found = [count_gradients(config.replace(precision="bf16")) for config in (plain, other)]
    assert found[0].to_dict() == found[1].to_dict()


def test_zeros_are_counted_apart() -> None:
    found = Gradients()
    found.add(np.array([0.0, 1.0, -(2.0**-30), 0.0], np.float32))
    assert (found.num, found.zeros) == (4, 2)
    assert found.share("fp16", 0) == {"full": 0.5, "fewer_digits": 0.0, "to_zero": 0.5, "overflowed": 0.0}
    assert found.share("e4m3", 12)["overflowed"] == 0.5
