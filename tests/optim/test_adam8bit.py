"""8-bit Adam: the table and its codes, which tensors have them, the same step under every stage, and its bytes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks
from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.backends.kernels import AdamStep, Coded
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.backends.numpy.quantize import dequantize, dynamic_map, nearest, quantize
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.dtypes import fp32
from zerosim.errors import InputError
from zerosim.optim.adam import Adam
from zerosim.optim.adam8bit import Adam8bit
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import cpu
from zerosim.train.plan import plan
from zerosim.train.run import run

CODED = dict(layers=1, hidden=36, heads=2, seq=8, vocab=256, micro_batch=1, optimizer="adam8bit")
"""Tensors of 36 x 144 elements: 20 blocks of 256, and a quarter of one."""


# -- the quantiser -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("signed", "smallest"), [(True, -1 + 0.9 / 128), (False, 0.0)])
def test_a_table_has_256_numbers_in_seven_decades(signed: bool, smallest: float) -> None:
    table = dynamic_map(signed)
    assert table.dtype == np.float32
    assert len(set(table)) == 256
    assert list(table) == sorted(table)
    assert table[0] == np.float32(smallest)
    assert {0.0, 1.0} < set(table)
    positive = table[(table > 0) & (table < 1)].astype(np.float64)
    counts = [int(((positive > 10.0**e) & (positive < 10.0 ** (e + 1))).sum()) for e in range(-7, 0)]
    assert counts == [(1 if signed else 2) * 2**i for i in range(7)]


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_that_of_the_nearest_entry(signed: bool) -> None:
    table, random = dynamic_map(signed), np.random.default_rng(0)
    exact = table.astype(np.float64)
    values = np.concatenate([random.uniform(-1, 1, 2000), 10 ** random.uniform(-8, 0, 2000), table]).astype(np.float32)
    distance = np.abs(values[:, None].astype(np.float64) - exact)
    codes = nearest(values, table)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(distance[np.arange(values.size), codes], distance.min(1))
    np.testing.assert_array_equal(nearest((exact[:-1] + exact[1:]) / 2, table), np.arange(255))  # the lower one


def test_a_block_is_divided_by_its_largest_magnitude() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    values[256:512] = 0
    values[900] = -7
    codes, absmax = quantize(values, dynamic_map(True))
    assert absmax.dtype == np.float32
    assert list(absmax) == [np.abs(values[start : start + 256]).max() for start in range(0, 1000, 256)]
    assert absmax[1] == 0
    back = dequantize(codes, absmax, dynamic_map(True))
    np.testing.assert_array_equal(back[256:512], 0)
    assert back[900] == 7 * dynamic_map(True)[0]
    widest = np.diff(dynamic_map(True)).max()
    assert (np.abs(back - values) <= np.repeat(absmax, 256)[:1000] * widest).all()
    part, scale = quantize(values[512:], dynamic_map(True))
    np.testing.assert_array_equal(part, codes[512:])
    np.testing.assert_array_equal(scale, absmax[2:])


# -- the step ------------------------------------------------------------------------------------------------
def updater_of(optimizer: Optimizer) -> Updater:
    return Updater(optimizer, StepControl(LRSchedule(0.1)))


def steps(optimizer: Optimizer, count: int) -> dict[str, Any]:
    """Weights by name after so many steps along the same gradients, and the states."""
    device, random = cpu(), np.random.default_rng(2)
    flat = Flat("f", device, fp32, fp32)
    for name, shape in (("wte", (80, 60)), ("large", (60, 70)), ("small", (60, 68)), ("bias", (70,))):
        flat.declare(name, shape, embedding=name == "wte")
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param_shard = device.alloc((flat.numel,), fp32, Kind.PARAM)
    device.backend.from_host(random.standard_normal(flat.numel), flat.param_shard.array)
    updater = updater_of(optimizer)
    updater.allocate(flat)
    for _ in range(count):
        flat.grad_shard = device.alloc((flat.numel,), fp32, Kind.GRAD)
        device.backend.from_host(random.standard_normal(flat.numel) * 1024, flat.grad_shard.array)
        assert updater.decide(1.0) is not None
        updater.update(flat, 1 / 1024)
    values = {w.name: flat.window(flat.weights(), i).array.reshape(-1) for i, w in enumerate(flat.spec.weights)}
    return {**values, **{name: state.array for name, state in flat.states.items()}}


@pytest.mark.bits
def test_large_tensors_have_codes_and_all_others_are_adams() -> None:
    """4,096 elements are large. Weights move before states are rounded: the first step is Adam's throughout."""
    adamw = Adam(0.9, 0.95, 1e-8, 0.1, decoupled=True)
    for count in (1, 3):
        mine, adams = steps(Adam8bit(0.9, 0.95, 1e-8, 0.1), count), steps(adamw, count)
        for name in ("wte", "small", "bias"):
            np.testing.assert_array_equal(mine[name], adams[name])
        assert np.array_equal(mine["large"], adams["large"]) == (count == 1)
        np.testing.assert_allclose(mine["large"], adams["large"], rtol=0, atol=0.1)  # a step or so of lr 0.1
        assert mine["exp_avg"].dtype == mine["exp_avg_sq"].dtype == np.uint8
        assert [mine[name].size for name in ("exp_avg", "exp_avg_absmax", "exp_avg_float")] == [4200, 17, 8950]


