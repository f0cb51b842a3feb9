"""Codes of 8 bits and their scales, against ml_dtypes and by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eight_bits import decoded, quantized

from zerosim.dtypes import fp32, uint8
from zerosim.errors import InputError
from zerosim.tensor import float8, float8_codes
from zerosim.tensor.float8 import E4M3, E5M2, KINDS, Casting, Kind

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
TENSORWISE, ROWWISE = Casting(E4M3, (0, 0)), Casting(E4M3, (1, 0))
BLOCKWISE, WEIGHTS = Casting(E4M3, (1, 128)), Casting(E4M3, (128, 128))
MX = Casting(E4M3, (1, 32), "e8m0")


def patterns(seed: int = 0) -> dict[str, Any]:
    """Every bf16 and fp16 number, and random fp32 bits, as fp32 rows."""
    every = np.arange(2**16, dtype=np.uint16)
    drawn = np.random.default_rng(seed).integers(0, 2**32, 500_000, dtype=np.uint32)
    found = {
        "bf16": every.view(ml_dtypes.bfloat16).astype(np.float32),
        "fp16": every.view(np.float16).astype(np.float32),
        "fp32": drawn.view(np.float32),
    }
    return {name: values.reshape(1, -1) for name, values in found.items()}


@KIND
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_codes_are_those_of_ml_dtypes(kind: Kind, name: str) -> None:
    """Without saturation. Of e5m2's three nans ml_dtypes writes 0x7e, and PyTorch and zerosim 0x7f."""
    values = patterns()[name]
    with np.errstate(all="ignore"):
        theirs = values.astype(TYPES[kind.name]).view(np.uint8)
    ours = float8_codes.codes_of(np, kind, values, saturate=False)
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert set(ours[nan] & 0x7F) == {0x7F}
    assert set(theirs[nan] & 0x7F) == {0x7F if kind is E4M3 else 0x7E}


@KIND
def test_codes_stand_for_the_values_of_ml_dtypes(kind: Kind) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        float8_codes.values_of(np, kind, codes), codes.view(TYPES[kind.name]).astype(np.float32)
    )
    assert kind.largest == float(ml_dtypes.finfo(TYPES[kind.name]).max)
    assert kind.smallest_normal == float(ml_dtypes.finfo(TYPES[kind.name]).smallest_normal)


def test_bytes_stand_for_the_powers_of_ml_dtypes() -> None:
    scales = np.arange(256, dtype=np.uint8)
    theirs = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(float8_codes.powers_of(np, scales), theirs)


@KIND
def test_every_code_comes_back(kind: Kind) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    values = float8_codes.values_of(np, kind, codes)
    finite = np.isfinite(values)
    for saturate in (True, False):
        again = float8_codes.codes_of(np, kind, values, saturate)
        np.testing.assert_array_equal(again[finite], codes[finite])


@KIND
def test_too_large_numbers_saturate_or_overflow(kind: Kind) -> None:
    """448 * 1.03125 lies half way to the next code that there would be, and rounds to the even one, 448."""
    values = np.array([[kind.largest, kind.largest * 2, -np.inf, np.inf, np.nan]], np.float32)
    ends = float8_codes.values_of(np, kind, float8_codes.codes_of(np, kind, values, saturate=True))[0]
    np.testing.assert_array_equal(ends, [kind.largest, kind.largest, -kind.largest, kind.largest, np.nan])
    ends = float8_codes.values_of(np, kind, float8_codes.codes_of(np, kind, values, saturate=False))[0]
    over = np.nan if kind is E4M3 else np.inf
    np.testing.assert_array_equal(ends, [kind.largest, over, -over, over, np.nan])


def test_grids_and_arrays() -> None:
    assert TENSORWISE.arrays(300, 200) == [((300, 200), uint8), ((1, 1), fp32)]
    assert [one.grid(300, 200) for one in (TENSORWISE, ROWWISE, BLOCKWISE, WEIGHTS)] == [
        (1, 1), (300, 1), (300, 2), (3, 2),
    ]  # fmt: skip
    assert MX.arrays(3, 64) == [((3, 64), uint8), ((3, 2), uint8)]
    assert TENSORWISE.grid(0, 64) == (1, 1)
    with pytest.raises(InputError, match="multiple of 32"):
        MX.grid(3, 40)


@pytest.mark.parametrize("casting", [TENSORWISE, ROWWISE, BLOCKWISE, WEIGHTS, WEIGHTS._replace(rule="deepseek")])
def test_blocks_share_scales_at_ragged_ends_too(casting: Casting) -> None:
    """Each block alone gives what the whole matrix gives for it."""
    values = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    codes, scales = quantized(casting, values)
    high, wide = casting.block[0] or 300, casting.block[1] or 200
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
            alone, scale = quantized(casting, values[at])
            np.testing.assert_array_equal(codes[at], alone)
            assert scales[row, column] == scale
    back = decoded(casting, codes, scales)
    assert np.abs(back - values).max() <= np.abs(values).max() * 2.0**-4


