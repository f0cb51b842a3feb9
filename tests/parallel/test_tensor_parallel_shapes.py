"""Worlds of shapes with tensor parallelism leave the record of a run, event by event, and few ranks stand for all."""

from __future__ import annotations

from typing import Any

import pytest
from test_shapes import assert_same_record

from zerosim.config import RunConfig
from zerosim.train.plan import plan

SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=4, seq=8, vocab=256, steps=1, micro_batch=1, precision="bf16")
SP: dict[str, Any] = dict(sequence_parallel=True)
KEEP: dict[str, Any] = dict(sequence_parallel=True, keep_gathered=True)
LLAMA: dict[str, Any] = dict(model="llama", kv_heads=2)
FLAT: dict[str, Any] = dict(model="flat", params=1003, units=3, layers=None, hidden=None, heads=None)

SAMPLE: list[dict[str, Any]] = [
    dict(ranks=2, tp=2, stage=0, dropout=0.1, accumulate=2),
    dict(ranks=4, tp=4, stage=0, collective="ring", dropout=0.1, recompute="full", saves="megatron", **SP),
    dict(ranks=6, tp=2, stage=3, clip_norm=0.5, hidden=20, **SP),
    dict(ranks=6, tp=2, stage=1, partition="owner", vocab=257, pad_vocab=True, attention="flash", **KEEP),
    dict(ranks=8, tp=4, stage=3, model="llama", kv_heads=1, recompute="selective"),
    dict(ranks=8, tp=2, dp_replicate=2, stage=2, accumulate=2, replica_reduction="micro_batch", **SP),
    dict(ranks=12, tp=4, stage=2, **LLAMA, **KEEP),
    dict(ranks=8, tp=4, stage=3, collective="ring", bucket_bytes=512, **LLAMA, **SP),
    dict(ranks=6, tp=2, stage=3, **FLAT),
    dict(ranks=8, tp=4, stage=2, partition="owner", **FLAT, accumulate=2),
    dict(ranks=2, tp=2, stage=0, precision="fp16", initial_scale_power=30, hysteresis=1, steps=3, **SP),
]


def config(fields: dict[str, Any]) -> RunConfig:
    return RunConfig(**{name: value for name, value in {**SMALL, **fields}.items() if value is not None})


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", SAMPLE, ids=str)
def test_shapes_leave_the_record_of_a_real_run(fields: dict[str, Any]) -> None:
    assert_same_record(config(fields))


def test_members_of_an_even_group_are_one_class() -> None:
    """Heads, columns and rows are as many on each; so one of 8 tensor-parallel ranks stands for all."""
    for options in (dict(), SP, KEEP):
        assert plan(config(dict(ranks=8, tp=4, stage=0, **options))).ran == [0]
