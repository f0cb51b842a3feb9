"""Estimates of curvature on labels that the model draws: the labels, the second pass, what it sends, when it comes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks
from zerosim.backends.forms import LogitForm
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config import RunConfig
from zerosim.config.parts.memory import LOSSES
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.device.device import Kind
from zerosim.dtypes import fp64
from zerosim.errors import InputError, NonFiniteGradient
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.precision import LossScaler
from zerosim.optim.sophia import SophiaG
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.stepper import debug
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import cpu
from zerosim.train.plan import plan
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=1, hidden=8, heads=2, seq=6, micro_batch=1, vocab=256, precision="fp32", lr=1e-3)
EVERY_OTHER = SophiaG(24, estimates_every=2)


def drawn(logits: np.ndarray, key: tuple[int, int], first: int) -> np.ndarray:
    labels = np.full(len(logits), -1, np.int64)
    NumpyBackend().sample_labels(logits, key, first, labels)
    return labels


# -- labels ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", [(1, 2), (3, 4)])
def test_labels_are_as_frequent_as_softmax_says(key: tuple[int, int]) -> None:
    """Pearson's chi-squared of 8 columns, 7 degrees of freedom: more than 40.5 has a chance of 1e-6."""
    logits, count = np.array([0.0, 1.0, -2.0, 3.0, 0.5, -30.0, 2.0, 1.5, 0.0], np.float32), 200_000
    share = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    seen = np.bincount(drawn(np.tile(logits, (count, 1)), key, 5), minlength=9)
    assert seen[5] == 0  # a chance of 1e-15
    expected = count * np.delete(share, 5)
    assert ((np.delete(seen, 5) - expected) ** 2 / expected).sum() < 40.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels_are_those_of_the_contract_wherever_rows_are_cut(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    logits, key, first = (4 * rng.standard_normal((50, 700))).astype(dtype), (7, 2**63 + 1), 9
    bits = np.random.Philox(key=np.array(key, np.uint64)).random_raw(first + 50)[first:]
    sums = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1, dtype=np.float64)
    goals = (bits >> np.uint64(11)).astype(np.float64) / 2**53 * sums[:, -1]
    labels = drawn(logits, key, first)
    assert labels.tolist() == [int(np.searchsorted(row, goal, "right")) for row, goal in zip(sums, goals, strict=True)]
    for cut in (1, 2, 3, 17, 49):
        pieces = [drawn(logits[:cut], key, first), drawn(logits[cut:], key, first + cut)]
        assert np.concatenate(pieces).tolist() == labels.tolist()


def test_labels_of_logits_that_are_not_finite_are_columns() -> None:
    rows = np.array([[np.nan, 0, 0], [np.inf, 0, 0], [-np.inf, 0, -np.inf], [-np.inf] * 3], np.float32)
    labels = drawn(rows, (1, 2), 0)
    assert labels[2] == 1
    assert set(labels) <= {0, 1, 2}


def labels_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[tuple[int, int], list[int]]:
    """By key, which is a step's, all labels that a run draws, in the order of the global batch."""
    found: dict[tuple[int, int], dict[int, int]] = {}

    def sample_labels(logits: Any, key: tuple[int, int], first: int, labels: Any, form: LogitForm) -> None:
        NUMPY(logits, key, first, labels, form)
        found.setdefault(key, {}).update({first + i: int(label) for i, label in enumerate(labels)})

    monkeypatch.setattr(NumpyBackend, "sample_labels", staticmethod(sample_labels))
    run(RunConfig(**{**SMALL, "steps": 2, **changes}), optimizer=SophiaG(24, estimates_every=1))
    return {key: [label for _, label in sorted(labels.items())] for key, labels in found.items()}


NUMPY = NumpyBackend.sample_labels


def test_a_global_batch_gets_the_same_labels_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = dict(layers=2)
    whole_batch = labels_of(monkeypatch, ranks=1, micro_batch=4, stage=0, **layers)
    assert [len(labels) for labels in whole_batch.values()] == [24, 24]
    assert len({tuple(labels) for labels in whole_batch.values()}) == 2  # other steps, other labels
    for cut in (
        dict(ranks=2, accumulate=2, stage=2),
        dict(ranks=4, stage=3),
        dict(ranks=4, dp_replicate=2, stage=2),
        dict(ranks=4, pp=2, accumulate=2, stage=1),
    ):
        assert labels_of(monkeypatch, **cut, **layers) == whole_batch, cut
    assert labels_of(monkeypatch, ranks=1, micro_batch=4, seed=1).keys().isdisjoint(whole_batch)


