"""Plans of many microbatches: what two short runs are extended to is what running all of them counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError, OutOfMemory
from zerosim.ledger.memory import Snapshot
from zerosim.train import plan as module
from zerosim.train.extend import Planned, shorter_runs
from zerosim.train.plan import figures_within, plan
from zerosim.train.result import RunResult

BASE: dict[str, Any] = dict(layers=4, hidden=16, heads=4, seq=8, micro_batch=2, dropout=0.1, saves="megatron", vocab=32)
RUNS = [
    dict(ranks=4, pp=4, stage=0),
    dict(ranks=4, pp=2, stage=1, pipeline="gpipe"),
    dict(ranks=4, pp=2, stage=2, replica_reduction="micro_batch", dp_replicate=2),
    dict(ranks=4, pp=2, stage=3, recompute="full", precision="fp32"),
    dict(ranks=8, pp=2, tp=2, stage=1, sequence_parallel=True, pipeline="interleaved"),
    dict(ranks=4, pp=2, stage=1, pipeline="interleaved", micro_batch_group=3, accumulate=15),
    dict(ranks=2, pp=2, stage=0, pipeline="gpipe", recompute="full", precision="fp16"),
    dict(ranks=4, tp=2, stage=1, recipe="deepspeed"),
    dict(ranks=4, stage=3, recipe="fsdp2", recompute="full", dp_replicate=2),
    dict(ranks=4, pp=2, stage=1, pipeline="gpipe", recipe="deepspeed", optimizer="sophia"),
]


GPIPE: dict[str, Any] = dict(ranks=4, pp=2, pipeline="gpipe")
MOVED = [
    dict(**GPIPE, recipe="ddp", stage=0, seq=4),
    dict(**GPIPE, recipe="ddp", stage=1, seq=4, recompute="selective", vocab=512),
    dict(**GPIPE, recipe="fsdp2", stage=0, recompute="full"),
    dict(**GPIPE, recipe="deepspeed", stage=3, recompute="full", seq=4),
    dict(**{**GPIPE, "ranks": 8, "pp": 4}, recipe="ddp", stage=1, recompute="full", vocab=512),
]
"""The optimizer's step is the highest moment of a short plan, and a forward or a backward of a long one."""


def planned_in_full(config: RunConfig) -> RunResult:
    return plan(config, keep_events=True)  # with events, all microbatches are run


def parts(shot: Snapshot) -> tuple[Any, ...]:
    return shot.scope._replace(slot=0), shot.by_kind, shot.by_unit, shot.padding


def assert_same(short: RunResult, whole: RunResult) -> None:
    assert short.config == whole.config
    assert short.stands_for == whole.stands_for
    assert short.traffic == whole.traffic
    for one, other in zip(short.memory, whole.memory, strict=True):
        assert one.to_dict() == other.to_dict()
        assert parts(one.peak) == parts(other.peak)
        assert {name: parts(mark) for name, mark in one.marks.items()} == {
            name: parts(mark) for name, mark in other.marks.items()
        }
        assert min(one.peak.by_kind.values()) > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", [*RUNS, *MOVED], ids=str)
def test_extended_plans_count_what_all_micro_batches_count(fields: dict[str, Any]) -> None:
    config = RunConfig(**{**BASE, "accumulate": 16 if fields in MOVED else 12, **fields})
    short, whole = plan(config), planned_in_full(config)
    assert short.extended_from == next(shorter_runs(config))
    assert whole.extended_from is None
    assert_same(short, whole)


@pytest.mark.slow
def test_gpt2_with_128_micro_batches_is_no_smaller_than_its_activations() -> None:
    """An optimizer's step is the peak of three microbatches: 1.80 GB came of it."""
    sizes: dict[str, Any] = dict(**GPIPE, accumulate=128, recipe="fsdp2", stage=0, seq=128)
    config = plan_config(model="gpt2", **sizes)
    short = plan(config)
    assert short.memory[0].peak.total_bytes == 4_988_679_232
    assert_same(short, planned_in_full(config))


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """A small model on a pipeline or none, with 2 to 128 microbatches of one or two rows."""
    pp = draw(st.sampled_from((2, 4, 1)))
    model = draw(st.sampled_from(("gpt", "llama", "flat")))
    of_any: dict[str, tuple[Any, ...]] = dict(
        recipe=("paper", "ddp", "deepspeed", "fsdp2", "megatron"),
        stage=(0, 1, 2, 3),
        micro_batch=(1, 2),
        pipeline=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v") if pp > 1 else (None,),
        optimizer=("adam", "sgd", "adafactor", "muon", "sophia"),
        precision=("bf16", "fp16", "fp32"),
        keep_last_unit=(False, True),
        partition=("slices", "owner"),
        offload=(None, None, "optimizer=host", "optimizer=nvme"),
    )
    of_blocks: dict[str, tuple[Any, ...]] = dict(
        recompute=("none", "full", "selective"),
        cpu_checkpointing=(False, True),
        seq=(4, 8, 32, 128),
        hidden=(8, 32),
        vocab=(16, 64, 512),
        tie_embeddings=(True, False),
        stage_layers=(None, ",".join(map(str, (0, *[2] * (pp - 2), 4)))) if pp > 1 else (None,),
    )
    asked = {**of_any, **({} if model == "flat" else of_blocks)}
    fields = {name: draw(st.sampled_from(values)) for name, values in asked.items()}
    fields |= dict(params=1001, units=8) if model == "flat" else dict(layers=2 * pp, heads=4)
    ranks = pp * draw(st.sampled_from((2, 1)))
    accumulate = draw(st.sampled_from((2, 3, 5, 6, 7, 8, 12, 16, 32, 64, 128)))
    if fields["pipeline"] == "interleaved":
        accumulate = max(accumulate, pp)
        fields["micro_batch_group"] = draw(st.sampled_from((None, pp, pp + 1)))
    try:
        return plan_config(model=model, pp=pp, ranks=ranks, accumulate=accumulate, **fields)
    except InputError:
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(configs())
def test_any_extended_plan_counts_what_all_micro_batches_count(config: RunConfig) -> None:
    assert_same(plan(config), planned_in_full(config))


