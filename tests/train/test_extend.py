"""Plans of many micro-batches: what two short runs are extended to is what running all of them counts."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.train.extend import shorter_runs
from zerosim.train.plan import plan

BASE: dict[str, Any] = dict(layers=4, hidden=16, heads=4, seq=8, micro_batch=2, dropout=0.1, saves="megatron", vocab=32)
RUNS = [
    dict(ranks=4, pp=4, stage=0),
    dict(ranks=4, pp=2, stage=1, pipeline="gpipe"),
    dict(ranks=4, pp=2, stage=2, replica_reduction="micro_batch", dp_replicate=2),
    dict(ranks=4, pp=2, stage=3, recompute="full", precision="fp32"),
    dict(ranks=8, pp=2, tp=2, stage=1, sequence_parallel=True, pipeline="interleaved"),
    dict(ranks=2, pp=2, stage=0, pipeline="gpipe", recompute="full", precision="fp16"),
    dict(ranks=4, tp=2, stage=1, recipe="deepspeed"),
    dict(ranks=4, stage=3, recipe="fsdp2", recompute="full", dp_replicate=2),
]


@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_extended_plans_count_what_all_micro_batches_count(fields: dict[str, Any]) -> None:
    config = RunConfig(**{**BASE, **fields, "accumulate": 12})
    short, whole = plan(config), plan(config, keep_events=True)  # with events, all of them are run
    assert short.extended_from == shorter_runs(config) is not None
    assert whole.extended_from is None
    assert [memory.to_dict() for memory in short.memory] == [memory.to_dict() for memory in whole.memory]
    assert short.traffic == whole.traffic
    assert short.config == config


def test_few_micro_batches_are_run_as_they_are() -> None:
    assert shorter_runs(RunConfig(**BASE, ranks=4, pp=4, accumulate=6)) is None
    assert shorter_runs(RunConfig(**BASE, ranks=4, pp=4, accumulate=7)) == (5, 6)
    assert shorter_runs(RunConfig(**BASE, ranks=4, accumulate=64)) == (3, 4)
    assert shorter_runs(RunConfig(**BASE, ranks=2, pp=2, pipeline="interleaved", accumulate=10)) == (6, 8)
    gpipe = RunConfig(**BASE, ranks=4, pp=4, pipeline="gpipe", accumulate=64, capacity="1GB")
    assert shorter_runs(gpipe) is None  # which grows, and may be refused at any of them