def test_every_way_to_hold_logits_draws_the_same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(ranks=1, micro_batch=2, accumulate=2, precision="bf16", steps=1, lr=1e-30)
    lean = labels_of(monkeypatch, **options, loss="lean")
    for loss in LOSSES:
        assert labels_of(monkeypatch, **options, loss=loss) == lean, loss


# -- the estimate ----------------------------------------------------------------------------------------------
def test_hessian_and_step_are_the_authors() -> None:
    """sophia.py of the authors in float64: m, decay, the clipped step; every third step's g_hat goes into h."""
    numel, tokens = 40, 5120
    optimizer, random = SophiaG(tokens, 0.9, 0.95, 0.1, estimates_every=3), np.random.default_rng(0)
    device = cpu()
    flat = Flat("flat", device, fp64, fp64)
    flat.declare("w", (numel,))
    flat.held, flat.param_shard = Held(whole(numel), numel), device.alloc((numel,), fp64, Kind.PARAM)
    w = random.standard_normal(numel)
    flat.param_shard.array[:] = w
    control = StepControl(LRSchedule(0.01), scaler=LossScaler(64.0, dynamic=False), clip_norm=0.5)
    updater = Updater(optimizer, control)
    updater.allocate(flat)
    m, h = np.zeros(numel), np.zeros(numel)
    for step in range(8):
        g, g_hat = random.standard_normal((2, numel)) * 1e-2
        flat.grad_shard = device.alloc((numel,), fp64, Kind.GRAD)
        flat.grad_shard.array[:] = 64 * g
        scale = updater.decide(64 * float(np.linalg.norm(g)))
        assert scale is not None
        updater.update(flat, scale)
        g = g * min(1.0, 0.5 / (np.linalg.norm(g) + 1e-6))
        m = 0.9 * m + 0.1 * g
        w = w * (1 - 0.01 * 0.1)
        w = w - 0.01 * np.sign(m) * np.minimum(abs(m) / (0.04 * tokens * h + 1e-15), 1)
        assert updater.estimate_is_due == (step in (2, 5))
        if updater.estimate_is_due:
            flat.grad_shard.array[:] = 64 * g_hat
            scale = control.unscale(1e9)  # is not clipped
            assert scale is not None
            updater.estimate(flat, scale)
            h = 0.95 * h + 0.05 * g_hat**2
    np.testing.assert_allclose(flat.param_shard.array, w, rtol=1e-12)
    np.testing.assert_allclose(flat.states["hessian"].array, h, rtol=1e-12)
    np.testing.assert_allclose(flat.states["exp_avg"].array, m, rtol=1e-12)
    ratio = abs(m) / (0.04 * tokens * h)
    assert ratio.min() < 1 < ratio.max()  # both sides of the clipping


def test_an_estimate_that_overflows_is_left_out_and_the_loss_scale_stays() -> None:
    control = StepControl(LRSchedule(1.0), scaler=LossScaler(8.0, hysteresis=1))
    control.decide(1.0)
    assert control.unscale(math.inf) is None
    assert (control.loss_scale, control.updates, control.reports[0].estimated) == (8, 1, True)
    assert control.unscale(1.0) == 1 / 8
    plain = StepControl(LRSchedule(1.0))
    plain.decide(1.0)
    with pytest.raises(NonFiniteGradient):
        plain.unscale(math.nan)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**30])
