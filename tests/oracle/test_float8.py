"""8-bit codes and scales beside PyTorch's casts and torchao's float8, MX and blockwise quantisers: all `==`.

Each row of docs/eight_bits.md, "Where libraries differ", has a test here or in tests/tensor/test_float8.py.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from eight_bits import decoded, quantized

from zerosim.tensor import float8, float8_codes
from zerosim.tensor.float8 import E4M3, E5M2, KINDS, Casting, Kind

pytest.importorskip("torchao")
from torchao.float8 import float8_utils
from torchao.float8.config import Float8LinearConfig, ScalingGranularity
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
ROUNDINGS = [mode.value for mode in ScaleCalculationMode]


def matrix(name: str) -> Any:
    """fp32 (256, 512): random, or every number of a half type, or bits, or edges."""
    random = np.random.default_rng(7)
    normal = random.standard_normal((256, 512)).astype(np.float32)
    every = np.arange(2**16, dtype=np.uint16).reshape(128, 512)
    bits = random.integers(0, 2**32, (256, 512), dtype=np.uint32).view(np.float32)
    edges = normal.copy()
    edges[3, 5], edges[9, 9], edges[20], edges[30, :32], edges[40, ::2] = np.nan, -np.inf, 0, 1e-13, -0.0
    return {
        "normal": normal,
        "wide": (normal * np.exp2(random.integers(-60, 60, normal.shape))).astype(np.float32),
        "tiny": normal * np.float32(1e-40),
        "zero": np.zeros((8, 64), np.float32),
        "edges": edges,
        "bf16": every.view(ml_dtypes.bfloat16).astype(np.float32),
        "fp16": every.view(np.float16).astype(np.float32),
        "bits": bits,
    }[name]


NAMES = ["normal", "wide", "tiny", "zero", "edges", "bf16", "fp16", "bits"]
NAME = pytest.mark.parametrize("name", NAMES)


def same_codes(ours: Any, theirs: Any) -> None:
    """`==`, but the sign of a nan, which a processor's product of two nans chooses."""
    ours, theirs = (np.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)


def raw(codes: torch.Tensor) -> Any:
    return codes.view(torch.uint8).numpy()


# -- casts ----------------------------------------------------------------------------------------------


@NAME
@KIND
def test_codes_are_those_of_pytorchs_casts(kind: Kind, name: str) -> None:
    """PyTorch 2.13 saturates e4m3fn, and maps infinity to 448. In e5m2 it does not saturate. Signs of nan too."""
    values = matrix(name)
    theirs = raw(torch.from_numpy(values).to(TYPES[kind.name]))
    np.testing.assert_array_equal(float8_codes.codes_of(np, kind, values, saturate=kind is E4M3), theirs)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@KIND
def test_half_types_are_cast_by_way_of_fp32(kind: Kind, half: torch.dtype) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(half).reshape(1, -1)
    wide = values.float().numpy()
    same_codes(float8_codes.codes_of(np, kind, wide, saturate=kind is E4M3), raw(values.to(TYPES[kind.name])))


@KIND
def test_codes_stand_for_pytorchs_values(kind: Kind) -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(TYPES[kind.name]).float().numpy()
    np.testing.assert_array_equal(float8_codes.values_of(np, kind, codes), theirs)


def test_bytes_stand_for_pytorchs_powers() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(float8_codes.powers_of(np, codes), theirs)


