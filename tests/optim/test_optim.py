"""Optimizers against a transcription of their formulas, schedules, decay, clipping, skipped steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.run import plan_config
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, bf16, compute_dtype, fp16, fp32, fp64
from zerosim.errors import LossScaleExhausted, NonFiniteGradient
from zerosim.optim.adagrad import AdaGrad, RMSProp
from zerosim.optim.adam import Adam
from zerosim.optim.control import StepControl
from zerosim.optim.lion import Lion
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.optimizer import Optimizer, Step
from zerosim.optim.precision import LossScaler
from zerosim.optim.radam import RAdam
from zerosim.optim.sage import AdamSAGE
from zerosim.optim.sgd import SGD
from zerosim.optim.sophia import SophiaG
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, Slice, slice_of, whole
from zerosim.tensor.tensor import cpu
from zerosim.train.plan import plan

pytestmark = pytest.mark.bits

Formula = Callable[..., np.ndarray]
"""Of all but Adam, whose steps are held by `tests/reference.py` to the bit."""


def buffer(device: Device, values: Any, dtype: DType) -> Buffer:
    values = np.asarray(values, np.float64)
    out = device.alloc(values.shape, dtype, Kind.OPTIM)
    device.backend.from_host(values, out.array)
    return out


# -- formulas ------------------------------------------------------------------------------------------------
def sgd(w: np.ndarray, grads: list[np.ndarray], lr: list[float], o: SGD) -> np.ndarray:
    """PyTorch's momentum: the buffer starts as the first gradient, and gathers without 1 - momentum."""
    buf = np.zeros_like(w)
    for g, rate in zip(grads, lr, strict=True):
        buf = o.momentum * buf + g + o.weight_decay * w
        w = w - rate * buf
    return w


def ema(w: np.ndarray, grads: list[np.ndarray], lr: list[float], o: SGD) -> np.ndarray:
    """The textbook's momentum: an average from 0 on; Nesterov looks one step ahead."""
    m = np.zeros_like(w)
    for g, rate in zip(grads, lr, strict=True):
        m = o.momentum * m + (1 - o.momentum) * g
        w = w - rate * (g + o.momentum * m if o.nesterov else m)
    return w


def lion(w: np.ndarray, grads: list[np.ndarray], lr: list[float], o: Lion) -> np.ndarray:
    """2302.06675, algorithm 2."""
    m = np.zeros_like(w)
    for g, rate in zip(grads, lr, strict=True):
        update = np.sign(o.beta1 * m + (1 - o.beta1) * g)
        m = o.beta2 * m + (1 - o.beta2) * g
        w = w - rate * o.weight_decay * w - rate * update
    return w


def sage(w: np.ndarray, grads: list[np.ndarray], lr: list[float], o: AdamSAGE) -> np.ndarray:
    """2202.02664 as its authors' code has it: AdamW's step, times how far sensitivity is from what it was."""
    m, v, mean = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(grads, lr, strict=True), 1):
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g**2
        sensitivity = abs(w * g)
        mean = o.beta3 * mean + (1 - o.beta3) * sensitivity
        hat = mean / (1 - o.beta3**t)
        size = rate * np.sqrt(1 - o.beta2**t) / (1 - o.beta1**t)
        w = w * (1 - rate * o.weight_decay) - size * m / (np.sqrt(v) + o.eps) * abs(sensitivity - hat) / (
            hat + o.eps**2
        )
    return w


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        pytest.param(SGD(0.9, ema=True), ema, id="sgd-ema"),
        pytest.param(SGD(0.9, ema=True, nesterov=True), ema, id="sgd-ema-nesterov"),
        pytest.param(Lion(weight_decay=0.1), lion, id="lion"),
        pytest.param(AdamSAGE(weight_decay=0.1), sage, id="adam-sage"),
        pytest.param(SGD(), sgd, id="sgd"),
        pytest.param(SGD(0.9, 0.1), sgd, id="sgd-momentum-decay"),
    ],
)
def test_steps_are_the_formulas(optimizer: Optimizer, formula: Formula) -> None:
    device, random = cpu(), np.random.default_rng(0)
    start, grads, rates = (
        random.standard_normal(50),
        list(random.standard_normal((7, 50))),
        [0.1, 0.1, 0.3, 0, 0.2, 1, 2],
    )
    weights = buffer(device, start, fp64)
    states = {name: buffer(device, np.zeros(50), fp64) for name in optimizer.states}
    for step, (grad, lr) in enumerate(zip(grads, rates, strict=True), 1):
        scaled = buffer(device, grad * 1024, fp64)  # the gradient is what is left of it after grad_scale
        optimizer.update(weights, scaled, states, Step(1 / 1024, lr, step), decays=True)
    np.testing.assert_allclose(weights.array, formula(start, grads, rates, optimizer), rtol=1e-12)


