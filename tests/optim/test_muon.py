"""Muon: which weights it takes, its formula in float64, what it holds and asks of a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config.run import plan_config
from zerosim.device.device import Device, Kind
from zerosim.device.events import Alloc, Free, Kernel, Launch
from zerosim.dtypes import DType, bf16, fp32, fp64
from zerosim.optim.adam import Adam
from zerosim.optim.muon import COEFFICIENTS, EPS, Muon, orthogonalized
from zerosim.optim.optimizer import Step, alone
from zerosim.optim.updater import Updater
from zerosim.placement.rows import Held
from zerosim.tensor.flat import Flat, whole
from zerosim.train.plan import plan

SHAPES = {"h.0.wide": (6, 10), "h.0.bias": (7,), "h.0.tall": (9, 4), "h.0.row": (1, 5), "wte.weight": (8, 6)}
MATRICES = ("h.0.wide", "h.0.tall", "h.0.row")


def flat_of(device: Device, dtype: DType, values: dict[str, Any]) -> Flat:
    flat = Flat("h.0", device, dtype, dtype)
    for name, shape in SHAPES.items():
        flat.declare(name, shape)
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param_shard = device.alloc((flat.numel,), dtype, Kind.PARAM)
    device.backend.from_host(np.concatenate([values[name].reshape(-1) for name in SHAPES]), flat.param_shard.array)
    return flat


def steps_of(optimizer: Muon, grads: list[dict[str, Any]], start: dict[str, Any], lr: float) -> dict[str, Any]:
    """What zerosim makes of these gradients in float64; decay is the matrices'."""
    device = Device(0, NumpyBackend())
    flat = flat_of(device, fp64, start)
    Updater(optimizer, None).allocate(flat)  # type: ignore[arg-type]
    flat.grad_shard = device.alloc((flat.numel,), fp64, Kind.GRAD)
    for number, each in enumerate(grads, 1):
        device.backend.from_host(8 * np.concatenate([each[name].reshape(-1) for name in SHAPES]), flat.grad_shard.array)
        optimizer.step(flat, Step(1 / 8, lr, number, "matrices"), alone)
    ends = np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1]
    pieces = np.split(flat.shard().array, ends)
    return {name: piece.reshape(SHAPES[name]) for name, piece in zip(SHAPES, pieces, strict=True)}


def formula(o: Muon, grads: list[dict[str, Any]], start: dict[str, Any], lr: float) -> dict[str, Any]:
    """Keller Jordan's post, and AdamW for the others, written out."""
    final, (a, b, c) = {}, COEFFICIENTS
    for name, w in start.items():
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, each in enumerate(grads, 1):
            g, rate = each[name], lr if name in MATRICES else lr * o.aux_lr
            decay = o.weight_decay if name in MATRICES else o.aux.weight_decay * (w.ndim == 2)
            w = w * (1 - rate * decay)
            if name in MATRICES:
                m = o.momentum * m + (1 - o.momentum) * g
                x = (1 - o.momentum) * g + o.momentum * m
                x = x / (np.linalg.norm(x) + EPS)
                x = x.T if x.shape[0] > x.shape[1] else x
                for _ in range(5):
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                x = x if x.shape == w.shape else x.T
                rows, columns = w.shape
                w = w - rate * x * (0.2 * max(rows, columns) ** 0.5 if o.match_rms else max(1, rows / columns) ** 0.5)
            else:
                m, v = o.aux.beta1 * m + (1 - o.aux.beta1) * g, o.aux.beta2 * v + (1 - o.aux.beta2) * g * g
                root = np.sqrt(v / (1 - o.aux.beta2**t)) + o.aux.eps
                w = w - rate * m / (1 - o.aux.beta1**t) / root
        final[name] = w
    return final


@pytest.mark.bits
@pytest.mark.parametrize("match_rms", [False, True])
def test_steps_are_the_formulas(match_rms: bool) -> None:
    random = np.random.default_rng(0)
    start, *grads = [{name: random.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(5)]
    optimizer = Muon(0.9, 0.1, Adam(0.9, 0.95, 1e-3, 0.2, decoupled=True), 0.5, match_rms=match_rms, dtype=fp64)
    got, expected = steps_of(optimizer, grads, start, 0.1), formula(optimizer, grads, start, 0.1)
    for name in SHAPES:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-11, atol=1e-12)
    coarse = steps_of(Muon(0.9, 0.1, optimizer.aux, 0.5, match_rms), grads, start, 0.1)
    for name in MATRICES:
        error = np.linalg.norm(coarse[name] - expected[name]) / np.linalg.norm(expected[name] - start[name])
        assert 0 < error < 0.05, name  # in bf16: near, and not equal


