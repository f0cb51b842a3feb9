"""Optimizers, clipping and schedules beside torch.optim, torch.nn.utils and torch.optim.lr_scheduler.

Both are given the same gradients, so no error feeds back through a loss. What may differ is a few
roundings: PyTorch's kernels (lerp, addcmul, addcdiv) round fewer times or in another order than
NumPy's single operations do. A weight is of size up to 4 here and moves by about lr in a step, so the
two should end within a few units of its last place: 4 of them, 4 * 2**-22 in float32, 4 * 2**-51 in
float64. (PyTorch sums the norm in float32, zerosim in float64: a clipped gradient differs by a factor
of 1 + 1e-7.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.comm.runtime import Context, World, launch
from zerosim.device.device import Kind
from zerosim.dtypes import dtype
from zerosim.optim.adagrad import AdaGrad, RMSProp
from zerosim.optim.adam import Adam
from zerosim.optim.control import StepControl
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.radam import RAdam
from zerosim.optim.sgd import SGD
from zerosim.optim.updater import Updater
from zerosim.parallel.ddp import DDP
from zerosim.parallel.zero2 import Zero2
from zerosim.tensor.flat import Flat
from zerosim.train.build_strategy import join_by_itself

from .compare import weights_within, within

STEPS = 20
LR = 1e-2
SHAPES = {"a.weight": (40, 25), "a.bias": (25,), "b.weight": (25, 3), "b.bias": (3,)}  # 1103: no N > 1 divides it
ATOL = {"fp32": 4 * 2.0**-22, "fp64": 4 * 2.0**-51}
NORM_RTOL = {"fp32": 1e-6, "fp64": 1e-14}

Make = Callable[[list[Any]], torch.optim.Optimizer]
CASES: dict[str, tuple[Optimizer, Make]] = {
    "adam": (Adam(), lambda p: torch.optim.Adam(p, lr=LR)),
    "adam-decay": (
        Adam(0.8, 0.95, 1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (Adam(weight_decay=0.01, decoupled=True), lambda p: torch.optim.AdamW(p, lr=LR)),
    "adamw-strong": (
        Adam(0.9, 0.95, 1e-8, weight_decay=0.3, decoupled=True),
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.95), weight_decay=0.3),
    ),
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    "sgd-decay": (SGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.1)),
    "sgd-momentum": (SGD(0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "sgd-momentum-decay": (
        SGD(0.5, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5, weight_decay=0.02),
    ),
    "sgd-nesterov": (
        SGD(0.9, 0.02, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.02, nesterov=True),
    ),
    "adagrad": (AdaGrad(weight_decay=0.1), lambda p: torch.optim.Adagrad(p, lr=LR, weight_decay=0.1)),
    "rmsprop": (RMSProp(weight_decay=0.1), lambda p: torch.optim.RMSprop(p, lr=LR, weight_decay=0.1)),
    "radam": (RAdam(weight_decay=0.1), lambda p: torch.optim.RAdam(p, lr=LR, weight_decay=0.1)),
    "radam-short": (RAdam(0.8, 0.9, 1e-6), lambda p: torch.optim.RAdam(p, lr=LR, betas=(0.8, 0.9), eps=1e-6)),
}


def inputs(
    precision: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Weights, and one set of gradients per step: sizes from 1e-6 to 10, some of them 0."""
    random = np.random.default_rng(11)
    kind = np.dtype(np.float64 if precision == "fp64" else np.float32)

    def draw(step: int) -> dict[str, Any]:
        grads = {}
        for name, shape in shapes.items():
            grad = random.standard_normal(shape) * 10.0 ** random.uniform(-6, 1, shape)
            grad[random.random(shape) < 0.05] = 0.0
            grads[name] = (grad * (0.2 if step % 3 else 1.0)).astype(kind)
        return grads

    weights = {name: random.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    return weights, [draw(step) for step in range(STEPS)]


def run_zerosim(
    make_updater: Callable[[], Updater],
    precision: str,
    weights: Mapping[str, Any],
    grads: list[dict[str, Any]],
    stage: int,
    ranks: int,
) -> tuple[dict[str, Any], list[float]]:
    """Strategy.step alone, the given gradients taken for reduced ones: final weights, and each step's norm."""

    def program(ctx: Context) -> tuple[Any, list[float]]:
        flat = Flat("all", ctx.device, dtype(precision), dtype(precision))
        for name, values in weights.items():
            flat.declare(name, values.shape)
        updater = make_updater()
        strategy = (DDP if stage == 0 else Zero2)(ctx.comm, ctx.device, updater)

        def write(target: Flat) -> None:
            for index, spec in enumerate(target.spec.weights):
                target.write(index, weights[spec.name], exact_master=False)

        join_by_itself(strategy, [flat])
        strategy.place([flat], write)
        for step_grads in grads:
            whole = np.concatenate([step_grads[name].reshape(-1) for name in weights])
            padded = np.pad(whole, (0, flat.own.stop * ctx.world_size))
            flat.grad_shard = ctx.device.alloc((flat.own.size,), dtype(precision), Kind.GRAD)
            ctx.device.backend.from_host(padded[flat.own.start : flat.own.stop], flat.grad_shard.array)
            strategy.step()
        return ctx.device.backend.to_host(flat.weights().array), [
            report.grad_norm for report in updater.control.reports
        ]

    outcomes = launch(program, World(ranks))
    norms = outcomes[0][1]
    assert all(other == norms for _, other in outcomes)
    values = outcomes[0][0] if stage == 0 else np.concatenate([piece for piece, _ in outcomes])
    final, start = {}, 0
    for name, given in weights.items():
        final[name] = values[start : start + given.size].reshape(given.shape)
        start += given.size
    return final, norms


def run_torch(
    make: Make,
    weights: Mapping[str, Any],
    grads: list[dict[str, Any]],
    clip_norm: float | None,
    groups: Callable[[dict[str, Any]], list[Any]] = lambda parameters: list(parameters.values()),
) -> tuple[dict[str, Any], list[float]]:
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in weights.items()}
    optimizer = make(groups(parameters))
    norms = []
    for step_grads in grads:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(step_grads[name])
        limit = float("inf") if clip_norm is None else clip_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), limit)))
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}, norms


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("clip_norm", [None, 60.0])  # norms here run from 20 to 150: some steps are clipped
def test_twenty_steps(name: str, precision: str, clip_norm: float | None) -> None:
    ours, make = CASES[name]
    weights, grads = inputs(precision)
    expected, expected_norms = run_torch(make, weights, grads, clip_norm)
    assert clip_norm is None or 3 < sum(norm > clip_norm for norm in expected_norms) < STEPS - 3
    for stage, ranks in ((0, 1), (2, 3)):
        final, norms = run_zerosim(
            lambda: Updater(ours, StepControl(LRSchedule(LR), clip_norm=clip_norm)),
            precision,
            weights,
            grads,
            stage,
            ranks,
        )
        what = f"{name} {precision} clip {clip_norm} stage {stage} x {ranks}"
        weights_within(what, final, expected, ATOL[precision])
        within(f"{what} norms", norms, expected_norms, rtol=NORM_RTOL[precision])