@pytest.mark.parametrize("optimizer", [Adam(weight_decay=0.1), SGD(0.9, 0.1)])
def test_what_does_not_decay(optimizer: Optimizer) -> None:
    device = cpu()
    weights, grad = buffer(device, np.ones(3), fp64), buffer(device, np.zeros(3), fp64)
    states = {name: buffer(device, np.zeros(3), fp64) for name in optimizer.states}
    optimizer.update(weights, grad, states, Step(1.0, 0.1, 1), decays=False)
    assert weights.array.tolist() == [1, 1, 1]
    optimizer.update(weights, grad, states, Step(1.0, 0.1, 2), decays=True)
    assert (weights.array < 1).all()


@settings(max_examples=30)
@given(
    st.integers(1, 70_000),
    st.integers(1, 9),
    st.sampled_from(
        [
            Adam(weight_decay=0.1),
            Adam(weight_decay=0.1, decoupled=True),
            SGD(0.9, 0.1),
            SGD(),
            AdaGrad(),
            RMSProp(),
            RAdam(0.9, 0.5),
            Lion(),
            AdamSAGE(),
            SophiaG(64),
        ]
    ),
    st.sampled_from([fp32, fp16, bf16]),
)
def test_slices_give_the_bits_of_the_whole(numel: int, ranks: int, optimizer: Optimizer, grads: DType) -> None:
    device, random = cpu(), np.random.default_rng(numel)

    def run(start: int, stop: int) -> np.ndarray:
        part = slice(start, min(stop, numel))
        weights = buffer(device, values[part], fp32)
        states = {name: buffer(device, np.zeros(weights.numel), fp32) for name in optimizer.states}
        for step in (1, 2, 3):
            grad = buffer(device, step * values[::-1][part], grads)
            optimizer.update(weights, grad, states, Step(0.3, 0.01, step), decays=True)
        return weights.array

    values = random.standard_normal(numel)
    slices = [slice_of(numel, rank, ranks) for rank in range(ranks)]
    sliced = np.concatenate([run(part.start, part.stop) for part in slices])
    assert (run(0, numel) == sliced).all()


# -- schedules -----------------------------------------------------------------------------------------------
def test_constant() -> None:
    assert [LRSchedule(0.5)(t) for t in (0, 1, 10**6)] == [0.5] * 3


def test_warmup_reaches_the_rate_at_its_last_update() -> None:
    assert [LRSchedule(1.0, warmup=4)(t) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_cosine() -> None:
    """From lr, right after warm-up, to min_lr at `total` and for good; half way between them half way there."""
    rates = [LRSchedule(1.0, "cosine", warmup=2, min_lr=0.2, total=12)(t) for t in range(15)]
    assert rates[:3] == [0.5, 1, 1]
    assert rates[7] == pytest.approx(0.6)
    assert rates[12:] == pytest.approx([0.2] * 3)
    assert rates[2:13] == sorted(rates[2:13], reverse=True)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi * 0.3)) / 2
    assert rates[5] == pytest.approx(quarter)


def test_a_schedule_that_is_all_warmup() -> None:
    assert [LRSchedule(1.0, "cosine", warmup=2, total=2)(t) for t in range(2)] == [0.5, 1]