@pytest.mark.bits
def test_a_step_is_adams_on_what_codes_stand_for() -> None:
    backend, random, n = NumpyBackend(), np.random.default_rng(3), 20_000  # more than are treated at once
    w, g = random.standard_normal((2, n)).astype(np.float32)
    m, m_scale = quantize(random.standard_normal(n).astype(np.float32), dynamic_map(True))
    v, v_scale = quantize(random.random(n).astype(np.float32), dynamic_map(False))
    moments = dequantize(m, m_scale, dynamic_map(True)), dequantize(v, v_scale, dynamic_map(False))
    expected, hyper = w.copy(), AdamStep(0.5, 0.01, 0.9, 0.95, 1e-8, 0.1, True, 5)
    backend.adam(expected, g, *moments, hyper)
    backend.adam8bit(w, g, Coded(m, m_scale), Coded(v, v_scale), hyper)
    np.testing.assert_array_equal(w, expected)
    for codes, scale, moment, signed in ((m, m_scale, moments[0], True), (v, v_scale, moments[1], False)):
        np.testing.assert_array_equal(codes, quantize(moment, dynamic_map(signed))[0])
        np.testing.assert_array_equal(scale, quantize(moment, dynamic_map(signed))[1])


@pytest.mark.bits
def test_blocks_are_the_same_however_they_are_held() -> None:
    options = dict(CODED, steps=3, precision="bf16", clip_norm=0.1, weight_decay=0.1)
    for ranks in (2, 3):
        whole_states = run(RunConfig(ranks=ranks, stage=0, **options))
        assert all(check.agrees for check in (*checks(whole_states)[0].states, *checks(whole_states, 0)[0].sent))
        for stage, partition in ((1, "slices"), (2, "owner"), (3, "slices")):
            cut = run(RunConfig(ranks=ranks, stage=stage, partition=partition, **options))
            assert all(check.agrees for check in (*checks(cut)[0].states, *checks(cut, 0)[0].sent))
            for name, weight in whole_states.weights.items():
                np.testing.assert_array_equal(cut.weights[name], weight)


# -- bytes ---------------------------------------------------------------------------------------------------
def test_k_is_a_byte_for_each_code_and_8_for_a_block() -> None:
    large = plan(RunConfig(model="flat", params=8 * 2**20, units=2, ranks=8, stage=2, optimizer="adam8bit"))
    assert bytes_per_parameter(large)["optim"] == Fraction(193, 32) == 6.03125
    assert large.memory[0].states == {
        "exp_avg": 2**20,
        "exp_avg_sq": 2**20,
        "exp_avg_absmax": 2**14,
        "exp_avg_sq_absmax": 2**14,
        "exp_avg_float": 0,
        "exp_avg_sq_float": 0,
        "master": 2**22,
    }