def test_few_micro_batches_are_run_as_they_are() -> None:
    def counts(**fields: Any) -> list[tuple[int, int]]:
        return list(shorter_runs(RunConfig(**BASE, **fields)))

    assert counts(ranks=4, pp=4, accumulate=6) == []
    assert counts(ranks=4, pp=4, accumulate=7) == [(5, 6)]
    assert counts(ranks=4, accumulate=64) == [(3, 4), (6, 7), (12, 13), (24, 25), (48, 49)]
    assert counts(ranks=2, pp=2, pipeline="interleaved", accumulate=10) == [(6, 8)]
    assert counts(ranks=2, pp=2, pipeline="interleaved", accumulate=32) == [(6, 8), (12, 14), (24, 26)]
    threes = counts(ranks=2, pp=2, pipeline="interleaved", accumulate=32, micro_batch_group=3)
    assert threes
    assert all(few % 3 == more % 3 == 2 for few, more in threes)
    assert counts(ranks=4, accumulate=64, allocator="caching") == counts(ranks=4, accumulate=64)


@pytest.mark.parametrize(("silent", "extended_from"), [(6, (6, 7)), (99, None)])
def test_more_micro_batches_are_run_where_few_do_not_tell_the_peak(
    monkeypatch: pytest.MonkeyPatch, silent: int, extended_from: tuple[int, int] | None
) -> None:
    """Plans of fewer than `silent` microbatches lack all moments but the first."""
    honest = module._plan

    def planned(config: RunConfig, *args: Any) -> Planned:
        found = honest(config, *args)
        if config.data.accumulate >= silent:
            return found
        memory = [replace(one, moments=dict([*one.moments.items()][:1])) for one in found.result.memory]
        return found._replace(result=replace(found.result, memory=memory))

    config = RunConfig(**{**BASE, **MOVED[0], "accumulate": 16})
    monkeypatch.setattr(module, "_plan", planned)
    short = plan(config)
    assert short.extended_from == extended_from
    assert_same(short, planned_in_full(config))


def test_a_plan_and_a_search_give_gpipe_the_time_of_all_micro_batches() -> None:
    """Reductions out of two buffers are waited for in the last backward. The critical path of 4 microbatches is then
    not that of 16: a time extrapolated from 3 and 4 would be 3 % shorter."""
    sizes: dict[str, Any] = dict(layers=2, hidden=256, heads=4, vocab=64, seq=64, micro_batch=1)
    reductions: dict[str, Any] = dict(stage=1, reduce_bucket=300_000, reduce_buffers=2)
    config = plan_config(model="gpt", **sizes, **reductions, **GPIPE, accumulate=16)
    cluster = replace(cluster_of(find_hardware("a100-80gb")), link=1e8, collectives=None, host=0.0)
    timed = figures_within(config, 10**9, cluster)
    assert timed is not None
    assert timed.time is not None
    whole = plan(config, keep_events=True, cluster=cluster).time
    short = plan(config, cluster=cluster).time
    assert whole is not None
    assert short is not None
    assert timed.time.seconds == whole.seconds == short.seconds


def test_a_peak_beyond_the_capacity_is_refused_where_it_comes_up() -> None:
    """Three microbatches fit, sixteen do not."""
    config = RunConfig(**{**BASE, **MOVED[0], "accumulate": 16})
    peak = max(memory.peak.total_bytes for memory in plan(config).memory)
    assert plan(config.replace(capacity=peak)).extended_from == (3, 4)
    for capacity in (peak - 1, peak // 2, peak // 20):
        refused = []
        for keep_events in (False, True):
            with pytest.raises(OutOfMemory) as caught:
                plan(config.replace(capacity=capacity), keep_events=keep_events)
            refused.append((str(caught.value), caught.value.live, caught.value.by_unit))
        assert refused[0] == refused[1]
