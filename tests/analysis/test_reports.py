"""Public reports without a number of their own: which of two jobs took more, what a loss scale did, what agreed."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.config import plan_config
from zerosim.optim.precision import LossScaler
from zerosim.train.plan import plan

GPT: dict[str, Any] = dict(model="gpt", layers=8, hidden=64, heads=4, seq=32, vocab=512, ranks=8, precision="fp16")
PIPELINE: dict[str, Any] = GPT | dict(pp=2, stage=1, recipe="deepspeed", reduce_bucket=1000)
ZERO_BUBBLE: dict[str, Any] = GPT | dict(ranks=4, pp=4, stage=0, accumulate=8, tie_embeddings=False)
FSDP: dict[str, Any] = GPT | dict(stage=3, recipe="fsdp2", precision="bf16")


def peak(config: dict[str, Any]) -> int:
    return max(memory.peak.total_bytes for memory in plan(plan_config(**config)).memory)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (GPT | dict(stage=1, recipe="deepspeed", reduce_bucket=0), GPT | dict(stage=2, recipe="deepspeed")),
        (PIPELINE | dict(accumulate=1), PIPELINE | dict(accumulate=2)),
        (PIPELINE | dict(accumulate=2), PIPELINE | dict(accumulate=4)),
        (ZERO_BUBBLE | dict(pipeline="zb-h1"), ZERO_BUBBLE | dict(pipeline="zb-v")),
        (FSDP | dict(accumulate=16), FSDP | dict(accumulate=2, grad_sync=False)),
    ],
    ids=[
        "DeepSpeed issue 1302: ZeRO-2 above ZeRO-1",
        "DeepSpeed issue 4602: more microbatches in a pipeline",
        "DeepSpeed issue 4602: more microbatches in a pipeline, again",
        "zero-bubble issue 36: ZB-V, where both tables meet on one rank",
        "accelerate's page on gradient synchronisation: no_sync",
    ],
)
def test_took_more(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert peak(less) < peak(more)


def test_accumulation_that_synchronises_takes_no_more() -> None:
    """accelerate's page. Each microbatch's loss is a number of 4 bytes."""
    assert peak(FSDP | dict(accumulate=16)) == peak(FSDP | dict(accumulate=2)) + 14 * 4


def test_a_scale_of_2_to_the_32_is_tried_twice_and_halved_then() -> None:
    """DeepSpeed issue 931."""
    scaler, tried = LossScaler(2.0**32, hysteresis=2), list[float]()
    for _ in range(5):
        tried.append(scaler.scale)
        scaler.update(True)
    assert tried == [2.0**power for power in (32, 32, 31, 30, 29)]
