"""A run on shapes alone leaves the record of a real one, and what it costs does not grow with ranks."""

from __future__ import annotations

import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.expect.asked import cluster_named
from zerosim.config import RunConfig
from zerosim.device.events import Event
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run


def small(**changes: object) -> RunConfig:
    return RunConfig(**{"steps": 2, "layers": 2, "hidden": 8, "heads": 2, "seq": 7, "micro_batch": 2, **changes})  # type: ignore[arg-type]


def assert_same_record(config: RunConfig, real: RunResult | None = None) -> None:
    """Every rank's events of a real run and of shapes alone, one by one. `real` is that run, where it was made."""
    real = run(config, keep_events=True) if real is None else real
    skipped = [step for step, report in enumerate(real.steps) if report.skipped]
    for every_rank in (True, False):
        shapes = plan(config, every_rank=every_rank, skipped=skipped, keep_events=True)
        for rank in shapes.ran:
            assert_same_events(real.events[rank], shapes.events[rank])
        for rank in range(config.mesh.ranks):
            assert shapes.memory[rank] == real.memory[rank]
            assert shapes.traffic[rank] == real.traffic[rank]
        assert shapes.live_bytes_after == real.live_bytes_after
    whats = [[(report.skipped, report.estimated) for report in result.steps] for result in (shapes, real)]
    assert whats[0] == whats[1]


def assert_same_events(real: list[Event], shapes: list[Event]) -> None:
    for index, (expected, got) in enumerate(zip(real, shapes, strict=False)):
        assert got == expected, f"event {index}"
    assert len(shapes) == len(real)


@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
def test_so_does_each_way_of_a_context(context: str) -> None:
    """What goes round a ring, keys and values and then their gradients too, is numbered in one row."""
    assert_same_record(small(cp=2, ranks=2, seq=8, attention="flash", context=context))


PARTITIONS = [(0, "slices"), *((stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner"))]


RANKS = (1, 3, 8)
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "partition"), PARTITIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_shapes_leave_the_record_of_a_real_run(stage: int, partition: str, precision: str) -> None:
    """Numbers of ranks take turns: each meets every stage, partition and precision."""
    ranks = RANKS[(PARTITIONS.index((stage, partition)) + PRECISIONS.index(precision)) % len(RANKS)]
    assert_same_record(small(stage=stage, partition=partition, precision=precision, ranks=ranks, accumulate=2))


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "adam"), (2, "adafactor")])
def test_pairs_too(stage: int, optimizer: str) -> None:
    assert_same_record(small(stage=stage, ranks=3, collective="pairs", optimizer=optimizer, bucket_bytes=4096))


@pytest.mark.quick(3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("stage", "partition"), PARTITIONS)
def test_rings_too(stage: int, partition: str, ranks: int) -> None:
    assert_same_record(small(stage=stage, partition=partition, ranks=ranks, collective="ring", bucket_bytes=4096))


OTHERS = {
    "clipping, dropout, decay": dict(clip_norm=1.0, dropout=0.1, optimizer="adamw", decay="matrices"),
    "momentum": dict(optimizer="sgd", momentum=0.9, lr=0.01),
    "no momentum": dict(optimizer="sgd", lr=0.01),
    "sums": dict(optimizer="adafactor-hf", momentum=0.9, precision="bf16", partition="slices"),
    "pure bf16": dict(precision="bf16-pure", rounding="kahan"),
    "sums in pure bf16": dict(optimizer="adafactor-hf", momentum=0.9, precision="bf16-pure", rounding="kahan"),
    "curvature": dict(optimizer="sophia", steps=10),
    "8-bit states": dict(optimizer="adam8bit", hidden=40, layers=1),
    "untied": dict(tie_embeddings=False),
    "what stays gathered": dict(keep_last_unit=True),
    "all stays gathered": dict(reshard_after_forward=False),
    "small buckets": dict(bucket_bytes=512),
    "fp32 gradients": dict(grad_dtype="fp32"),
    "no watch": dict(skip_nonfinite=True),
    "mlp": dict(model="mlp", hidden=5, vocab=256),
    "one block": dict(layers=1),
    "deepspeed": dict(recipe="deepspeed", persistent_numel=200),
    "fsdp2": dict(recipe="fsdp2"),
    "megatron": dict(recipe="megatron"),
    "what Megatron saves": dict(saves="megatron", dropout=0.1),
    "selective": dict(recompute="selective", saves="megatron", dropout=0.1),
    "full": dict(recompute="full", dropout=0.1),
    "some parts": dict(recompute="selective:core_attn,layernorm,mlp", saves="megatron", dropout=0.1),
    "every second block": dict(recompute="full:2", dropout=0.1),
    "flash": dict(attention="flash", dropout=0.1),
    "flash, full": dict(attention="flash", recompute="full", saves="megatron"),
    "llama": dict(model="llama", heads=4, kv_heads=2),
    "llama, full": dict(model="llama", heads=4, kv_heads=1, recompute="full"),
    "flat": dict(model="flat", params=1003, units=4, layers=None, hidden=None, heads=None),
    "muon": dict(optimizer="muon"),
    "muon by unit": dict(optimizer="muon", gather="unit", model="llama", tie_embeddings=False),
}