def test_casts_of_large_numbers_differ_by_library() -> None:
    values = np.array([449, 1e9, np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        e4m3, e5m2 = (
            values.astype(kind).view(np.uint8).tolist() for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
        )
    assert raw(torch.from_numpy(values).to(torch.float8_e4m3fn)).tolist() == [0x7E, 0x7E, 0x7E, 0x7F]
    assert e4m3 == [0x7E, 0x7F, 0x7F, 0x7F]
    assert raw(torch.from_numpy(values).to(torch.float8_e5m2)).tolist() == [0x5F, 0x7C, 0x7C, 0x7F]
    assert e5m2 == [0x5F, 0x7C, 0x7C, 0x7E]


def test_e8m0_casts_of_zero_and_of_negative_numbers_differ_by_library() -> None:
    """No rule here casts to e8m0: scales are found by their exponents."""
    values = np.array([0, -1, 1.5, np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        theirs = values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist()
    assert raw(torch.from_numpy(values).to(torch.float8_e8m0fnu)).tolist() == [0, 127, 128, 255, 255]
    assert theirs == [255, 255, 128, 255, 255]


# -- torchao's float8 -----------------------------------------------------------------------------------


def torchao_float8(values: torch.Tensor, kind: Kind, casting: Casting) -> tuple[Any, Any]:
    """Codes, and the reciprocal of torchao's scale, which it hands to the product."""
    rowwise = casting.block == (1, 0)
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    scale = float8_utils.tensor_to_scale(
        values,
        TYPES[kind.name],
        scaling_granularity=granularity,
        axiswise_dim=-1 if rowwise else None,
        round_scales_to_power_of_2=casting.power_of_two,
    )
    codes = float8_utils.to_fp8_saturated(values.float() * scale, TYPES[kind.name])
    return raw(codes), scale.reciprocal().numpy()


@pytest.mark.parametrize("power", [False, True], ids=["", "power"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0)], ids=["tensorwise", "rowwise"])
@NAME
@KIND
def test_codes_and_scales_are_torchaos(kind: Kind, name: str, block: tuple[int, int], power: bool) -> None:
    values, casting = matrix(name), Casting(kind, block, power_of_two=power)
    codes, scales = quantized(casting, values)
    theirs, inverse = torchao_float8(torch.from_numpy(values), kind, casting)
    np.testing.assert_array_equal(scales, inverse.reshape(scales.shape))
    same_codes(codes, theirs)


@pytest.mark.parametrize("block", [(0, 0), (1, 0)], ids=["tensorwise", "rowwise"])
def test_bf16_operands_and_transposed_views_are_torchaos(block: tuple[int, int]) -> None:
    values = torch.from_numpy(matrix("normal")).bfloat16()
    ours = values.float().numpy().astype(ml_dtypes.bfloat16)
    casting = Casting(E4M3, block)
    for view, mine in ((values, ours), (values.t(), ours.T)):
        theirs, inverse = torchao_float8(view, E4M3, casting)
        codes, scales = quantized(casting, mine)
        np.testing.assert_array_equal(codes, theirs)
        np.testing.assert_array_equal(scales, inverse.reshape(scales.shape))


def test_recipes_have_the_kinds_and_scales_that_torchao_names() -> None:
    tensorwise = Float8LinearConfig.from_recipe_name("tensorwise")
    assert tensorwise.cast_config_grad_output.target_dtype == torch.float8_e5m2
    assert not tensorwise.round_scales_to_power_of_2
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    assert rowwise.cast_config_grad_output.target_dtype == torch.float8_e4m3fn
    assert rowwise.round_scales_to_power_of_2


def near_powers() -> Any:
    """fp32 numbers within 64 steps of 2^k on both sides, k from -100 to 100."""
    powers = np.ldexp(np.float32(1), np.arange(-100, 101)).astype(np.float32).view(np.uint32)
    return (powers[:, None] + np.arange(-64, 65)).astype(np.uint32).view(np.float32)


def test_factors_that_are_rounded_down_can_be_rounded_up() -> None:
    """By log2 in fp32, in torchao. Transformer Engine clears the digits."""
    amax = (np.float64(448) / near_powers()).astype(np.float32)
    ours = float8.factors_from(np, Casting(E4M3, (1, 1), power_of_two=True), amax)
    theirs = float8_utils.amax_to_scale(torch.from_numpy(amax), torch.float8_e4m3fn, True).numpy()
    np.testing.assert_array_equal(ours, theirs)
    exact = float8.factors_from(np, Casting(E4M3, (1, 1), rule="te"), amax)
    te = float8.factors_from(np, Casting(E4M3, (1, 1), power_of_two=True, rule="te"), amax)
    assert np.all(te <= exact)
    assert np.mean(theirs > exact) > 0.1
    assert np.all(theirs <= 2 * te)


def test_tensorwise_factors_differ_between_torchao_and_transformer_engine() -> None:
    """amax 0, infinity, nan; and elsewhere nothing, though one divides in fp64."""
    amax = np.array([[0, np.inf, np.nan]], np.float32)
    torchao, te = (float8.factors_from(np, Casting(E4M3, (0, 0), rule=rule), amax)[0] for rule in ("torchao", "te"))
    np.testing.assert_array_equal(torchao, np.array([448e12, 0, np.nan], np.float32))
    np.testing.assert_array_equal(te, [1, 1, 1])
    amax = np.abs(matrix("normal"))
    torchao, te = (float8.factors_from(np, Casting(E4M3, (0, 0), rule=rule), amax) for rule in ("torchao", "te"))
    np.testing.assert_array_equal(torchao, te)


def test_torchao_decodes_by_a_division_where_its_products_multiply() -> None:
    """`to_original_precision` divides by the scale, the product multiplies by its reciprocal: a last place apart."""
    values = torch.from_numpy(matrix("normal"))
    scale = float8_utils.tensor_to_scale(values, torch.float8_e4m3fn)
    codes, scales = quantized(Casting(E4M3, (0, 0)), values.numpy())
    ours = decoded(Casting(E4M3, (0, 0)), codes, scales)
    wide = float8_utils.to_fp8_saturated(values * scale, torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(ours, (wide * scale.reciprocal()).numpy())
    divided = (wide / scale).numpy()
    assert np.any(ours != divided)
    np.testing.assert_allclose(ours, divided, rtol=2.0**-22)


# -- torchao's MX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@NAME
@KIND
def test_codes_and_bytes_are_torchaos_mx(kind: Kind, name: str, rounding: str) -> None:
    values, casting = matrix(name), Casting(kind, (1, 32), "e8m0", rounding)
    codes, scales = quantized(casting, values)
    theirs, lowered = to_mx(torch.from_numpy(values), TYPES[kind.name], 32, ScaleCalculationMode(rounding))
    np.testing.assert_array_equal(scales, raw(theirs))
    same_codes(codes, raw(lowered))
    back = to_dtype(lowered, theirs, TYPES[kind.name], 32, torch.float32).numpy()
    np.testing.assert_array_equal(decoded(casting, codes, scales), back)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bf16_blocks_are_torchaos(rounding: str) -> None:
    values = torch.from_numpy(matrix("normal")).bfloat16()
    theirs, lowered = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode(rounding))
    ours = values.float().numpy().astype(ml_dtypes.bfloat16)
    codes, scales = quantized(Casting(E4M3, (1, 32), "e8m0", rounding), ours)
    np.testing.assert_array_equal(scales, raw(theirs))
    np.testing.assert_array_equal(codes, raw(lowered))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_scales_near_powers_of_two_are_torchaos(rounding: str) -> None:
    """Where `ceil` and `rceil` change, and where log2 in fp32 is off."""
    tops = (near_powers() * np.float32(448)).reshape(-1, 1)
    values = np.concatenate([tops, np.zeros((len(tops), 31), np.float32)], axis=1)
    theirs, _ = to_mx(torch.from_numpy(values), torch.float8_e4m3fn, 32, ScaleCalculationMode(rounding))
    np.testing.assert_array_equal(quantized(Casting(E4M3, (1, 32), "e8m0", rounding), values)[1], raw(theirs))


def test_rceil_in_eager_mode_can_be_too_small() -> None:
    """torchao takes log2 in fp32, a GPU and Transformer Engine the bits. With bf16 values there is no difference."""
    tops = (near_powers() * np.float32(448)).reshape(-1, 1)
    torchao = Casting(E4M3, (1, 1), "e8m0", "rceil")

    def bytes_of(casting: Casting, amax: Any) -> Any:
        out = np.empty(amax.shape, np.uint8)
        float8.scales_from(np, casting, amax, out)
        return out.astype(int)

    off = bytes_of(torchao, tops) - bytes_of(torchao._replace(rule="te"), tops)
    assert set(off.reshape(-1).tolist()) == {-1, 0}
    halves = np.arange(0x0800, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 1)
    assert np.all(bytes_of(torchao, halves) == bytes_of(torchao._replace(rule="te"), halves))


def test_floor_and_even_saturate_the_largest_of_a_block() -> None:
    """The scale is at most amax / 256, so an amax of 465 to 511 times it is clipped to 448."""
    values = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    clipped = {}
    for rounding in ROUNDINGS:
        _, scales = quantized(Casting(E4M3, (1, 32), "e8m0", rounding), values)
        scaled = np.abs(values / float8_codes.powers_of(np, scales))
        clipped[rounding] = float(np.mean(np.any(scaled > 464, axis=1)))
    assert 0.12 < clipped["floor"] < 0.14
    assert 0.07 < clipped["even"] < 0.09
    assert clipped["ceil"] == clipped["rceil"] == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_blocks_below_two_to_the_minus_118_come_back_wrong(rounding: str) -> None:
    """A byte of 0: torchao divides by 2^-126 or by 1, and multiplies by 2^-127. So does zerosim."""
    values = torch.full((1, 32), 2.0**-120)
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode(rounding))
    assert raw(scales).tolist() == [[0]]
    back = to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32)
    assert torch.all(back == (0 if rounding == "rceil" else values / 2))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_block_with_nan_is_lost_as_a_whole(rounding: str) -> None:
    """The byte is 255, nan. The codes beside the nan are zeros, or under rceil nans."""
    values = torch.ones(1, 32)
    values[0, 3] = torch.nan
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode(rounding))
    assert raw(scales).tolist() == [[255]]
    assert set((raw(codes)[0, 4:] & 0x7F).tolist()) == {0x7F if rounding == "rceil" else 0}
    assert torch.all(to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32).isnan())