@pytest.mark.parametrize("casting", [TENSORWISE, ROWWISE, MX, MX._replace(rounding="rceil"), BLOCKWISE])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_views_and_half_types_give_the_same_codes(casting: Casting, dtype: Any) -> None:
    values = np.random.default_rng(1).standard_normal((128, 96)).astype(dtype)
    codes, scales = quantized(casting, np.ascontiguousarray(values.T.astype(np.float32)))
    views = quantized(casting, values.T)
    np.testing.assert_array_equal(views[0], codes)
    np.testing.assert_array_equal(views[1], scales)
    wide = np.empty((codes.shape[1], codes.shape[0]), np.uint8).T  # codes written through a view
    float8.encode(np, casting, values.T, scales, wide)
    assert np.mean(wide != codes) < 1e-3  # 1 / scale may differ from the factor in its last place


def test_without_factors_codes_differ_rarely_and_by_one() -> None:
    values = np.random.default_rng(2).standard_normal((64, 512)).astype(np.float32)
    codes, scales = quantized(ROWWISE, values)
    again = np.empty_like(codes)
    float8.encode(np, ROWWISE, values, scales, again)
    assert np.abs(again.astype(int) - codes).max() <= 1
    float8.encode(
        np, ROWWISE, values, scales, again, float8.factors_from(np, ROWWISE, float8.amax_of(np, ROWWISE, values))
    )
    np.testing.assert_array_equal(again, codes)


def test_empty_matrices_have_scales() -> None:
    codes, scales = quantized(TENSORWISE, np.zeros((0, 64), np.float32))
    assert codes.shape == (0, 64)
    np.testing.assert_array_equal(scales, [[np.float32(1) / np.float32(448e12)]])


# -- Transformer Engine, whose rules are written down here once more --------------------------------------


def te_factor(amax: float, largest: float, power: bool) -> float:
    if amax == 0 or not np.isfinite(amax):
        return 1.0
    with np.errstate(over="ignore"):
        factor = np.float32(largest) / np.float32(amax)
    factor = min(factor, np.finfo(np.float32).max)
    return float(2.0 ** (np.frexp(factor)[1] - 1)) if power else float(factor)


@KIND
@pytest.mark.parametrize("power", [False, True])
def test_transformer_engines_factors(kind: Kind, power: bool) -> None:
    amax = np.array([[0, 1e-45, 1e-38, 1e-12, 0.3, 1, 447.9, 448, 1e30, 3e38, np.inf, np.nan]], np.float32)
    casting = Casting(kind, (1, 1), power_of_two=power, rule="te")
    factors = float8.factors_from(np, casting, amax)
    np.testing.assert_array_equal(
        factors[0], [np.float32(te_factor(float(one), kind.largest, power)) for one in amax[0]]
    )
    out = np.empty_like(amax)
    float8.scales_from(np, casting, amax, out)
    np.testing.assert_array_equal(out, np.float32(1) / factors)


