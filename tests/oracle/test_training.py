"""Whole training runs beside PyTorch, through the contract for programs: weights and tokens in, losses and weights out.

In float64 every weight agrees to 1e-12, whatever the stage. In float32 a run is as exact as Adam lets
it be: see `runs.SEEDS`, how the tasks are chosen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zerosim.train.result import RunResult

from .compare import compared, weights_within, within
from .runs import Trace, first_gradients, make_task, tiny, train_torch, train_zerosim

LR = 1e-3
RANKS = 4
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
HEADS = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR)


@pytest.fixture(scope="module")
def traces() -> dict[bool, Trace]:
    """PyTorch's twelve steps in float32, tied and untied."""
    return {tied: train_torch(tiny(tied), RANKS, adam) for tied in (True, False)}


def check(what: str, result: RunResult, trace: Trace, *, atol: float = 2e-6, norm_rtol: float = 2e-6) -> None:
    ranks = result.config.mesh.ranks
    expected = np.array(trace.losses).reshape(len(trace.losses), ranks, -1).mean(2)
    within(f"{what}, losses", result.losses, expected, atol=atol)
    norms = np.array([step.grad_norm for step in result.steps])
    within(f"{what}, grad_norm / PyTorch's", norms / trace.grad_norm, np.ones(len(norms)), atol=norm_rtol)
    weights_within(f"{what}, weights", result.weights, trace.weights, atol)


def gradients_within(what: str, got: Mapping[str, Any], expected: Mapping[str, Any], atol: float) -> None:
    for name in expected:
        within(f"{what}, first gradient of {name}", got[name], expected[name], atol=atol)


@HEADS
@ALL_STAGES
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_float32(tied: bool, stage: int, ranks: int, traces: dict[bool, Trace], tmp_path: Path) -> None:
    task, what = tiny(tied), f"stage {stage} x {ranks}"
    check(what, train_zerosim(task, tmp_path, stage=stage, ranks=ranks, lr=LR), traces[tied])
    gradients_within(what, first_gradients(task, tmp_path, stage=stage, ranks=ranks), traces[tied].gradients, 2e-7)


@HEADS
@ALL_STAGES
def test_accumulation(tied: bool, stage: int, traces: dict[bool, Trace], tmp_path: Path) -> None:
    """Two ranks, two microbatches each: to PyTorch it is the same global batch."""
    task, what = tiny(tied), f"stage {stage} x 2, accumulate 2"
    check(what, train_zerosim(task, tmp_path, stage=stage, ranks=2, accumulate=2, lr=LR), traces[tied])
    gradients = first_gradients(task, tmp_path, stage=stage, ranks=2, accumulate=2)
    gradients_within(what, gradients, traces[tied].gradients, 2e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 1, "partition": "owner"},
        {"stage": 2, "partition": "owner"},
        {"stage": 3, "partition": "owner"},
        {"stage": 0, "collective": "ring"},
        {"stage": 3, "collective": "ring"},
        {"stage": 0, "bucket_bytes": 16384},
        {"stage": 3, "reshard_after_forward": False},
        {"stage": 3, "keep_last_unit": True},
        {"stage": 3, "parallel": 2},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_way_to_share_the_work(settings: dict[str, Any], traces: dict[bool, Trace], tmp_path: Path) -> None:
    for tied in (True, False):
        check(str(settings), train_zerosim(tiny(tied), tmp_path, ranks=RANKS, lr=LR, **settings), traces[tied])


