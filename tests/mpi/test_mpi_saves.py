"""A run over MPI saves what threads save, byte for byte; each goes on from the other's step with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.state.folder import step_folder
from zerosim.state.manifest import MANIFEST
from zerosim.train.run import run as train

from .mpirun import needs_mpi, run
from .saves import left_by

pytestmark = needs_mpi

SCRIPT = Path(__file__).parent / "saves.py"
TINY: dict[str, Any] = dict(layers=2, hidden=10, heads=2, seq=5, steps=4, micro_batch=1, seed=3)
FP32: dict[str, Any] = dict(precision="bf16", grad_dtype="fp32")
RUNS: list[dict[str, Any]] = [
    dict(stage=3, save_as="sharded"),
    dict(stage=1, save_as="gathered", precision="fp32"),
    dict(stage=2, save_as="async", dropout=0.2),
    dict(stage=2, partition="owner", save_as="gathered"),
    dict(stage=0, precision="fp16", initial_scale_power=17, hysteresis=1, loss_scale_window=1),
    dict(stage=1, tp=2, save_as="sharded"),
    dict(stage=1, compress="top-k", compress_ratio=0.1, **FP32),
    dict(stage=0, pp=2, accumulate=2),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("processes", "per_process", "runs"),
    [(2, 1, RUNS), (4, 1, RUNS[::2]), (2, 2, RUNS[1::2])],
    ids=["2", "4", "2x2"],
)
def test_processes_and_threads_go_on_from_one_another_s_steps(
    processes: int, per_process: int, runs: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = []
    for number, fields in enumerate(runs):
        place = tmp_path / str(number)
        place.mkdir()
        config = RunConfig(**{**TINY, **fields, "ranks": processes * per_process, "save_as": None})
        asked = config.replace(save_state=str(place / "threads"), save_every=2, save_as=fields.get("save_as"))
        expected.append((config, train(asked)))
    asked_for, left = tmp_path / "runs.json", tmp_path / "found.json"
    asked_for.write_text(json.dumps([{**TINY, **fields} for fields in runs]), "utf-8")
    job = run(processes, str(SCRIPT), str(per_process), str(tmp_path), str(asked_for), str(left), timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    for number, ((config, whole), found) in enumerate(zip(expected, json.loads(left.read_text("utf-8")), strict=True)):
        threads, mpi = (step_folder(tmp_path / str(number) / name, 2) for name in ("threads", "mpi"))
        assert found["whole"] == left_by(whole), runs[number]
        assert found["later"] == {"losses": repr(whole.losses[2:]), "weights": left_by(whole)["weights"]}
        assert left_by(train(config.replace(resume=str(mpi)))) == found["later"]
        names = sorted(path.name for path in threads.iterdir())
        assert names == sorted(path.name for path in mpi.iterdir())
        for name in set(names) - {MANIFEST}:
            assert (threads / name).read_bytes() == (mpi / name).read_bytes(), name


def test_a_folder_that_cannot_be_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--layers", "1", "--hidden", "8", "--heads", "2", "--seq", "4", "--micro-batch", "1", "--steps", "2"]
    job = run(2, "-m", "zerosim", "run", *words, "--world", "mpi", "--save-state", str(tmp_path / "file"))
    assert job.returncode == 2, job.stderr
    assert job.stderr.count("zerosim: error:") == 1
    assert "is a file; name a folder" in job.stderr