@KIND
def test_transformer_engine_rounds_e8m0_scales_up(kind: Kind) -> None:
    """By integers: the smallest power of two whose product with the largest number reaches amax."""
    casting = Casting(kind, (1, 32), "e8m0", "rceil", rule="te")
    random = np.random.default_rng(0)
    amax = np.ldexp(random.uniform(1, 2, 5000), random.integers(-100, 120, 5000)).astype(np.float32)
    edges = np.ldexp(np.float32(kind.largest), np.arange(-100, 100)).astype(np.float32)
    amax = np.concatenate([amax, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    found = np.empty((1, len(amax)), np.uint8)
    float8.scales_from(np, casting, amax.reshape(1, -1), found)
    powers = np.ldexp(1.0, found[0].astype(int) - 127)
    reach = amax.astype(np.float64) / kind.largest
    assert np.all(reach <= powers)
    assert np.all(reach > powers / 2 * (1 - 2.0**-24))  # a product that rounds to the power of two counts as it
    ends = np.array([[0, np.inf, np.nan, 1e-45]], np.float32)
    float8.scales_from(np, casting, ends, found[:, :4])
    assert found[0, :4].tolist() == [0, 254, 255, 0]


def test_transformer_engines_maximum_skips_nan() -> None:
    values = np.array([[1, np.nan, -3, 2]], np.float32)
    assert np.isnan(float8.amax_of(np, TENSORWISE, values))
    assert float8.amax_of(np, TENSORWISE._replace(rule="te"), values) == 3


def test_delayed_scaling() -> None:
    casting = Casting(E4M3, (0, 0), margin=1, rule="te")
    history = np.array([2, 8, 4, 0], np.float32)
    assert float8.delayed_factor(np, casting, history) == 448 / 2 / 8
    assert float8.delayed_factor(np, casting, history, "most_recent") == 448 / 2 / 2
    assert float8.delayed_scale(np, casting, history) == np.float32(1) / np.float32(28)
    assert float8.rolled(np, history).tolist() == [0, 4, 0, 2]
    for first in (0, np.inf):
        history[0] = first
        assert float8.delayed_factor(np, casting, history, former=np.float32(7)) == 7
        assert float8.delayed_factor(np, casting, history) == 1
    history[0] = np.nan
    assert float8.delayed_factor(np, casting, history) == 28
    assert float8.delayed_factor(np, casting, history, "most_recent", np.float32(7)) == 7
    history[0] = 0
    np.testing.assert_array_equal(float8.rolled(np, history), history)  # not used in this step
    assert float8.rolled(np, np.array([3], np.float32)).tolist() == [0]


def test_several_histories_at_once() -> None:
    history = np.array([[1, 0], [2, 5]], np.float32)
    assert float8.delayed_factor(np, TENSORWISE, history).tolist() == [224, 1]
    assert float8.rolled(np, history).tolist() == [[0, 0], [1, 5]]


# -- DeepSeek -------------------------------------------------------------------------------------------


def test_deepseeks_scales_are_amax_over_448() -> None:
    casting = BLOCKWISE._replace(rule="deepseek")
    values = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    values[1] = 0
    codes, scales = quantized(casting, values)
    blocks = values.reshape(4, 2, 128)
    expected = np.maximum(np.abs(blocks).max(axis=2), np.float32(1e-4)) / np.float32(448)
    np.testing.assert_array_equal(scales, expected)
    theirs = (blocks / expected[:, :, None]).reshape(4, 256).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, theirs.view(np.uint8))
    powers = quantized(casting._replace(power_of_two=True), values)[1]
    assert np.all((powers >= expected) & (powers < 2 * expected))
    assert np.all(np.frexp(powers)[0] == 0.5)


# -- fates ----------------------------------------------------------------------------------------------


def test_fates_are_counted() -> None:
    values = np.array([[448, 1, 0, 2**-7, 2**-12, np.nan, 1e4, 2**-6]], np.float32)
    one = np.ones((1, 1), np.float32)
    assert float8.fates(TENSORWISE, values, one) == (4, 1, 1, 2)
    own = float8.fates(TENSORWISE._replace(rule="te"), values)
    assert sum(own) == values.size
    assert own.overflowed == 1  # the nan


def test_finer_blocks_lose_fewer_small_numbers() -> None:
    """The table of docs/eight_bits.md, "Five scalings"."""
    normal = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    values = np.ldexp(normal, np.arange(1024)[:, None] % 24 - 12).astype(np.float32)
    tensorwise, rowwise, floor, rceil, e5m2 = (
        float8.fates(casting, values)
        for casting in (
            TENSORWISE,
            ROWWISE._replace(power_of_two=True),
            MX,
            MX._replace(rounding="rceil"),
            TENSORWISE._replace(kind=E5M2),
        )
    )
    assert [round(100 * one.to_zero / values.size, 3) for one in (rowwise, floor, rceil)] == [0.001] * 3
    assert [round(100 * one.fewer_digits / values.size, 2) for one in (rowwise, floor, rceil)] == [0.01] * 3
    assert round(100 * floor.overflowed / values.size, 1) == 0.6
    assert round(100 * tensorwise.to_zero / values.size, 1) == 32.2
    assert round(100 * tensorwise.fewer_digits / values.size, 1) == 16.4
    assert round(100 * e5m2.to_zero / values.size, 2) == 0.03
    assert [one.overflowed for one in (tensorwise, rowwise, rceil)] == [0, 0, 0]


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
def test_a_nan_costs_its_block_or_itself(rounding: str) -> None:
    """torchao's maximum is nan, Transformer Engine's skips it."""
    values = np.ones((1, 32), np.float32)
    values[0, 3] = np.nan
    torchao, te = (MX._replace(rounding=rounding, rule=rule) for rule in ("torchao", "te"))
    assert np.isnan(decoded(torchao, *quantized(torchao, values))).all()
    assert np.isnan(decoded(te, *quantized(te, values))).sum() == 1
    assert np.isnan(decoded(TENSORWISE, *quantized(TENSORWISE, values))).all()
    once = TENSORWISE._replace(rule="te")
    assert np.isnan(decoded(once, *quantized(once, values))).sum() == 1
