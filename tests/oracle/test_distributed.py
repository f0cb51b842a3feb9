"""Stages 0 and 3 beside PyTorch's own DDP, FSDP2 and HSDP (`fully_shard`): processes on gloo, the same rows per rank.

One start of two processes runs DDP and FSDP2, one of four HSDP. They meet in a file, so that no port can be taken; a
process that hangs is killed, and with it the others.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from zerosim.device.events import Launch
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

from .compare import weights_within, within
from .runs import tiny, train_zerosim

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of PyTorch has no gloo", allow_module_level=True)
try:
    from . import worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no FSDP2: {error}", allow_module_level=True)

SECONDS = 120
TASKS = {tied: tiny(tied) for tied in (True, False)}
HEADS = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
METHODS: dict[str, dict[str, int]] = {
    "ddp": dict(stage=0),
    "fsdp2": dict(stage=3),
    "hsdp": dict(stage=3, dp_replicate=2),
}
Results = dict[tuple[str, bool], list[dict[str, Any]]]
"""By (method, tied), what each rank left."""


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return {
        **train_pytorch(tmp_path_factory.mktemp("two"), "ddp", "fsdp2"),
        **train_pytorch(tmp_path_factory.mktemp("four"), "hsdp"),
    }


def train_pytorch(folder: Path, *methods: str) -> Results:
    """These methods, which want as many processes, in one start of them."""
    (folder / "tasks.pickle").write_bytes(pickle.dumps(TASKS))
    left = in_processes(worker.RANKS[methods[0]], worker.__name__, folder, *methods)
    return {key: [results[key] for results in left] for key in left[0]}


def in_processes(count: int, module: str, folder: Path, *words: str) -> list[Any]:
    """What each of `count` processes of `python -m module folder rank words...` leaves in rank<RANK>.pickle."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", module, str(folder), str(rank), *words]
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        codes = wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=SECONDS)
    said = "\n".join(log.read_text("utf-8") for log in logs)
    assert codes == [0] * count, f"exit codes {codes} (None: still running after {SECONDS} s)\n{said}"
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(count)]


def wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all have ended, one has failed (the others would wait for it) or time is up."""
    deadline = time.monotonic() + SECONDS
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


def run_zerosim(tied: bool, method: str, folder: Path) -> RunResult:
    settings: dict[str, Any] = dict(ranks=worker.RANKS[method], lr=worker.LR, clip_norm=worker.CLIP_NORM)
    return train_zerosim(TASKS[tied], folder, **settings, **METHODS[method])


@HEADS
@pytest.mark.parametrize("method", METHODS)
def test_same_training(pytorch: Results, method: str, tied: bool, tmp_path: Path) -> None:
    theirs = pytorch[method, tied]
    ours = run_zerosim(tied, method, tmp_path)
    within(f"{method}, losses", ours.losses, np.transpose([rank["losses"] for rank in theirs]), atol=2e-6)
    norms = [step.grad_norm for step in ours.steps]
    assert 0 < sum(norm > worker.CLIP_NORM for norm in norms) < len(norms), norms
    for rank in theirs:
        within(f"{method}, grad_norm", norms, rank["grad_norm"], rtol=2e-6)
        weights_within(f"{method}, weights", ours.weights, rank["weights"], 2e-6)


@HEADS
@pytest.mark.parametrize("method", ["fsdp2", "hsdp"])
def test_same_volume_as_fsdp2(pytorch: Results, method: str, tied: bool, tmp_path: Path) -> None:
    """Bytes of what is gathered and scattered in a step: 2 Psi and Psi; of parts averaged over replicas Psi/2. A tied
    table is gathered twice more by zerosim, once per use in each direction; FSDP2's root keeps it in between."""
    task = TASKS[tied]
    ours = run_zerosim(tied, method, tmp_path)
    psi = 4 * ours.num_parameters
    again = 2 * 4 * task.vocab * task.hidden if tied else 0
    across = {"all_reduce": psi // 2} if method == "hsdp" else {}
    for rank, results in enumerate(pytorch[method, tied]):
        for step, theirs in enumerate(results["traffic"]):
            rows = [row for row in ours.traffic[rank] if row.step == step and row.purpose == "states"]
            payload = {row.op: 0 for row in rows}
            for row in rows:
                payload[row.op] += row.payload_bytes
            assert theirs == {"all_gather": 2 * psi, "reduce_scatter": psi, **across}
            assert payload == {"all_gather": 2 * psi + again, "reduce_scatter": psi, **across}


def test_gathers_ahead_in_the_order_of_fsdp2(pytorch: Results, tmp_path: Path) -> None:
    """Calls in their order: in backward the gather of the next unit comes before the reduction of this one's.

    The two tables are beside each other in PyTorch's graph: which of them is reduced last is its own choice.
    """
    config = TASKS[False].config(tmp_path, ranks=2, stage=3, prefetch=1, steps=1)
    ours = [event for event in plan(config, keep_events=True).events[0] if isinstance(event, Launch)]
    calls = [(call.op, call.payload_bytes) for call in ours if call.purpose == "states"]
    ahead = ["all_gather", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert [op for op, _ in calls[len(TASKS[False].gpt().h) + 4 :]][:5] == ahead
    for results in pytorch["fsdp2", False]:
        assert results["calls"][:-2] == calls[:-2]
        assert sorted(results["calls"][-2:]) == sorted(calls[-2:])
