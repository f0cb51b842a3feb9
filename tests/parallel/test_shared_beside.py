"""Shared experts beside the exchange of rows: each half while rows are on their way, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from same import assert_same_training

from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Event, Kernel, Launch, Wait
from zerosim.train.plan import plan
from zerosim.train.run import run

TOKENS, H, SHARED = 32, 16, 24
BASE: dict[str, Any] = dict(
    model="llama", layers=1, hidden=H, heads=4, kv_heads=2, ffn=24, vocab=256, seq=16, micro_batch=2, steps=2, lr=0.2,
    experts=8, top_k=2, expert_ffn=12, shared_experts=2, ranks=4, ep=2, stage=3, precision="bf16",
)  # fmt: skip
BESIDE = dict(shared_expert_overlap=True)
WAYS: list[dict[str, Any]] = [
    dict(layers=2, accumulate=2, aux_loss=0.1, z_loss=0.01),
    dict(gather="module", capacity_factor=1.0),
    dict(layers=2, pp=2, stage=1, accumulate=3, pipeline="zb-h1"),
    dict(ranks=8, tp=2, sequence_parallel=True, recipe="megatron"),
    dict(recompute="full", keep_router=True),
    dict(recompute="selective:mlp_act,layernorm", lora_rank=2, lora_target="all-linear"),
]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_bit_changes(way: dict[str, Any]) -> None:
    assert_same_training(run(RunConfig(**BASE | way | BESIDE)), run(RunConfig(**BASE | way)))


def beside(events: list[Event], phase: str) -> list[int]:
    """The flops of products between each exchange's launch and its end."""
    found, work = list[int](), -1
    for event in events:
        if event.scope.phase != phase:
            continue
        if isinstance(event, Launch) and event.op == "all_to_all" and event.purpose == "activations":
            work = event.work
            found.append(0)
        elif isinstance(event, Wait) and event.work == work:
            work = -1
        elif isinstance(event, Kernel) and event.engine == "matmul" and work >= 0:
            found[-1] += event.flops
    return found


@pytest.mark.parametrize("model", ["llama", "qwen2_moe"])
def test_the_first_map_runs_on_the_way_there_and_the_last_on_the_way_back(model: str) -> None:
    """In backward, which computes two gradients of each map, the last map's are first. A gate belongs to the first."""
    first, last = 2 * TOKENS * H * (2 * SHARED + (model != "llama")), 2 * TOKENS * H * SHARED
    for changes, forward, backward in (
        (BESIDE, [first, last], [2 * last, 2 * first]),
        ({}, [0, 0], [0, 0]),
    ):
        config = RunConfig(**BASE | changes | dict(model=model, steps=1))
        events = plan(config, keep_events=True).events[0]
        assert beside(events, "forward") == forward
        assert beside(events, "backward") == backward


def test_wide_shared_experts_hide_the_exchange() -> None:
    """All but that of counts, which nothing hides; kernels that hide a collective are slowed down."""
    cluster = cluster_of(find_hardware("h100-80")).without_limits()
    wide = BASE | dict(hidden=1024, heads=8, seq=512, expert_ffn=64, shared_ffn=32768, stage=1, steps=1)
    alone, together = (plan(plan_config(**wide | more), cluster=cluster).time for more in ({}, BESIDE))
    assert alone is not None
    assert together is not None
    counts = plan(plan_config(**wide | BESIDE), cluster=replace(cluster, link=1e30)).time
    assert counts is not None
    assert together.exposed["ep"] == pytest.approx(counts.exposed["ep"], rel=1e-6)
    assert together.exposed["ep"] < 0.5 * alone.exposed["ep"]
    assert together.slowed > alone.slowed
    assert together.compute == alone.compute
    assert together.seconds < alone.seconds
