"""Recipe ddp's buckets beside those of PyTorch's own DDP, where most parameters are frozen."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.train.plan import plan

from .runs import tiny, train_zerosim
from .test_distributed import in_processes

try:
    from . import bucket_worker as worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no DDP: {error}", allow_module_level=True)

DDP: dict[str, Any] = dict(ranks=worker.RANKS, stage=0, recipe="ddp")


def test_buckets_hold_trained_parameters_alone(tmp_path: Path) -> None:
    """16,000 trained of 1,016,000 parameters in fp32 are one bucket of 64,000 bytes; a GPT fills several."""
    (tmp_path / "tasks.pickle").write_bytes(pickle.dumps({False: (task := tiny(False))}))
    theirs, other = in_processes(worker.RANKS, worker.__name__, tmp_path)
    assert theirs == other
    units = RunConfig(model="flat", params=1_016_000, units=127, precision="fp32", freeze="*,!units.0,!units.1", **DDP)
    adapted = plan(units)
    assert adapted.num_parameters == 1_016_000
    gpt = train_zerosim(task, tmp_path, steps=1, freeze=worker.FROZEN, **DDP)
    for name, ours in (("adapted", adapted), ("gpt", gpt)):
        [nbytes] = {memory.marks["after_init"].by_kind["comm"] for memory in ours.memory}
        assert [sum(buckets) for buckets in theirs[name]] == [nbytes] * 3
    assert theirs["adapted"] == [[64_000]] * 3
    assert len(theirs["gpt"][-1]) > 1