def test_gaps_are_padding_and_no_parameters() -> None:
    """(36, 144) and (144, 36) have 21 blocks each, 42 elements of them short of 256; everything else keeps floats."""
    result = plan(RunConfig(ranks=3, stage=3, steps=1, **CODED), every_rank=True)
    params = 256 * 36 + 8 * 36 + (36 * 108 + 108) + (36 * 36 + 36) + (36 * 144 + 144) + (144 * 36 + 36) + 6 * 36
    assert result.num_parameters == params
    coded = 2 * 36 * 144
    states = {name: sum(memory.states[name] for memory in result.memory) for name in result.memory[0].states}
    assert states["exp_avg"] == states["exp_avg_sq"] == coded
    assert states["exp_avg_absmax"] == states["exp_avg_sq_absmax"] == 4 * 2 * 21
    assert states["exp_avg_float"] == states["exp_avg_sq_float"] == 4 * (params - coded)
    padding = [memory.marks["end_of_backward"].padding for memory in result.memory]
    assert states["master"] == 4 * params + sum(each["optim"] for each in padding)
    assert sum(each["param"] for each in padding) * 2 == sum(each["optim"] for each in padding)
    assert plan(RunConfig(ranks=3, stage=3, steps=1, **CODED)).memory == result.memory


@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_averages_gaps_too(rank: int) -> None:
    """Of buffers with a compressed matrix, and of those without one, which are sent as they lie."""
    sizes: dict[str, Any] = dict(layers=2, hidden=4, heads=2, seq=2, vocab=256, ranks=2, stage=0, grad_dtype="fp32")
    result = plan(RunConfig(**sizes, steps=1, compress="powersgd", compress_rank=rank, optimizer="adam8bit"))
    assert all(check.agrees for check in checks(result, 0)[0].sent)


def test_slices_not_laid_out_in_blocks_are_refused() -> None:
    config = RunConfig(layers=1, hidden=8, heads=1, seq=4, ranks=2, stage=1, steps=1)
    with pytest.raises(InputError, match="Adam8bit needs whole quantization blocks; choose optimizer adam8bit too"):
        run(config, optimizer=Adam8bit())
    assert run(config.replace(optimizer="adam8bit"), optimizer=Adam8bit(0.8)).losses


# -- without masters, and torchao's rule ---------------------------------------------------------------------
@pytest.mark.bits
@pytest.mark.parametrize("optimizer", ["adam8bit", "adam8bit-torchao"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_pure_bf16_has_the_same_bits_and_bytes_at_every_stage(optimizer: str, rounding: str) -> None:
    options = CODED | dict(optimizer=optimizer, steps=2, precision="bf16-pure", rounding=rounding, recipe="paper")
    results = [run(RunConfig(ranks=2, stage=stage, **options)) for stage in (0, 2, 3)]
    for result in results:
        assert all(check.agrees for check in checks(result)[0].states)
        assert "master" not in result.memory[0].states
        for name, weight in results[0].weights.items():
            np.testing.assert_array_equal(result.weights[name], weight)


def test_torchao_keeps_weights_format_where_256_do_not_divide_a_tensor() -> None:
    """Of tensors with 4,096 elements or more, (36, 144) and (144, 36) are not divisible, and the table is coded."""
    options = CODED | dict(optimizer="adam8bit-torchao", steps=1, recipe="paper", ranks=2, stage=0)
    for precision, size in (("bf16", 4), ("bf16-pure", 2)):
        result = plan(RunConfig(precision=precision, **options))
        states, table = result.memory[0].states, 256 * 36
        assert (states["exp_avg"], states["exp_avg_absmax"]) == (table, 4 * 36)
        assert states["exp_avg_float"] == size * (result.num_parameters - table)
    pure = plan(RunConfig(**CODED, steps=1, recipe="paper", ranks=2, stage=0, precision="bf16-pure"))
    assert pure.memory[0].states["exp_avg_float"] == 4 * (pure.num_parameters - 2 * 36 * 144)
