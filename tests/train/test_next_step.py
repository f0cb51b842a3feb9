"""A plan's second step, out of the record of the first, has every figure of a step whose program runs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import OutOfMemory
from zerosim.train import engine
from zerosim.train import plan as planning
from zerosim.train.plan import plan

GPT: dict[str, Any] = dict(model="gpt", layers=3, hidden=32, heads=4, seq=16, vocab=64, ranks=4, accumulate=2)
LAZY = dict(GPT, lazy_states=True)
DEEPSPEED = dict(GPT, recipe="deepspeed", stage=3)
ONCE: dict[str, dict[str, Any]] = {
    "DeepSpeed": dict(DEEPSPEED, precision="fp16", dropout=0.1),
    "Infinity": dict(DEEPSPEED, offload="optimizer=nvme,params=nvme", prefetch=1, recompute="full"),
    "by module": dict(DEEPSPEED, offload="optimizer=nvme,params=host", gather="module"),
    "FSDP2": dict(LAZY, recipe="fsdp2", stage=3, precision="bf16", clip_norm=1.0),
    "DDP": dict(LAZY, recipe="ddp", stage=0),
    "a pipeline": dict(LAZY, layers=4, pp=2, stage=1, pipeline="zb-h1", accumulate=4),
    "three steps": dict(LAZY, stage=2, steps=3, precision="fp16"),
    "tensor parallel": dict(LAZY, stage=1, tp=2, sequence_parallel=True, recompute="selective"),
    "states of the beginning": dict(GPT, stage=1, steps=2),
    "it fits": dict(LAZY, stage=1, capacity=10**6),
}
AGAIN: dict[str, dict[str, Any]] = {
    "no room for states": dict(LAZY, stage=2, ranks=1, capacity=720_000),
    "an update beside the next step": dict(GPT, stage=2, offload="optimizer=host", delayed_update=1),
    "after a warmup": dict(LAZY, stage=0, compress="powersgd", precision="fp32", steps=3, compress_warmup=1),
    "estimates": dict(LAZY, stage=1, optimizer="sophia"),
    "another allocator": dict(LAZY, stage=2, allocator="caching"),
}


def figures(fields: dict[str, Any], *, alike: bool) -> tuple[object, int]:
    """Return a plan's figures, or its refusal, and how many steps its program took."""
    config, cluster = plan_config(**fields), cluster_of(find_hardware("h100"))
    rule = planning.steps_are_alike if alike else lambda config, skipped: False
    with (
        patch.object(engine, "train_step", wraps=engine.train_step) as step,
        patch.object(planning, "steps_are_alike", rule),
    ):
        try:
            found = plan(config, cluster=cluster)
        except OutOfMemory as error:
            return (str(error), error.live, error.by_unit), step.call_count
    left = found.memory, found.traffic, found.saved, found.saved_again, found.live_bytes_after, found.steps, found.time
    return repr(left), step.call_count


@pytest.mark.parametrize("case", ONCE)
def test_a_step_like_the_one_before_is_recorded_and_not_run(case: str) -> None:
    told, once = figures(ONCE[case], alike=True)
    ran, all_steps = figures(ONCE[case], alike=False)
    assert told == ran
    assert all_steps == once * (3 if ONCE[case].get("steps") == 3 else 2)


@pytest.mark.parametrize("case", AGAIN)
def test_the_program_runs_where_the_record_cannot_tell(case: str) -> None:
    assert figures(AGAIN[case], alike=True) == figures(AGAIN[case], alike=False)
