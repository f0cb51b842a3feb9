"""Limits that the lesson counts are those of IEEE 754 and bfloat16; its experiments fail and work as it says."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.lessons import formats

TINY = RunConfig(stage=0, ranks=1, steps=3, layers=1, hidden=16, heads=2, seq=16, micro_batch=2)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_counted_limits_are_those_of_the_format(name: str) -> None:
    info = ml_dtypes.finfo({"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}[name])
    seen = formats.limits(name)
    assert seen.smallest == float(info.smallest_subnormal)
    assert seen.min_normal == float(info.smallest_normal) == dtype(name).min_normal
    assert seen.largest == float(info.max) == dtype(name).max
    assert seen.gap_at_one == float(info.eps) == dtype(name).eps


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_half_value_is_kept_and_the_middle_goes_to_even(name: str) -> None:
    values = formats.half_values(name)
    assert np.array_equal(formats.rounded(values, name), values)
    assert (np.diff(values) > 0).all()
    start = int(np.searchsorted(values, 1.0))
    low, middle, high = values[start], (values[start] + values[start + 1]) / 2, values[start + 2]
    assert formats.rounded(middle, name) == low  # 1 ends in a 0
    assert formats.rounded((values[start + 1] + high) / 2, name) == high


def test_only_16_bits_are_few_enough_to_count() -> None:
    with pytest.raises(InputError, match="fp16 or bf16"):
        formats.half_values("fp32")


def test_gradients_are_those_of_the_first_step() -> None:
    from zerosim import run

    gradients = formats.gradients_of(TINY)
    result = run(TINY.replace(precision="fp64", steps=1))
    assert gradients.size == result.num_parameters
    assert np.linalg.norm(gradients) == pytest.approx(result.steps[0].grad_norm, rel=1e-9)


def test_fates_are_shares_and_move_with_the_scale() -> None:
    gradients = np.array([0.0, 1.0, 1e5, 1e-5, 1e-9])
    assert formats.fate_of(gradients, "fp16") == formats.Fate(1.0, 0.25, 0.25, 0.25, 0.25)
    assert formats.fate_of(gradients, "bf16") == formats.Fate(1.0, 1.0, 0.0, 0.0, 0.0)
    assert formats.fate_of(gradients, "fp16", 2.0**-30).zero == 0.75


def test_a_gradient_vanishes_in_fp16_and_a_scale_saves_it() -> None:
    vanished = formats.fit_slope("fp16", steps=3)
    assert vanished.first_gradient == 0.0
    assert set(vanished.slopes) == {0.0}
    exact = -6 * float((np.linspace(-1e-3, 1e-3, 1024) ** 2).mean())
    assert formats.fit_slope("fp16", loss_scale=2.0**10, steps=1).first_gradient == pytest.approx(exact, rel=2e-3)
    assert formats.fit_slope("bf16", steps=1).first_gradient == pytest.approx(exact, rel=2e-2)
    assert formats.fit_slope("fp16", loss_scale=2.0**10).slopes[-1] == pytest.approx(3.0, abs=0.01)


def test_without_a_master_the_slope_stands_where_gaps_exceed_twice_the_step() -> None:
    lost = formats.fit_slope("bf16", lr=0.0075, steps=300, masters=False)
    assert lost.slopes[-20:] == (2.0,) * 20
    kept = formats.fit_slope("bf16", lr=0.0075, steps=500)
    assert kept.slopes[-1] > 2.3


def test_a_step_moves_all_masters_and_not_all_halves() -> None:
    moved = formats.moved_by_step(TINY.replace(precision="bf16", lr=1e-5), 2)
    assert moved.masters > 0.9
    assert 0 < moved.halves < 0.5
    with pytest.raises(InputError, match="keep masters"):
        formats.moved_by_step(TINY.replace(precision="fp32"), 2)


def test_pictures_show_every_number_and_every_format() -> None:
    (axes,) = formats.ticks_figure(1, 1.0625).axes
    drawn = [len(collection.get_segments()) for collection in axes.collections]
    assert sorted(drawn) == [9, 65]
    with pytest.raises(InputError, match="wider range"):
        formats.ticks_figure(1.001, 1.0011)
    (axes,) = formats.range_figure(np.array([1e-3, -1e-4, 0.0]), (1.0, 2.0**16)).axes
    words = {text.get_text() for text in axes.texts}
    assert {"fp16", "bf16", "fp32", "gradients", "gradients times 2¹⁶", "2⁻²⁴"} <= words
