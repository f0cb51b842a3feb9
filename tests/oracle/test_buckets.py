"""Buckets of recipes ddp and deepspeed beside PyTorch's own DDP's and DeepSpeed's, where most parameters are frozen."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Free, Launch
from zerosim.train.plan import plan

from .runs import tiny, train_zerosim
from .test_distributed import in_processes

try:
    from . import bucket_worker as worker
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no DDP: {error}", allow_module_level=True)

DDP: dict[str, Any] = dict(ranks=worker.RANKS, stage=0, recipe="ddp")
ADAPTED: dict[str, Any] = dict(model="flat", params=1_016_000, units=127, freeze="*,!units.0,!units.1")


def deepspeed_buckets(stage: int, size: int, overlap: bool) -> dict[str, Any]:
    """Return what the worker's function of this name returns, of a plan's first step."""
    config = RunConfig(
        **ADAPTED, ranks=worker.RANKS, stage=stage, recipe="deepspeed", precision="bf16", reduce_bucket=size,
        overlap_comm=overlap,
    )  # fmt: skip
    result = plan(config, keep_events=True)
    live, inside, sent = dict[int, int](), 0, []
    for event in result.events[0]:
        if isinstance(event, Alloc) and event.kind == "comm":
            live[event.id] = event.nbytes
        elif isinstance(event, Free):
            live.pop(event.id, None)
        elif isinstance(event, Launch) and event.scope[:2] == (0, "backward"):
            inside = max(inside, sum(live.values()))
            sent += [event.payload_bytes] if event.op in ("all_reduce", "reduce_scatter") else []
    before, after = (result.memory[0].marks[mark].by_kind.get("comm", 0) for mark in ("after_init", "end_of_backward"))
    return {"before": before, "inside": inside, "after": after, "sent": sent}


def test_buckets_hold_trained_parameters_alone(tmp_path: Path) -> None:
    """16,000 trained of 1,016,000 parameters in fp32 are one bucket of 64,000 bytes; a GPT fills several. DeepSpeed's
    buffers are as large as asked for, two with overlap_comm below stage 3."""
    (tmp_path / "tasks.pickle").write_bytes(pickle.dumps({False: (task := tiny(False))}))
    theirs, other = in_processes(worker.RANKS, worker.__name__, tmp_path)
    assert theirs == other
    for case in set(theirs) & set(worker.CASES):
        assert deepspeed_buckets(*case) == theirs[case], case
    adapted = plan(RunConfig(**ADAPTED, precision="fp32", **DDP))
    assert adapted.num_parameters == 1_016_000
    gpt = train_zerosim(task, tmp_path, steps=1, freeze=worker.FROZEN, **DDP)
    for name, ours in (("adapted", adapted), ("gpt", gpt)):
        [nbytes] = {memory.marks["after_init"].by_kind["comm"] for memory in ours.memory}
        assert [sum(buckets) for buckets in theirs[name]] == [nbytes] * 3
    assert theirs["adapted"] == [[64_000]] * 3
    assert len(theirs["gpt"][-1]) > 1