# -- torchao's blockwise --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blockwise() -> dict[str, Any]:
    """torchao's reference quantisers. Their file imports Triton, which CPUs lack, so only they are read from it."""
    home = importlib.util.find_spec("torchao")
    assert home is not None
    assert home.origin is not None
    path = Path(home.origin).parent / "prototype" / "blockwise_fp8_training" / "kernels.py"
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("torch_")]
    names: dict[str, Any] = {"torch": torch, "EPS": 1e-12, "e4m3_dtype": torch.float8_e4m3fn, "Tuple": tuple}
    names["FP8_E4M3_DTYPES"] = {torch.float8_e4m3fn}
    exec(compile(tree, str(path), "exec"), names)
    assert "EPS = 1e-12" in path.read_text("utf-8")
    return names


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zero"])
@pytest.mark.parametrize(
    ("block", "quantiser"),
    [((1, 128), "torch_blockwise_scale_act_quant_lhs"), ((128, 128), "torch_blockwise_scale_weight_quant")],
    ids=["activations", "weights"],
)
def test_codes_in_blocks_are_torchaos(
    blockwise: dict[str, Any], block: tuple[int, int], quantiser: str, name: str
) -> None:
    values = matrix(name)
    codes, scales = quantized(Casting(E4M3, block), values)
    theirs, inverse = blockwise[quantiser](torch.from_numpy(values))
    same_codes(codes, raw(theirs))
    np.testing.assert_array_equal(scales, inverse.numpy())


