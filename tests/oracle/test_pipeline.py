"""Pipelines beside PyTorch's own on gloo, in float64: GPipe, 1F1B, interleaved 1F1B and two zero-bubble schedules.

One start of two processes runs all of them. A tied table PyTorch leaves to its user: the worker adds its gradients up.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.train.result import RunResult
from zerosim.train.run import run

from .compare import weights_within, within
from .runs import Task, make_task
from .test_distributed import HEADS, in_processes

try:
    from . import pipeline_worker as worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no pipelines: {error}", allow_module_level=True)

ROWS = 8
TASKS = {tied: make_task(4, 32, 4, 16, 48, tied, steps=4, rows=ROWS, seed=1) for tied in (True, False)}
CLOSE = 1e-11
Results = dict[tuple[str, bool], list[dict[str, Any]]]
"""By (schedule, tied), what each process left."""
KINDS = pytest.mark.parametrize("kind", worker.SCHEDULES)


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "tasks.pickle").write_bytes(pickle.dumps(TASKS))
    left = in_processes(worker.RANKS, worker.__name__, folder, *worker.SCHEDULES)
    return {key: [results[key] for results in left] for key in left[0]}


def zerosim_run(task: Task, folder: Path, kind: str, **settings: Any) -> RunResult:
    task.write(folder)
    shared: dict[str, Any] = dict(stage=1, precision="fp64", optimizer="sgd", **settings)
    return run(task.config(folder, ranks=2, accumulate=worker.MICRO_BATCHES, pp=2, pipeline=kind, **shared))


def whole(parts: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Both stages' tensors; a tied table is on both."""
    first, last = (part[what] for part in parts)
    for name in first.keys() & last.keys():
        within(f"{name} on both stages", first[name], last[name], atol=CLOSE)
    return {**first, **last}


@HEADS
@KINDS
def test_same_training(pytorch: Results, kind: str, tied: bool, tmp_path: Path) -> None:
    if (kind, tied) not in pytorch:
        pytest.skip("PyTorch divides a gradient that two stages of one rank share twice")
    theirs, task = pytorch[kind, tied], TASKS[tied]
    ours = zerosim_run(task, tmp_path, kind, lr=worker.LR, momentum=worker.MOMENTUM)
    last = theirs[0 if kind == "zb-v" else -1]
    within(f"{kind}, losses", ours.mean_losses, last["losses"], atol=CLOSE)
    weights_within(f"{kind}, weights", ours.weights, whole(theirs, "weights"), CLOSE)
    stepped = zerosim_run(task, tmp_path, kind, lr=1.0, steps=1)
    gradients = {name: np.float64(task.weights[name]) - after for name, after in stepped.weights.items()}
    weights_within(f"{kind}, first gradients", gradients, whole(theirs, "gradients"), CLOSE)


@KINDS
def test_same_bytes_over_the_borders(pytorch: Results, kind: str, tmp_path: Path) -> None:
    """b s h per microbatch, border and direction. In its first step PyTorch sends shapes as well."""
    ours = zerosim_run(TASKS[False], tmp_path, kind, lr=worker.LR, steps=2)
    for rank, results in enumerate(pytorch[kind, False]):
        for step, sent in enumerate(results["sent"][:2]):
            rows = [
                row for row in ours.traffic[rank] if (row.step, row.op, row.purpose) == (step, "send", "activations")
            ]
            assert {row.axis for row in rows} == {"pp"}
            payload = sum(row.payload_bytes for row in rows)
            assert sent == payload if step else 0 <= sent - payload < 1000
            assert payload == ROWS * 16 * 32 * 8 * {"interleaved": 3, "zb-v": 2}.get(kind, 1)