@pytest.mark.parametrize(
    "changes",
    [
        dict(stage=3, ranks=3, recompute="selective:op", dropout=0.1, saves="megatron"),
        dict(stage=1, ranks=2, tp=2, seq=6, sequence_parallel=True, recompute="selective:mlp,attn_proj"),
        dict(
            stage=0,
            ranks=2,
            pp=2,
            model="llama",
            heads=2,
            recompute="selective:op",
            attention="flash",
            precision="bf16",
        ),
    ],
    ids=str,
)
def test_parts_that_run_again_leave_the_same_record(changes: dict[str, object]) -> None:
    assert_same_record(small(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_choices_leave_the_same_record(stage: int, name: str) -> None:
    assert_same_record(small(**{"stage": stage, "ranks": 3, **OTHERS[name]}))


def test_skipped_steps_are_told() -> None:
    config = small(precision="fp16", initial_scale_power=30, hysteresis=1, steps=4, ranks=2)
    real = run(config, keep_events=True)
    assert any(step.skipped for step in real.steps)
    assert_same_record(config, real)


def test_one_rank_stands_for_all_that_cannot_differ() -> None:
    assert plan(small(stage=0, ranks=4)).ran == [0]
    assert plan(small(stage=3, ranks=4)).ran == [0]  # 4 divides every unit
    padded = plan(small(stage=3, ranks=7))
    assert padded.stands_for == sorted(padded.stands_for)
    assert len(padded.ran) > 1
    every = plan(small(stage=3, ranks=7), every_rank=True)
    assert every.ran == list(range(7))
    assert every.memory == padded.memory
    assert every.traffic == padded.traffic


@pytest.mark.quick(3)
@pytest.mark.parametrize("ranks", [3, 5, 48])
@pytest.mark.parametrize(("stage", "partition"), PARTITIONS)
def test_classes_hold_what_every_rank_shows(stage: int, partition: str, ranks: int) -> None:
    """Units smaller than N among them: ln_f has 10 elements, h.0 some hundred."""
    config = RunConfig(stage=stage, partition=partition, ranks=ranks, layers=2, hidden=5, heads=1, vocab=17, seq=3)
    config = config.replace(micro_batch=1, steps=1)
    few, all_ranks = plan(config), plan(config, every_rank=True)
    assert few.memory == all_ranks.memory
    assert few.traffic == all_ranks.traffic
    assert len(few.ran) <= 11  # of each of five sizes a part and all of a slice may be padding


@pytest.mark.slow
def test_cost_does_not_grow_with_ranks() -> None:
    """Counted in events, not in seconds: a rank leaves as many at 65,535 ranks as at 3, and few ranks are run."""

    def plan_of(ranks: int, layers: int) -> RunResult:
        config = small(stage=3, ranks=ranks, layers=layers, bucket_bytes=None, hidden=512, vocab=65536)
        return plan(config, keep_events=True)

    few, many = plan_of(3, 2), plan_of(65535, 2)  # neither divides any unit
    assert len(many.events[0]) == len(few.events[0])
    assert len(many.ran) <= 11
    two, four, six = (len(plan_of(8, layers).events[0]) for layers in (2, 4, 6))
    assert four - two == six - four


def test_a_ring_of_uneven_shares_takes_the_time_of_all_its_ranks() -> None:
    """One rank stands for three and waits for the last one's messages, and the last one for those of a rank that it
    stands for."""
    cluster = cluster_named("a100-80", None)
    config = small(cp=4, ranks=4, seq=16, hidden=6, vocab=257, attention="flash", steps=None)
    few, every = (plan(config, cluster=cluster, every_rank=every_rank).time for every_rank in (False, True))
    assert few is not None
    assert every is not None
    assert len(plan(config).ran) == 2
    assert few.seconds == every.seconds


@pytest.mark.parametrize(
    "fields",
    [
        dict(model="llama", heads=2, kv_heads=1, repeat_kv=True),
        dict(accumulate=3, offload="optimizer=host,grads=host"),
    ],
    ids=str,
)
def test_forms_of_a_context_agree_with_its_counts(fields: dict[str, object]) -> None:
    assert formulas_agree(checks(plan(small(cp=2, ranks=2, seq=8, attention="flash", steps=None, **fields))))