def test_in_a_run_too(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[float] = []
    monkeypatch.setattr(Updater, "estimate", lambda self, flat, grad_scale: updated.append(grad_scale))
    config = RunConfig(**{**SMALL, "precision": "fp16", "loss_scale": scale, "stage": 2, "ranks": 2, "steps": 2})
    result = run(config, optimizer=EVERY_OTHER)
    assert [report.estimated for report in result.steps] == [False, True]
    assert bool(updated) == (scale < 2.0**30)


CORNERS: list[dict[str, Any]] = [
    *(dict(stage=stage, ranks=3) for stage in (0, 1, 2, 3)),
    *(dict(stage=stage, ranks=3, partition="owner") for stage in (1, 2, 3)),
    dict(stage=3, ranks=2, accumulate=2, keep_last_unit=True),
    dict(stage=3, ranks=2, gather="module", recompute="full"),
    dict(stage=3, ranks=2, recipe="fsdp2"),
    dict(stage=3, ranks=2, recipe="deepspeed", persistent_numel=100, lazy_states=False),
    dict(stage=2, ranks=4, dp_replicate=2, accumulate=2, replica_reduction="micro_batch"),
    dict(stage=1, ranks=4, pp=2, layers=2, accumulate=4),
    dict(stage=3, ranks=2, pp=2, layers=4, accumulate=4, pipeline="interleaved"),
]


@pytest.mark.parametrize("changes", CORNERS, ids=str)
def test_a_step_with_an_estimate_sends_what_the_closed_forms_say(changes: dict[str, Any]) -> None:
    result = plan(plan_config(**{**SMALL, "optimizer": "sophia", **changes}))
    assert [report.estimated for report in result.steps] == [True]
    for stage in range(result.layout.mesh.pp):
        found = [*checks(result)[stage].states, *checks(result, 0)[stage].sent, *checks(result, 0)[stage].exchanged]
        assert all(check.agrees for check in found), checks
    phases = {row.phase: row for row in result.traffic[0]}
    assert {"backward", "curvature_backward"} <= phases.keys()


def test_what_such_a_step_sends_by_stage() -> None:
    volumes = []
    for stage in range(4):
        result = plan(plan_config(**SMALL, optimizer="sophia", stage=stage, ranks=2, tie_embeddings=False))
        volumes.append(checks(result, 0)[0].sent[-1].text)
    assert volumes == ["4Ψ", "3Ψ", "3Ψ", "6Ψ"]


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_every_stage_estimates_the_same(precision: str) -> None:
    """An optimizer of one's own that estimates; at the end weights are the same, and not those without estimates."""
    options = dict(SMALL, ranks=3, steps=4, precision=precision)
    ends = [run(RunConfig(stage=stage, **options), optimizer=EVERY_OTHER) for stage in range(4)]
    never = run(RunConfig(stage=0, **options), optimizer=SophiaG(24, estimates_every=0))
    for result in ends:
        assert [report.estimated for report in result.steps] == [False, True, False, True]
        assert all(result.weights[name].tobytes() == ends[0].weights[name].tobytes() for name in result.weights)
        assert all(check.agrees for step in (2, 3) for check in checks(result, step)[0].sent)
        assert result.live_bytes_after == [0, 0, 0]
        assert result.memory[0].states.keys() - {"master"} == {"exp_avg", "hessian"}
    assert any((never.weights[name] != ends[0].weights[name]).any() for name in never.weights)


def test_an_estimate_of_ones_own_refuses_tensor_parallelism() -> None:
    with pytest.raises(InputError, match="SophiaG draws labels from logits, which tp cuts; choose tp 1"):
        run(RunConfig(**SMALL, ranks=2, tp=2), optimizer=EVERY_OTHER)


# -- plans and the stepper -------------------------------------------------------------------------------------
def test_a_plan_of_ten_steps_has_one_estimate_and_a_plan_of_its_own_step_too() -> None:
    """Ten steps are timed by their first; the plan's own step by the mean: a tenth of the pass is in it."""
    cluster = cluster_of(find_hardware("a100-80"))
    config = plan_config(**{**SMALL, "hidden": 64}, optimizer="sophia", stage=2, ranks=2)
    ten, own = (plan(config.replace(steps=steps), cluster=cluster) for steps in (10, None))
    assert [step for step, report in enumerate(ten.steps) if report.estimated] == [9]
    assert ten.sent_bytes(0, 9) == own.sent_bytes(0, 0) > ten.sent_bytes(0, 0)
    assert ten.time is not None
    assert own.time is not None
    assert 1.02 * ten.time.seconds < own.time.seconds < 1.11 * ten.time.seconds
    assert own.time.model_flops == ten.time.model_flops
    assert own.memory[0].peak.total_bytes == ten.memory[0].peak.total_bytes


def test_the_stepper_goes_through_the_second_backward() -> None:
    config = RunConfig(**{**SMALL, "stage": 3, "ranks": 2, "steps": 10, "optimizer": "sophia"})
    with debug(config) as world:
        world.until(step=9)
        assert world.until("sample_labels").text.endswith("step 9, curvature forward of loss")
        assert world.until("reduce_scatter").text.endswith("step 9, curvature backward of ln_f")
        world.until(rank=1, phase="curvature")
        assert world.finish().steps[9].estimated