# -- the updater ---------------------------------------------------------------------------------------------
def flat_of(device: Device, own: Slice | None = None, dtype: DType = fp64) -> Flat:
    """Three parameters, 2-d, 1-d, 2-d, all ones, of which `own` is held."""
    flat = Flat("flat", device, dtype, dtype)
    for i, shape in enumerate([(2, 3), (4,), (5, 1)]):
        flat.declare(f"p{i}", shape)
    flat.held = Held(own or whole(15), 15)
    flat.param_shard = buffer(device, np.ones(flat.own.size), dtype)
    return flat


def updated(updater: Updater, flat: Flat, norm: float, gradient: float = 0.0) -> list[float]:
    updater.allocate(flat)
    if flat.master is not None:
        flat.device.backend.copy(flat.shard().array, flat.master.array)
    flat.grad_shard = buffer(flat.device, np.full(flat.own.size, gradient), flat.dtype)
    scale = updater.decide(norm)
    assert scale is not None
    updater.update(flat, scale)
    return list(flat.weights().array.tolist())


@pytest.mark.parametrize(("decay", "expected"), [("all", [0.5] * 15), ("matrices", [0.5] * 6 + [1.0] * 4 + [0.5] * 5)])
@pytest.mark.parametrize("cuts", [[0, 15], [0, 3, 8, 15], [0, 6, 10, 15], list(range(16))])
def test_decay_of_all_or_of_matrices_only(cuts: list[int], decay: str, expected: list[float]) -> None:
    """A gradient of zero, rate 1, decay 1/2: what decays halves, wherever the slice was cut."""
    result = []
    for start, stop in itertools.pairwise(cuts):
        updater = Updater(Adam(weight_decay=0.5, decoupled=True), StepControl(LRSchedule(1.0)), decay=decay)
        result += updated(updater, flat_of(cpu(), Slice(start, stop, 15)), norm=0.0)
    assert result == expected


def test_padding_is_not_updated() -> None:
    updater = Updater(SGD(), StepControl(LRSchedule(1.0)))
    result = updated(updater, flat_of(cpu(), Slice(12, 18, 15)), norm=1.0, gradient=1.0)
    assert result == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 4.0, 1e10])
def test_clipping_multiplies_by_at_most_1(norm: float) -> None:
    updater = Updater(SGD(), StepControl(LRSchedule(1.0), clip_norm=1.0))
    factor = min(1.0, 1.0 / (norm + 1e-6))
    assert updated(updater, flat_of(cpu()), norm, gradient=1.0) == [1 - factor] * 15
    assert updater.control.reports[0].grad_norm == norm


def test_gradients_are_divided_by_the_scale_they_were_made_with() -> None:
    """Also on the step that raises it, where DeepSpeed's come out halved."""
    updater = Updater(SGD(), StepControl(LRSchedule(1.0), scaler=LossScaler(8.0, window=1), clip_norm=2.0))
    assert updated(updater, flat_of(cpu()), norm=8.0, gradient=8.0) == [0.0] * 15  # no raise: norm 1, gradient 1
    assert updater.control.loss_scale == 8
    assert updated(updater, flat_of(cpu()), norm=8.0, gradient=8.0) == [0.0] * 15
    assert updater.control.loss_scale == 16  # raised by that step
    assert [(r.grad_norm, r.loss_scale) for r in updater.control.reports] == [(1, 8), (1, 8)]
    clipped = updated(updater, flat_of(cpu()), norm=64.0, gradient=16.0)
    assert clipped == [1 - 2 / (4 + 1e-6)] * 15


def test_a_skipped_step_does_not_count() -> None:
    control = StepControl(LRSchedule(1.0, warmup=4), scaler=LossScaler(8.0, hysteresis=1))
    assert control.decide(1.0) is not None
    assert control.decide(math.inf) is None
    assert control.decide(math.nan) is None
    assert control.decide(1.0) is not None
    assert control.updates == 2
    assert [report.skipped for report in control.reports] == [False, True, True, False]
    assert [report.lr for report in control.reports] == [0.25, 0.5, 0.5, 0.5]
    assert [report.loss_scale for report in control.reports] == [8, 8, 4, 2]


