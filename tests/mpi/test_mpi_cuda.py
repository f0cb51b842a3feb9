"""Backend cuda over MPI: the same bits as on threads, and what passes through the host's memory is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .mpirun import needs_mpi, run

pytestmark = needs_mpi

SCRIPT = Path(__file__).parent / "cuda_runs.py"


@pytest.mark.parametrize(("way", "per_process"), [("staged", 1), ("staged", 2), ("aware", 1), ("aware", 2)])
def test_runs_on_gpus_over_mpi(way: str, per_process: int, tmp_path: Path) -> None:
    if os.environ["ZEROSIM_TESTS_GPU"] == "1" and way == "aware":
        pytest.skip("whether the library here is GPU-aware is for it to say")
    left = tmp_path / "found.json"
    job = run(2, str(SCRIPT), way, str(per_process), str(left), timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    runs = json.loads(left.read_text("utf-8"))
    assert any(found["out"] for found in runs) == (way == "staged")
    for found in runs:
        assert found["same"]
        assert found["explained"]
        assert found["states"]
        if way == "aware":
            assert (found["out"], found["back"]) == (0, 0)
        elif per_process == 1:  # two ranks: every message leaves the process, and is staged once at each end
            assert (found["out"], found["back"]) == (found["sent"], found["received"])
        else:  # what stays within the process is not staged; in a ring rank 0 sends to rank 1 alone
            assert found["out"] < found["sent"]