def test_decay_of_matrices_only_is_two_parameter_groups() -> None:
    weights, grads = inputs("fp32")

    def groups(parameters: dict[str, Any]) -> list[Any]:
        matrices = [p for p in parameters.values() if p.ndim >= 2]
        return [
            {"params": matrices, "weight_decay": 0.3},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]

    expected, _ = run_torch(lambda p: torch.optim.AdamW(p, lr=LR), weights, grads, None, groups)
    ours = Adam(weight_decay=0.3, decoupled=True)
    for stage, ranks in ((0, 1), (2, 4)):
        final, _ = run_zerosim(
            lambda: Updater(ours, StepControl(LRSchedule(LR)), decay="matrices"), "fp32", weights, grads, stage, ranks
        )
        weights_within(f"matrices, stage {stage} x {ranks}", final, expected, ATOL["fp32"])


@pytest.mark.parametrize("warmup", [0, 5])
def test_cosine_schedule(warmup: int) -> None:
    total, low = 30, 1e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warmup, eta_min=low)
    if warmup:
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, schedule], [warmup])
    expected = []
    for _ in range(total):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = LRSchedule(LR, "cosine", warmup, low, total)
    within(f"cosine after {warmup}", [ours(done) for done in range(total)], expected, rtol=1e-12)


class _Made(TorchDispatchMode):
    """Elements of what foreach operations make, beside what they change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_foreach_" in str(func) and isinstance(made, list | tuple):
            self.numel += sum(tensor.numel() for tensor in made)
        return made


@pytest.mark.parametrize("case", CASES)
def test_foreach_makes_as_many_arrays_as_pytorch(case: str) -> None:
    """In its second step, when the states are there. What it makes lives to the end of the step."""
    ours, make = CASES[case]
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES.values()]
    theirs = make(weights)
    for group in theirs.param_groups:
        group["foreach"] = True
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    theirs.step()
    with _Made() as made:
        theirs.step()
    assert made.numel == ours.foreach_temporaries * sum(weight.numel() for weight in weights)