@HEADS
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 4), (3, 8)])
def test_float64(tied: bool, seed: int, stage: int, ranks: int, tmp_path: Path) -> None:
    """Tasks that nobody chose, a learning rate ten times as high: rounding is the only difference there was."""
    task = tiny(tied, seed)
    trace = train_torch(task, 8, lambda p: torch.optim.Adam(p, lr=10 * LR), dtype=torch.float64)
    settings: dict[str, Any] = {"stage": stage, "ranks": ranks, "precision": "fp64"}
    what = f"fp64 seed {seed} stage {stage} x {ranks}"
    result = train_zerosim(task, tmp_path, lr=10 * LR, **settings)
    check(what, result, trace, atol=2e-12, norm_rtol=1e-12)
    gradients_within(what, first_gradients(task, tmp_path, **settings), trace.gradients, 1e-15)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_clipping(stage: int, name: str, tmp_path: Path) -> None:
    """grad_norm is what clip_grad_norm_ returns, and what comes of it after twelve steps is the same."""
    task, clip_norm = tiny(True), 0.9
    make, settings = {
        "adamw": (
            lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
            {"optimizer": "adamw", "lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1},
        ),
        "sgd": (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ),
    }[name]
    trace = train_torch(task, RANKS, make, clip_norm=clip_norm)
    assert 2 < sum(norm > clip_norm for norm in trace.grad_norm) < 12, trace.grad_norm
    result = train_zerosim(task, tmp_path, stage=stage, ranks=RANKS, clip_norm=clip_norm, **settings)
    check(f"{name} clipped, stage {stage}", result, trace)


@HEADS
def test_rounding_errors_are_not_larger_than_pytorchs(tied: bool, tmp_path: Path) -> None:
    """First gradients in float32 against PyTorch in float64, root mean square over all weights of five tasks."""
    squares = np.zeros(2)
    for seed in range(5):
        task = tiny(tied, seed)
        exact, rounded = (train_torch(task, 1, adam, dtype=kind).gradients for kind in (torch.float64, torch.float32))
        ours = first_gradients(task, tmp_path, stage=3, ranks=2)
        for i, gradients in enumerate((ours, rounded)):
            squares[i] += sum(float(np.sum((gradients[name] - exact[name]) ** 2)) for name in exact)
    ratio = float(np.sqrt(squares[0] / squares[1]))
    print(f"zerosim's rounding errors are {ratio:.2f} times PyTorch's, allowed 1.3")
    assert ratio <= 1.3


def test_gpt_of_800_thousand(tmp_path: Path) -> None:
    """20 steps of 4 layers, hidden 128. Among so many weights some gradients are next to 0: 1 in 10,000 may differ."""
    task = make_task(4, 128, 4, 128, 256, True, steps=20, rows=4, seed=0)
    trace = train_torch(task, RANKS, adam)
    result = train_zerosim(task, tmp_path, stage=3, ranks=RANKS, lr=LR)
    assert 800_000 < result.num_parameters < 900_000
    within("0.8M, losses", result.losses, trace.losses, atol=5e-6)
    ours, theirs = compared(result.weights), compared(trace.weights)
    apart = np.concatenate([np.abs(ours[name] - theirs[name]).reshape(-1) for name in theirs])
    share = float(np.mean(apart <= 5e-6))
    print(f"0.8M, weights: {share:.4%} within 5e-6, largest difference {apart.max():.2e}")
    assert share >= 0.9999


def test_command_line(traces: dict[bool, Trace], tmp_path: Path) -> None:
    """The same through files and flags, as any program may do it."""
    task = tiny(False)
    task.write(tmp_path)
    sizes = "--layers 2 --hidden 32 --heads 4 --seq 16 --vocab 48 --no-tie-embeddings --micro-batch 2"
    flags = f"--stage 3 --ranks {RANKS} --precision fp32 --optimizer adam --lr {LR} {sizes}"
    files = "--weights in.npz --tokens tokens.npz --save-weights out.npz --json out.json"
    command = [sys.executable, "-m", "zerosim", "run", *flags.split(), *files.split()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text("utf-8"))
    trace = traces[False]
    within("command line, losses", report["losses_by_data_rank"], trace.losses, atol=2e-6)
    within("command line, grad_norm", report["grad_norm"], trace.grad_norm, rtol=2e-6)
    with np.load(tmp_path / "out.npz") as weights:
        weights_within("command line, weights", dict(weights), trace.weights, 2e-6)