def test_columns_in_blocks_are_torchaos(blockwise: dict[str, Any]) -> None:
    """The right operand: blocks of 128 rows, the transposed matrix's rows here."""
    values = matrix("edges")
    codes, scales = quantized(Casting(E4M3, (1, 128)), values.T)
    theirs, inverse = blockwise["torch_blockwise_scale_act_quant_rhs"](torch.from_numpy(values))
    same_codes(codes.T, raw(theirs))
    np.testing.assert_array_equal(scales.T, inverse.numpy())


def test_blockwise_scales_differ_between_torchao_and_deepseek() -> None:
    """1 / (448 / amax) against amax / 448: the last place. A block of zeros: 1e-12 against 1e-4."""
    amax = np.abs(matrix("normal"))
    out = {}
    for rule in ("torchao", "deepseek"):
        out[rule] = np.empty_like(amax)
        float8.scales_from(np, Casting(E4M3, (1, 1), rule=rule), amax, out[rule])
    large = amax > 1e-4
    np.testing.assert_array_max_ulp(out["torchao"][large], out["deepseek"][large], 1)
    assert np.mean(out["torchao"] != out["deepseek"]) > 0.05
    zero = np.zeros((1, 1), np.float32)
    for rule, least in (("torchao", 1e-12), ("deepseek", 1e-4)):
        float8.scales_from(np, Casting(E4M3, (1, 1), rule=rule), zero, out["torchao"][:1, :1])
        assert out["torchao"][0, 0] == pytest.approx(least / 448, rel=1e-6)


def test_e5m2_reaches_further_with_fewer_digits() -> None:
    values = matrix("normal")
    errors = {}
    for kind in (E4M3, E5M2):
        codes, scales = quantized(Casting(kind, (0, 0)), values)
        errors[kind.name] = np.sqrt(np.mean((decoded(Casting(kind, (0, 0)), codes, scales) - values) ** 2))
    assert 1.7 < errors["e5m2"] / errors["e4m3"] < 2.3