def test_singular_values_come_near_one() -> None:
    """Whatever they were, 1 to 1/50 of the norm: between 0.6 and 1.3, where the post's figure has them."""
    device, random = Device(0, NumpyBackend()), np.random.default_rng(1)
    for shape in ((20, 30), (30, 20)):
        u, _, v = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
        values = np.linspace(0.02, 1, 20)
        x = device.alloc(shape, bf16, Kind.TEMP)
        device.backend.from_host(u * (values / np.linalg.norm(values)) @ v, x.array)
        found = np.linalg.svd(device.backend.to_host(orthogonalized(x).array))[1]
        assert 0.6 < found.min() < found.max() < 1.3


@pytest.mark.parametrize(("precision", "momentum", "matrix", "rest"), [("bf16", 4, 8, 12), ("fp32", 4, 4, 8)])
def test_states_are_one_number_for_matrices_and_two_for_the_rest(
    precision: str, momentum: int, matrix: int, rest: int
) -> None:
    counted = plan(plan_config(model="gpt", stage=2, ranks=3, optimizer="muon", precision=precision))
    weights = [weight for flat in counted.layout.flats.values() for weight in flat.weights]
    maps = (".attn.c_attn.", ".attn.c_proj.", ".mlp.c_fc.", ".mlp.c_proj.")
    matrices = sum(weight.numel for weight in weights if weight.name.endswith(tuple(f"{name}weight" for name in maps)))
    others = counted.num_parameters - matrices
    states: dict[str, int] = {}
    for memory in counted.memory:
        for name, held in memory.states.items():
            states[name] = states.get(name, 0) + held
    masters = {"master": 4 * counted.num_parameters} if precision == "bf16" else {}
    assert states == {
        "momentum_buffer": momentum * matrices, "exp_avg": 4 * others, "exp_avg_sq": 4 * others, **masters,
    }  # fmt: skip
    per_parameter = bytes_per_parameter(counted)["optim"]
    assert per_parameter * counted.num_parameters == matrix * matrices + rest * others


def test_flops_and_temporaries_of_a_step() -> None:
    """Products: 5 (4 m^2 n + 2 m^3) for m <= n. Temporaries: u in fp32 and X at first, then X, BX, A and B in bf16."""
    config = plan_config(model="gpt", stage=0, ranks=1, layers=1, hidden=16, heads=2, seq=4, vocab=9, optimizer="muon")
    events = plan(config, keep_events=True).events[0]
    products = [
        event.flops
        for event in events
        if isinstance(event, Kernel) and event.scope.phase == "optimizer" and event.name == "matmul"
    ]
    sizes = [(16, 48), (16, 16), (16, 64), (16, 64)]
    assert sum(products) == sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes)
    peaks, live, matrices = [0], dict[int, int](), {4 * m * n: (m, n) for m, n in sizes}
    for event in events:
        if isinstance(event, Free):
            live.pop(event.id, None)
        elif isinstance(event, Alloc) and event.scope.phase == "optimizer":
            if event.nbytes in matrices:
                assert not live, "a matrix before has left something"
                peaks.append(0)
            live[event.id] = event.nbytes
            peaks[-1] = max(peaks[-1], sum(live.values()))
    assert peaks[1:] == [max(6 * m * n + 12, 4 * m * n + 4 * m * m) for m, n in sizes]  # 12: |u|, in fp64 and fp32


@pytest.mark.parametrize("stage", [1, 2])
def test_owners_update_side_by_side(stage: int) -> None:
    """No matrix is worked on behind a broadcast, where all would wait for it."""
    events = plan(plan_config(model="gpt", stage=stage, ranks=3, optimizer="muon"), keep_events=True).events
    for mine in filter(None, events):
        last = max(at for at, event in enumerate(mine) if isinstance(event, Kernel) and event.name == "muon_update")
        first = min(at for at, event in enumerate(mine) if isinstance(event, Launch) and event.op == "broadcast")
        assert last < first


def test_the_auxiliary_rate_follows_the_schedule() -> None:
    """It stays its ratio of the learning rate's: twice the rate, twice the step of both kinds of weights."""
    random = np.random.default_rng(2)
    start, grads = [{name: random.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(2)]
    one, two = (steps_of(Muon(dtype=fp32), [grads], start, lr) for lr in (0.125, 0.25))
    for name in SHAPES:
        np.testing.assert_allclose(two[name] - start[name], 2 * (one[name] - start[name]), rtol=1e-9)
