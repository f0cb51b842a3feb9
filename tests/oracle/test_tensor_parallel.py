"""Tensor and sequence parallelism beside a GPT that torch.distributed cuts over two processes on gloo."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from zerosim.train.result import RunResult

from .compare import compared, weights_within, within
from .runs import first_gradients, tiny, train_zerosim
from .test_distributed import HEADS, in_processes

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
try:
    from . import tensor_worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no FSDP2: {error}", allow_module_level=True)

TASKS = {
    tied: dataclasses.replace(task, tokens=task.tokens[: tensor_worker.STEPS])
    for tied, task in ((tied, tiny(tied)) for tied in (True, False))
}
ROWS = pytest.mark.parametrize("by_rows", [False, True], ids=["tp", "sp"])
Results = dict[tuple[bool, bool], list[dict[str, Any]]]
"""By (is sequence parallel, tied), what each rank left."""
Ours = dict[tuple[bool, bool], RunResult]


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("tensor")
    (folder / "tasks.pickle").write_bytes(pickle.dumps(TASKS))
    left = in_processes(tensor_worker.RANKS, tensor_worker.__name__, folder)
    return {key: [results[key] for results in left] for key in left[0]}


def settings(by_rows: bool) -> dict[str, Any]:
    return dict(ranks=tensor_worker.RANKS, tp=tensor_worker.RANKS, stage=0, sequence_parallel=by_rows)


@pytest.fixture(scope="module")
def zerosim(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """All rows are both ranks': they are one data-parallel rank."""
    folder = tmp_path_factory.mktemp("zerosim")
    return {
        (by_rows, tied): train_zerosim(TASKS[tied], folder, lr=tensor_worker.LR, **settings(by_rows))
        for by_rows in (False, True)
        for tied in TASKS
    }


def part(whole: dict[str, Any], rank: int) -> dict[str, Any]:
    """What PyTorch's rank holds of these."""
    tensors = {name: torch.from_numpy(np.asarray(values)) for name, values in whole.items()}
    return {name: tensor_worker.own_part(name, values, rank).numpy() for name, values in tensors.items()}


@HEADS
@ROWS
def test_same_training(pytorch: Results, zerosim: Ours, by_rows: bool, tied: bool) -> None:
    """Losses, and after four steps of Adam the part of every weight that each process holds."""
    ours = zerosim[by_rows, tied]
    for rank, theirs in enumerate(pytorch[by_rows, tied]):
        within("losses", ours.mean_losses, theirs["losses"], atol=2e-6)
        weights_within("weights", part(dict(ours.weights), rank), theirs["weights"], 2e-6)


@HEADS
@ROWS
def test_same_first_gradients(pytorch: Results, by_rows: bool, tied: bool, tmp_path: Path) -> None:
    found = first_gradients(TASKS[tied], tmp_path, **settings(by_rows))
    for rank, theirs in enumerate(pytorch[by_rows, tied]):
        mine, expected = compared(part(found, rank)), compared(theirs["first"])
        for name in expected:
            within(name, mine[name], expected[name], atol=2e-7)


@HEADS
@ROWS
def test_same_volume(pytorch: Results, zerosim: Ours, by_rows: bool, tied: bool) -> None:
    """Bytes of what is gathered, scattered and reduced for activations, by collective, in every step."""
    ours = zerosim[by_rows, tied]
    for rank, results in enumerate(pytorch[by_rows, tied]):
        for step, theirs in enumerate(results["traffic"]):
            payload: Counter[str] = Counter()
            for row in ours.traffic[rank]:
                if (row.step, row.purpose) == (step, "activations"):
                    assert row.axis == "tp"
                    payload[row.op] += row.payload_bytes
            assert payload == theirs
            assert set(theirs) == ({"all_gather", "reduce_scatter", "all_reduce"} if by_rows else {"all_reduce"})
