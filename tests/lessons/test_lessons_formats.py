"""Notebook 02: what its cells read off bit patterns is IEEE 754 and bfloat16, its experiments fail and work as told."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zerosim
from zerosim.errors import InputError
from zerosim.lessons.formats import in_8_bits, range_figure, ticks_figure
from zerosim.tensor.float8 import E4M3, Casting


@pytest.fixture(scope="module")
def cells(defined: Any) -> dict[str, Any]:
    """Up to the fates of gradients, and the slope's fit."""
    names: dict[str, Any] = defined("02", "01", "02a", "03", "07", "09", "10", "11a")
    return names


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_counted_limits_are_those_of_the_format(name: str, cells: dict[str, Any]) -> None:
    info = ml_dtypes.finfo({"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}[name])
    expected = [info.smallest_subnormal, info.smallest_normal, info.max, info.eps]
    assert [float(value) for value in cells["limits"][name]] == [float(value) for value in expected]


def test_gradients_are_those_of_the_first_step(cells: dict[str, Any]) -> None:
    first = zerosim.run(cells["config"].replace(precision="fp64", steps=1)).steps[0]
    assert np.linalg.norm(cells["gradients"]) == pytest.approx(first.grad_norm, rel=1e-9)


def test_a_gradient_vanishes_in_fp16_and_a_scale_saves_it(cells: dict[str, Any]) -> None:
    fit = cells["fit_slope"]
    assert fit("fp16", steps=3) == ([0.0] * 3, 0.0)
    exact = -6 * float((np.linspace(-1e-3, 1e-3, 1024) ** 2).mean())
    assert fit("fp16", scale=2.0**10, steps=1)[1] == pytest.approx(exact, rel=2e-3)
    assert fit("bf16", steps=1)[1] == pytest.approx(exact, rel=2e-2)
    assert fit("fp16", scale=2.0**10)[0][-1] == pytest.approx(3.0, abs=0.01)


def test_without_a_master_the_slope_stands_where_gaps_exceed_twice_the_step(cells: dict[str, Any]) -> None:
    fit = cells["fit_slope"]
    assert fit("bf16", lr=0.0075, steps=300, masters=False)[0][-20:] == [2.0] * 20
    assert fit("bf16", lr=0.0075, steps=500)[0][-1] > 2.3


def test_a_tick_for_every_number(cells: dict[str, Any]) -> None:
    halves = {name: cells["values"][name] for name in ("fp16", "bf16")}
    (axes,) = ticks_figure(halves, 1, 1.0625).axes
    assert sorted(len(collection.get_segments()) for collection in axes.collections) == [9, 65]
    with pytest.raises(InputError, match="wider range"):
        ticks_figure(halves, 1.001, 1.0011)


def test_a_bar_for_every_format_and_a_hill_for_every_scale(cells: dict[str, Any]) -> None:
    (axes,) = range_figure(cells["limits"], np.array([1e-3, -1e-4, 0.0]), (1.0, 2.0**16)).axes
    words = {text.get_text() for text in axes.texts}
    assert {"fp16", "bf16", "fp32", "gradients", "gradients times 2¹⁶", "2⁻²⁴"} <= words


@pytest.mark.parametrize("casting", [Casting(E4M3, (1, 32)), Casting(E4M3, (1, 32), "e8m0", "rceil")])
def test_a_matrix_comes_back_from_8_bits_to_three_digits(casting: Casting) -> None:
    values = np.random.default_rng(0).uniform(1, 2, (4, 64)).astype(np.float32)
    back = in_8_bits(casting, values)
    assert 0 < np.abs(back / values - 1).max() <= 1 / 16
