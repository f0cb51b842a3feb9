"""Pure bf16: what is stored is rounded as it says, the same in every stage, and bytes and losses are counted."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerosim import RunConfig, plan, run
from zerosim.analysis.checks import checks
from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.backends.kernels import AdamStep, Rule, Storing
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.backends.numpy.rounding import stochastic, words16
from zerosim.optim.adam import Adam
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.optim.lion import Lion
from zerosim.optim.sgd import SGD
from zerosim.report.words import lost as lost_words
from zerosim.tensor.rng import key

BF16 = ml_dtypes.bfloat16
KINDS = ("nearest", "stochastic", "kahan")
TINY: dict[str, Any] = dict(
    model="gpt", layers=1, hidden=12, heads=2, seq=6, vocab=256, steps=3, lr=1e-2, micro_batch=1, precision="bf16-pure"
)


def bf16(values: Any) -> Any:
    """Nearest, ties to even, of one float32 at a time: what is cut off, against half of the last place that stays."""
    found = []
    for bits in np.asarray(values, np.float32).view(np.uint32).tolist():
        low, kept = bits & 0xFFFF, bits >> 16
        found.append((kept + (low > 0x8000 or (low == 0x8000 and kept & 1 == 1))) << 16)
    return np.array(found, np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [Adam(weight_decay=0.1), Lion(), SGD(0.9)], ids=lambda one: type(one).__name__)
def test_steps_are_those_of_an_independent_loop(optimizer: Elementwise, kind: str) -> None:
    """Five steps on 3,000 weights, bit for bit; and so is the count of what was lost."""
    random, backend, numel, lr = np.random.default_rng(1), NumpyBackend(), 3000, 2e-3
    w = bf16(random.standard_normal(numel))
    param, c = w.astype(BF16), np.zeros(numel, np.float32)
    states = [np.zeros(numel, BF16) for _ in optimizer.states]
    mine = [np.zeros(numel, np.float32) for _ in states]
    compensation = np.zeros(numel, BF16) if kind == "kahan" else None
    lost, expected, stuck = np.zeros(2), 0, 0
    for t in range(1, 6):
        grad = (random.standard_normal(numel) * 10.0 ** random.uniform(-6, 0, numel)).astype(BF16)
        storing = Storing(kind, (7, t), 5, compensation, lost)
        now = Now(lr, t, optimizer.weight_decay)
        backend.elementwise(Rule(optimizer.rule, now, 0.5), grad, param, *states, storing=storing)
        moved, g = w.copy(), grad.astype(np.float32) * np.float32(0.5)
        before = [state.copy() for state in mine]
        optimizer.rule(np, moved, g, now, *mine)
        stuck += int(((mine[-1] != before[-1]) & (bf16(mine[-1]) == before[-1])).sum())
        mine = [bf16(state) for state in mine]
        if kind == "kahan":
            c = c + (moved - w)
            stored = bf16(w + c)
            c = bf16(c + (w - stored))
        elif kind == "nearest":
            stored = bf16(moved)
        else:
            bits = moved.view(np.uint32).astype(np.int64)
            up = words16((7, t), 5, numel).astype(np.int64) < bits % 65536
            stored = (bits - bits % 65536 + 65536 * up).astype(np.uint32).view(np.float32)
        expected += int(((moved != w) & (stored == w)).sum())
        w = stored
        assert (param.astype(np.float32).view(np.uint32) == w.view(np.uint32)).all()
    assert all((state.astype(np.float32) == values).all() for state, values in zip(states, mine, strict=True))
    assert compensation is None or (compensation.astype(np.float32) == c).all()
    assert lost[0] == expected > 0
    assert lost[1] == stuck


def test_adams_rule_has_its_kernels_bits() -> None:
    random, backend = np.random.default_rng(2), NumpyBackend()
    for adam in (Adam(), Adam(weight_decay=0.1), Adam(0.8, 0.95, 1e-6, 0.1, decoupled=True)):
        one, two = ([random.standard_normal(500).astype(np.float32), *np.zeros((2, 500), np.float32)] for _ in range(2))
        two[0][:] = one[0]
        for step in (1, 2, 3):
            grad = random.standard_normal(500).astype(np.float32)
            hyper = AdamStep(0.3, 1e-2, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.decoupled, step)
            backend.adam(one[0], grad, one[1], one[2], hyper)
            backend.elementwise(Rule(adam.rule, Now(1e-2, step, adam.weight_decay), 0.3), grad, *two)
            assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_stochastic_rounding_is_right_on_average() -> None:
    """Of 200,000 roundings of one value the mean is within five standard errors; neighbours only."""
    count = 200_000
    for value in (1.001, -3.3e-5, 7.77e20):
        exact = np.float32(value)
        rounded = stochastic(np.full(count, exact), words16(key("mean", str(value)), 0, count))
        low, high = sorted(set(rounded.tolist()))
        assert low < exact < high
        assert {low, high} == set(rounded.astype(BF16).astype(np.float32).tolist())
        chance = (float(exact) - low) / (high - low)
        error = (rounded.astype(np.float64).mean() - float(exact)) / (high - low)
        assert abs(error) < 5 * (chance * (1 - chance) / count) ** 0.5


def test_what_bf16_holds_stays_and_draws_do_not_depend_on_the_cut() -> None:
    held = np.arange(2**15 - 200, dtype=np.uint32) << np.uint32(16)
    values = held.view(np.float32)[:0x7F80]
    assert (stochastic(values, np.zeros(values.size, np.uint16)).view(np.uint32) == values.view(np.uint32)).all()
    whole = words16((1, 2), 0, 1000)
    assert all((words16((1, 2), first, 100) == whole[first : first + 100]).all() for first in (0, 1, 15, 16, 17, 333))
    assert abs(whole.astype(float).mean() - 32767.5) < 5 * 65536 / (12 * 1000) ** 0.5


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_partition_has_the_same_bits(kind: str) -> None:
    """Stages, owners, leaf modules, copies: who holds a weight decides nothing, not even what is drawn for it."""
    first = run(RunConfig(**TINY, rounding=kind, ranks=3, stage=0))
    assert 0 < first.lost_updates[-1] < 1
    for changes in (
        dict(stage=1), dict(stage=2), dict(stage=3), dict(stage=1, partition="owner"),
        dict(stage=3, partition="owner"), dict(stage=3, gather="module"), dict(stage=3, dp_replicate=3),
    ):  # fmt: skip
        other = run(RunConfig(**TINY, rounding=kind, ranks=3, **changes))
        assert all(np.array_equal(other.weights[name], values) for name, values in first.weights.items())
        assert other.lost_updates == first.lost_updates
        assert other.stuck_moments == first.stuck_moments


def test_second_moments_in_bf16_stop_at_a_quarter_of_a_constant_square_and_cannot_fall() -> None:
    """Of g = 1; a thousandth of a number is less than half a unit in its last place."""
    backend, (param, m, v), lost = NumpyBackend(), np.zeros((3, 8), BF16), np.zeros(2)
    for t, size in enumerate([1.0] * 400 + [0.0] * 400, 1):
        grad, storing = np.full(8, size, BF16), Storing("kahan", (7, t), 0, np.zeros(8, BF16), lost)
        backend.elementwise(Rule(Adam().rule, Now(1e-3, t, 0.0), 1.0), grad, param, m, v, storing=storing)
        assert size == 0 or t < 400 or (v.astype(np.float32) == 0.25).all()
    assert (v.astype(np.float32) == 0.25).all()
    assert lost[1] > 400 * 8
    result = run(RunConfig(**TINY, rounding="kahan", ranks=1, stage=0))
    assert 0 < result.stuck_moments[-1] < 1
    assert "second moments stayed as they were" in (lost_words(result) or "")


@pytest.mark.parametrize(
    "mesh",
    [
        dict(ranks=4, tp=2, stage=0), dict(ranks=4, tp=2, stage=3), dict(ranks=4, dp_replicate=2, stage=1),
        dict(ranks=2, pp=2, layers=2, accumulate=2, stage=2),
    ],
    ids=lambda mesh: " ".join(map(str, mesh.values())),
)  # fmt: skip
def test_each_weight_counts_once(mesh: dict[str, Any]) -> None:
    """By decay every weight but 0 has an update: those that stay are lost, whoever holds copies of them."""
    step = dict(TINY, **mesh, steps=1, optimizer="adamw", weight_decay=0.3)
    before, after = run(RunConfig(**{**step, "lr": 1e-30})).weights, run(RunConfig(**{**step, "lr": 1e-6}))
    stayed = sum(int(((w == after.weights[name]) & (abs(w) > 1e-20)).sum()) for name, w in before.items())
    assert [share * after.num_parameters for share in after.lost_updates] == [stayed]
    assert stayed > after.num_parameters // 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "optim"), [("nearest", 4), ("stochastic", 4), ("kahan", 6)])
def test_bytes(kind: str, optim: int) -> None:
    """8 and 10 bytes a parameter; shapes alone count what numbers do."""
    for stage in range(4):
        config = RunConfig(**TINY, rounding=kind, ranks=3, stage=stage)
        result = run(config.replace(steps=1))
        assert all(check.agrees for check in checks(result)[0].states)
        assert bytes_per_parameter(result) == {
            "param": 2, "grad": 2, "optim": optim, "total": Fraction(4 + optim)
        }  # fmt: skip
        shapes = plan(config.replace(steps=1))
        assert [memory.peak.total_bytes for memory in shapes.memory] == [
            memory.peak.total_bytes for memory in result.memory
        ]
        names = {"exp_avg", "exp_avg_sq"} | ({"compensation"} if kind == "kahan" else set())
        assert set(result.memory[0].states) == names


def test_temporaries_of_foreach_are_stored_as_states_are() -> None:
    """One array for Adam, of 2 bytes a parameter where states have 2, of 4 beside masters."""
    flat = dict(model="flat", params=100_000, units=1, ranks=1, stage=0, steps=1)
    for precision, each in (("bf16-pure", 2), ("bf16", 4)):
        peak = plan(RunConfig(**flat, precision=precision, foreach=True)).memory[0].peak
        assert peak.scope.phase == "optimizer"
        assert peak.by_kind["temp"] == 100_000 * each + 12  # what the norm and the loss take


@pytest.mark.slow
def test_kahan_comes_nearer_to_masters_than_the_nearest() -> None:
    """Steps that are small for bf16: plain rounding stands still, the sums of the others do not."""
    small = dict(TINY, lr=2e-5, steps=40, ranks=1, stage=0, schedule="constant")
    masters = run(RunConfig(**{**small, "precision": "bf16"}))
    ends = {kind: run(RunConfig(**small, rounding=kind)) for kind in KINDS}

    def gap(result: Any) -> float:
        """From the masters as bf16 has them."""
        pairs = [(result.weights[name], w.astype(BF16)) for name, w in masters.weights.items()]
        return float(sum((np.subtract(ours, theirs, dtype=np.float64) ** 2).sum() for ours, theirs in pairs) ** 0.5)

    assert gap(ends["kahan"]) < 0.1 * gap(ends["nearest"])
    assert ends["nearest"].lost_updates[-1] > Fraction(1, 2)
