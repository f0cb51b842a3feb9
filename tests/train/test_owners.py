"""Ranks that differ only in what they own are spliced: every figure is that of a plan which runs each of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError, OutOfMemory
from zerosim.train import plan as plans
from zerosim.train.owners import PROGRAMS
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

H100 = cluster_of(find_hardware("h100"))
SMALL: dict[str, Any] = dict(model="llama", hidden=16, heads=4, kv_heads=2, seq=8, vocab=64, layers=3, ranks=9, stage=2)
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"clip_norm": 1.0},
    {"prefetch": 2},
    {"overlap_reduction": True},
    {"overlap_param_gather": True},
    {"steps": 2, "precision": "fp16"},
    {"recompute": "full"},
    {"grad_sync": False},
    {"gather": "module"},
    {"upcast_grads": True},
    {"foreach": True},
    {"sub_group": 2000},
    {"persistent_numel": 100},
    {"offload": "optimizer=host"},
    {"offload": "optimizer=host,grads=host", "delayed_update": 1},
    {"sequence_parallel": True},
    {"pipeline": "zb-h1"},
    {"pipeline": "gpipe"},
    {"collective": "ring"},
    {"allocator": "caching"},
)


def drawn(case: int) -> RunConfig:
    """Draw a plan in which ranks own whole buffers."""
    rng = random.Random(f"owners {case}")
    while True:
        tp, pp, copies = rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 1, 1, 2))
        fields = SMALL | dict(
            model=rng.choice(("gpt", "llama")),
            optimizer=rng.choice(("muon", "muon", "adamw", "lion", "sophia", "adafactor")),
            partition="owner",
            layers=rng.randint(pp, 3),
            tp=tp,
            pp=pp,
            dp_replicate=copies,
            ranks=tp * pp * copies * (rng.randint(4, 11) if tp * pp * copies == 1 else 5),
            stage=rng.randint(1, 3),
            recipe=rng.choice(("paper", "deepspeed", "fsdp2", "megatron")),
            accumulate=pp * rng.randint(1, 4),
        )
        if fields["model"] == "gpt":
            del fields["kv_heads"]
        fields |= rng.choice(OTHERS) | rng.choice(OTHERS)
        try:
            return plan_config(**fields)
        except InputError:
            continue


def figures(result: RunResult) -> tuple[Any, ...]:
    kept = result.saved, result.saved_again, result.live_bytes_after, result.extended_from
    return result.memory, result.traffic, result.time, result.steps, result.stands_for, *kept


def without_splices(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> RunResult:
    with monkeypatch.context() as patched:
        patched.setattr(plans, "spliced", lambda *asked: {})
        return plan(config, cluster=H100)


def check(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> None:
    found, every = plan(config, cluster=H100), plan(config, cluster=H100, every_rank=True)
    assert figures(found) == figures(without_splices(monkeypatch, config))
    assert (found.memory, found.traffic) == (every.memory, every.traffic)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", range(0, 120, 3))
def test_spliced_ranks_leave_the_figures_of_their_programs(monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    check(monkeypatch, drawn(case))


def programs(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> int:
    """Return how many programs a plan runs."""
    ran, launch = list[int](), plans.launch_alone

    def counted(program: Any, world: Any, rank: int, readers: Any) -> Any:
        ran.append(rank)
        return launch(program, world, rank, readers)

    with monkeypatch.context() as patched:
        patched.setattr(plans, "launch_alone", counted)
        plan(config, cluster=H100)
    return len(ran)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["paper", "deepspeed", "fsdp2", "megatron"])
def test_three_programs_tell_what_all_owners_need(monkeypatch: pytest.MonkeyPatch, stage: int, recipe: str) -> None:
    config = plan_config(**SMALL | dict(stage=stage, recipe=recipe, ranks=24, optimizer="muon"))
    assert len(plan(config).ran) > 20
    assert programs(monkeypatch, config) == PROGRAMS


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "fields",
    [
        dict(stage=3, sub_group=2000),
        dict(collective="ring"),
        dict(allocator="caching"),
        dict(offload="optimizer=host,grads=host"),
    ],
    ids=str,
)
def test_every_owner_runs_where_a_buffer_depends_on_the_others(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    config = plan_config(**SMALL | dict(optimizer="adam", partition="owner", stage=2, steps=1) | fields)
    assert programs(monkeypatch, config) >= len(plan(config).ran)
    check(monkeypatch, config)


def test_every_owner_runs_where_a_turn_waits_for_a_copy_that_another_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameters are fetched ahead from the host depends on what else a rank owns."""
    check(monkeypatch, RunConfig(model="llama", layers=1, hidden=8, heads=4, seq=4, partition="owner", lora_rank=1,
                                 offload="optimizer=host,params=host", prefetch=2))  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("share", [0.3, 0.8, 0.999, 1])
def test_a_bounded_device_refuses_what_it_refuses_to_the_program(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    config = plan_config(**SMALL | dict(optimizer="muon", ranks=12))
    config = config.replace(capacity=int(share * max(memory.peak.total_bytes for memory in plan(config).memory)))
    if share == 1:
        assert plan(config).memory == plan(config, every_rank=True).memory
        return
    refusals = []
    for ask in (lambda: plan(config), lambda: without_splices(monkeypatch, config)):
        with pytest.raises(OutOfMemory) as refused:
            ask()
        error = refused.value
        refusals.append((str(error), error.rank, error.requested, error.where, error.live, error.by_unit))
    assert refusals[0] == refusals[1]