def test_what_is_not_finite_stops_skips_or_exhausts() -> None:
    with pytest.raises(NonFiniteGradient):
        StepControl(LRSchedule(1.0)).decide(math.nan)
    skips = StepControl(LRSchedule(1.0), skip_nonfinite=True)
    assert skips.decide(math.inf) is None
    assert (skips.updates, skips.reports[0].skipped) == (0, True)
    with pytest.raises(LossScaleExhausted):
        StepControl(LRSchedule(1.0), scaler=LossScaler(1.0, hysteresis=1)).decide(math.inf)
    static = StepControl(LRSchedule(1.0), scaler=LossScaler(64.0, dynamic=False))
    assert static.decide(math.inf) is None
    assert static.loss_scale == 64
    assert [StepControl(LRSchedule(1.0), skip_nonfinite=skip).stops_at_nonfinite for skip in (False, True)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("dtype", "per_element"), [(fp64, 16), (fp32, 8), (fp16, 12), (bf16, 12)])
def test_states_are_allocated_once_padding_named(
    device: Device, live: Callable[[], int], dtype: DType, per_element: int
) -> None:
    flat = flat_of(device, Slice(12, 18, 15), dtype)
    before = live()
    Updater(Adam(), StepControl(LRSchedule(1.0))).allocate(flat)
    assert live() - before == 6 * per_element
    assert set(flat.states) == {"exp_avg", "exp_avg_sq"}
    assert (flat.master is not None) == dtype.is_half
    assert all(state.dtype is compute_dtype(dtype) for state in flat.states.values())
    assert all((state.array == 0).all() for state in flat.states.values())


def test_a_half_type_is_updated_in_its_master() -> None:
    """An update of 1/3 of the weight's last place is lost in fp16 and adds up in the master."""
    flat = flat_of(cpu(), dtype=fp16)
    updater = Updater(SGD(), StepControl(LRSchedule(2.0**-10 / 3)))
    seen = []
    updated(updater, flat, 1.0, gradient=-1.0)
    for _ in range(3):
        flat.store_param_shard()
        seen.append(flat.device.backend.to_host(flat.shard().array)[0])
        updater.decide(1.0)
        updater.update(flat, 1.0)
    assert seen == [1, 1 + 2.0**-10, 1 + 2.0**-10]


def test_a_rank_that_owns_nothing_has_nothing_to_do() -> None:
    flat = flat_of(cpu(), Slice(0, 0, 15))
    updater = Updater(Adam(), StepControl(LRSchedule(1.0)))
    updater.allocate(flat)
    updater.decide(1.0)
    updater.update(flat, 1.0)
    assert flat.weights().numel == 0


@pytest.mark.parametrize("name", [name for name, preset in OPTIMIZERS.items() if preset.cut == "elements"])
@pytest.mark.parametrize(("stage", "mesh"), [(0, {}), (2, {}), (1, {"tp": 2, "pp": 2, "accumulate": 2})])
def test_k_is_counted_and_every_state_has_a_name(name: str, stage: int, mesh: dict[str, int]) -> None:
    """4 bytes for the master and 4 for each state, whatever the stage and the mesh."""
    if OPTIMIZERS[name].estimates_every:
        mesh = {**mesh, "tp": 1}  # it draws labels from whole logits
    config = plan_config(
        model="gpt", layers=4, hidden=64, heads=4, seq=16, ranks=8, stage=stage, optimizer=name, **mesh
    )
    result = plan(config)
    states = [state for state in result.memory[0].states if state != "master"]
    assert bytes_per_parameter(result)["optim"] == 4 + 4 * len(states)
    assert sum(result.memory[0].states.values()) == result.memory[0].marks["after_init"].by_kind["optim"]
    assert result.to_dict()["ranks"][0]["memory"]["states"] == result.memory[0].states
