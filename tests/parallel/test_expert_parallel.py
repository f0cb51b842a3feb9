"""Ranks that share experts train what one rank trains, and a plan leaves the record of a run.

A mesh is compared with one rank on the same global batch, in float64 and under SGD: sums are added in another order.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
from crosses import CLUSTER, check, check_classes
from same import assert_close, assert_same_training, no_garbage_collector, on_one_rank

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

LLAMA: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, seq=16, micro_batch=2, steps=2, lr=0.2,
    experts=8, top_k=2, expert_ffn=12,
)  # fmt: skip
SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
FOUR: dict[str, Any] = dict(ranks=4, ep=2, stage=3)
PIPE: dict[str, Any] = dict(ranks=4, pp=2, ep=2, stage=1, accumulate=3)
GATHER = dict(dispatcher="allgather")
ROWS: dict[str, Any] = dict(lora_rank=2, lora_target="experts,q", lora_alpha=6.0, lora_by_rows=True)


def fields(of: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    return {**LLAMA, "precision": "fp64", "optimizer": "sgd", **of, **on}


def alone(of: dict[str, Any], on: dict[str, Any]) -> RunResult:
    return on_one_rank(fields(of, {}), RunConfig(**fields(of, on)))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 0": ({}, dict(FOUR, stage=0)),
    "stage 1": (dict(clip_norm=0.05), dict(FOUR, stage=1)),
    "stage 2": ({}, dict(FOUR, stage=2, accumulate=2)),
    "stage 3": (dict(clip_norm=0.05), FOUR),
    "stage 0, clip": (dict(clip_norm=0.05), dict(FOUR, stage=0)),
    "an expert a rank": (dict(experts=4), dict(ranks=4, ep=4, stage=3)),
    "gathered": ({}, dict(FOUR, **GATHER)),
    "gathered, all ranks": ({}, dict(ranks=4, ep=4, stage=2, **GATHER)),
    "gpt": (dict(model="gpt", kv_heads=4, dropout=0.1), FOUR),
    "shared experts": (dict(model="qwen2_moe", shared_experts=2, experts=4), FOUR),
    "shared experts beside": (dict(shared_experts=2), dict(FOUR, shared_expert_overlap=True, accumulate=2)),
    "gated ones beside": (dict(model="qwen2_moe", shared_experts=2), dict(FOUR, shared_expert_overlap=True)),
    "groups of experts": (dict(model="glm4_moe"), FOUR),
    # what else is cut
    "over tp": ({}, dict(ranks=4, ep=2, etp=1, stage=1, **SP)),
    "etp": ({}, dict(ranks=8, ep=2, stage=3, **SP)),
    "etp alone": ({}, dict(ranks=4, ep=1, etp=2, stage=3)),
    "etp, gathered": ({}, dict(ranks=8, ep=2, stage=3, **SP, **GATHER)),
    "no etp": ({}, dict(ranks=4, ep=1, etp=1, stage=3, **SP)),
    "tp, shared experts": (dict(model="qwen2_moe", shared_experts=2), dict(ranks=8, ep=4, etp=1, stage=3, **SP)),
    "over cp": ({}, dict(ranks=4, cp=2, ep=4, stage=3)),
    "over all": ({}, dict(ranks=8, cp=2, ep=8, etp=1, stage=2, **SP)),
    "pipeline": ({}, PIPE),
    "zb-h1": ({}, dict(PIPE, pipeline="zb-h1", stage=3)),
    "replicas": ({}, dict(ranks=8, dp_replicate=2, ep=2, stage=3)),
    "owner": ({}, dict(FOUR, partition="owner")),
    # memory
    "full": ({}, dict(FOUR, recompute="full")),
    "full, but for the router": ({}, dict(FOUR, recompute="full", keep_router=True, accumulate=2)),
    "parts": ({}, dict(FOUR, recompute="selective:mlp_act,layernorm")),
    "by module": ({}, dict(FOUR, gather="module")),
    "activations on the host": ({}, dict(FOUR, offload_activations=True)),
    "buckets": ({}, dict(FOUR, stage=1, bucket_bytes=512)),
    "lora": (dict(lora_rank=2), FOUR),
    "lora of experts": (dict(lora_rank=2, lora_target="experts"), FOUR),
    "lora of experts, by rows": (dict(ROWS, clip_norm=0.05), dict(FOUR, recompute="full")),
    "lora of experts, by rows of tensors": (ROWS, dict(FOUR, recipe="fsdp2")),
    "weighed in fp32": (dict(weigh_dtype="fp32"), dict(FOUR, recompute="full", **GATHER)),
    "fsdp2": ({}, dict(FOUR, recipe="fsdp2")),
    "deepspeed": (dict(clip_norm=1.0), dict(FOUR, recipe="deepspeed")),
    "megatron": ({}, dict(ranks=8, ep=2, stage=1, recipe="megatron", **SP)),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_experts_train_what_one_rank_trains(way: str) -> None:
    of, on = WAYS[way]
    assert_close(run(RunConfig(**fields(of, on))), alone(of, on), 1e-14)


@pytest.mark.quick(6)
@pytest.mark.parametrize(("way", "routing"), [(way, ("even", "zipf:1")[at % 2]) for at, way in enumerate(WAYS)])
def test_shapes_leave_the_record_of_a_run(way: str, routing: str) -> None:
    """Event by event, where tokens spread as they are assumed to: in turn evenly, and not."""
    of, on = WAYS[way]
    config = RunConfig(**{**LLAMA, **of, **on, "routing": routing})
    with no_garbage_collector():
        check(config, plan(config, cluster=CLUSTER))


ON_HOST = dict(FOUR, offload="optimizer=host,params=host")
KEPT = dict(FOUR, upcast_grads=True, keep_upcast=True)
ADAMS = ("adamw", "muon", "adam8bit", "lion", "sophia", "adagrad")


@pytest.mark.quick(2)
@pytest.mark.parametrize("on", [*(dict(FOUR, optimizer=name) for name in ADAMS), ON_HOST, KEPT], ids=str)
def test_every_optimizer_has_experts(on: dict[str, Any]) -> None:
    config = RunConfig(**{**LLAMA, **on, "precision": "bf16", "routing": "zipf:1"})
    check(config, plan(config, cluster=CLUSTER))


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("on", [dict(ranks=4, ep=2), dict(ranks=4, ep=2, etp=1, **SP)], ids=str)
def test_stages_partitions_and_recompute_change_no_bit(on: dict[str, Any]) -> None:
    of = dict(precision="bf16", optimizer="adam", lr=1e-3, clip_norm=0.5, layers=1)
    ways = [(0, "slices"), *[(stage, how) for stage in (1, 2, 3) for how in ("slices", "owner")]]
    first, *others = [run(RunConfig(**{**LLAMA, **of, **on, "stage": s, "partition": how})) for s, how in ways]
    others += [run(RunConfig(**{**LLAMA, **of, **on, "stage": 3, "recompute": how})) for how in ("full", "selective")]
    assert any(step.grad_norm > 0.5 for step in first.steps)
    for other in others:
        assert_same_training(other, first)


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("of", [ROWS, dict(lora_rank=2, weigh_dtype="fp32")], ids=str)
def test_adapters_have_equal_bits_at_every_stage(of: dict[str, Any]) -> None:
    """Also where shards of the frozen base are fp32, and cast at each gather."""
    base = {**LLAMA, "precision": "bf16", "ranks": 4, "ep": 2, **of}
    first, *others = [run(RunConfig(**{**base, "stage": stage})) for stage in range(4)]
    others.append(run(RunConfig(**{**base, "stage": 3, "cast_shards": True, "frozen_fp32": True})))
    assert first.losses[1] != first.losses[0]
    for other in others:
        assert_same_training(other, first)


@pytest.mark.quick(1)
@pytest.mark.parametrize("of", [dict(bias_rate=0.1), dict(z_loss=0.01), dict(capacity_factor=1.0)], ids=str)
def test_routers_do_what_they_do_on_data_ranks(of: dict[str, Any]) -> None:
    """Biases follow the counts of all ranks, losses weigh alike, a rank's capacity is that of its own tokens."""
    for on in (FOUR, dict(ranks=4, ep=4, stage=1), dict(ranks=4, cp=2, ep=4, stage=2)):
        base = {**LLAMA, "precision": "fp64", "optimizer": "sgd", "steps": 3, **of}
        many = run(RunConfig(**{**base, **on}))
        assert_close(many, run(RunConfig(**{**base, **on, "ep": 1})), 1e-14)


def test_a_rank_holds_its_experts_over_edp_and_all_else_over_all() -> None:
    """Two of four experts, whose states two ranks divide; the bytes of the other weights are those of ZeRO-3 on 4."""
    on = dict(ranks=4, ep=2, stage=3, precision="bf16", experts=4)
    result = plan(RunConfig(**{**LLAMA, **on}))
    experts = LLAMA["layers"] * 2 * 3 * LLAMA["hidden"] * LLAMA["expert_ffn"]  # gate, up and down of two
    dense = result.num_parameters - 2 * experts
    assert result.memory[0].marks["after_init"].by_kind["param"] == 2 * (experts // 2) + 2 * (dense // 4)


def drawn(rng: random.Random) -> dict[str, Any]:
    """Draw a mesh with experts, whether it stands together or not."""
    tp, cp, pp, copies, shards = (
        rng.choice(sizes) for sizes in ([1, 1, 2], [1, 1, 2], [1, 1, 2], [1, 1, 2], [1, 2, 4])
    )
    inner = shards * cp * tp
    on = dict(ranks=inner * pp * copies, tp=tp, cp=cp, pp=pp, dp_replicate=copies, stage=rng.randrange(4))
    on["ep"] = rng.choice([size for size in (1, 2, 4, 8) if inner % size == 0])
    on["etp"] = rng.choice([size for size in (1, 2, tp) if inner % (size * on["ep"]) == 0] or [1])
    on |= dict(experts=rng.choice([8, 16]), top_k=rng.choice([1, 2, 3]), routing=rng.choice(["even", "zipf:1"]))
    on |= dict(sequence_parallel=tp > 1, accumulate=rng.choice([2, 3]) if pp > 1 else rng.choice([1, 1, 2]))
    on["model"] = rng.choice(["llama", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "olmoe"])
    more: list[dict[str, Any]] = [
        GATHER, dict(gather="module"), dict(recompute="full"), dict(recompute="selective:mlp_act"), dict(lora_rank=2),
        dict(partition="owner"), dict(clip_norm=0.05), dict(loss="chunked"), dict(router_dtype="fp32"),
        dict(recipe="fsdp2"), dict(recipe="megatron"), dict(pipeline="zb-h1"), dict(bucket_bytes=512),
        dict(offload_activations=True), dict(collective="ring"), dict(capacity_factor=1.0), dict(z_loss=0.01),
        dict(recompute="full", keep_router=True), dict(shared_experts=2, shared_expert_overlap=True),
    ]  # fmt: skip
    for one in rng.sample(more, 3):
        on |= one
    return on


def found(case: int) -> RunConfig:
    """The first drawn mesh of a case that stands together."""
    rng = random.Random(f"experts {case}")
    while True:
        try:
            config = RunConfig(**{**LLAMA, **drawn(rng)})
            plan(config)
        except InputError:
            continue
        return config


def check_drawn(case: int) -> None:
    config = found(case)
    try:
        check(config, plan(config, cluster=CLUSTER))
        of = {**config.given, "precision": "fp64", "optimizer": "sgd", "recipe": "paper", "routing": None}
        if not {"capacity_factor", "router_dtype"} & {*of}:
            many = RunConfig(**of)
            count = many.global_batch // many.data.micro_batch
            kept = (
                "model",
                "experts",
                "top_k",
                "expert_ffn",
                "shared_experts",
                "lora_rank",
                "clip_norm",
                "z_loss",
                *LLAMA,
            )
            one = {name: of[name] for name in kept if name in of} | dict(ranks=1, stage=0, accumulate=count)
            assert_close(run(many), run(RunConfig(**one, precision="fp64", optimizer="sgd")), 1e-13)
    except Exception as error:
        error.add_note(repr(config))
        raise


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", range(30))
def test_random_meshes(case: int) -> None:
    """`PYTHONPATH=tests python tests/parallel/test_expert_parallel.py COUNT [FIRST]` checks as many as one likes."""
    check_drawn(case)


if __name__ == "__main__":
    count, first = [*map(int, sys.argv[1:]), 0][:2]
    for number in range(first, first + count):
        try:
            check_drawn(number)
        except Exception as error:
            print(number, type(error).__name__, str(error)[:200], *error.__notes__, flush=True)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": (dict(experts=None, top_k=None, expert_ffn=None, ep=2), "ep 2: model llama has no experts; pass"),
    "ranks": (dict(ranks=4, ep=3), "ep 3 does not divide dp_shard, 4: choose ep 2 or 4"),
    "experts": (dict(ranks=4, experts=6, ep=4), "ep 4 does not divide experts 6: choose ep 3"),
    "etp": (dict(ranks=8, ep=1, etp=8), "etp 8 does not divide expert_ffn 12: choose etp 6"),
    "tp": (dict(ranks=4, tp=2, ep=2), "ep 2: with tp, tokens are dealt to experts by rank; pass --sequence-parallel"),
    "hpZ": (dict(ranks=8, ep=2, stage=3, secondary_shard=2), "leave secondary_shard out"),
    "codes": (dict(ranks=4, ep=2, stage=2, compress="int8"), "leave compress out"),
    "dispatcher": (GATHER, "dispatcher 'allgather': all experts are on every rank; pass --ep 2, for one"),
    "routing": (dict(routing="zipf:x"), "expected even, zipf:S with a number S of 0 to 10, fullest:F"),
    "fuller than full": (dict(routing="fullest:4.5"), "4 times the mean; choose 4 or less"),
    "a file": (dict(routing="measured:nowhere.json"), "cannot read nowhere.json: No such file or directory"),
    "no room": (dict(capacity_factor=0.1), "0.1: no room for one token; an even choice gives an expert 8; choose 0.13"),
    "adapters": (dict(lora_rank=2, lora_target="experts", etp=2), "adapters of experts are whole; choose etp 1"),
    "weighed": (dict(recipe="megatron", weigh_dtype="fp32"), "weights do not multiply experts' results here; leave it"),
    "rows": (dict(lora_rank=2, lora_by_rows=True), "lora_by_rows: no expert has an adapter; choose --lora-target exp"),
    "none shared": (
        dict(ranks=4, ep=2, shared_expert_overlap=True),
        "overlap: llama has no shared experts; pass --shared",
    ),
    "beside nothing": (dict(shared_experts=2, shared_expert_overlap=True), "experts are on every rank; pass --ep 2"),
    "beside gathers": (
        dict(ranks=4, ep=2, shared_experts=2, shared_expert_overlap=True, **GATHER),
        "allgather runs nothing beside",
    ),
    "drops": (dict(ranks=4, ep=2, capacity_factor=1.0, **GATHER), "tokens are dropped before they are sent"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_go_with_experts_is_one_line(bad: str) -> None:
    changes, words = BAD[bad]
    values = {name: value for name, value in {**LLAMA, "ranks": 2, **changes}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        RunConfig(**values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_measured_shares_are_those_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "shares.json"
    path.write_text(json.dumps([[1, 0, 0, 3, 0, 0, 0, 4], [1] * 8]), "utf-8")
    config = RunConfig(**{**LLAMA, **FOUR, "routing": f"measured:{path}"})
    spreads = [config.experts.spread_of(8, number) for number in range(2)]
    assert [one.counts(8, 1, 8) for one in spreads if one is not None] == [(1, 0, 0, 3, 0, 0, 0, 4), (1,) * 8]
    assert sum(np.array(spreads[0].counts(8, 2, 8))) == 16 if spreads[0] is not None else False
    check(config, plan(config, cluster=CLUSTER))


FILES = {
    "not JSON": "[1, 2",
    "too few": "[1, 2]",
    "none at all": "[]",
    "zeros": "[0, 0, 0, 0, 0, 0, 0, 0]",
    "less than nothing": "[1, 1, 1, 1, 1, 1, 1, -1]",
    "no number": "[1, 1, 1, 1, 1, 1, 1, NaN]",
    "a sum without end": f"[{', '.join(['1e308'] * 8)}]",
    "a long number": f"[1, 1, 1, 1, 1, 1, 1, 1{400 * '0'}]",
    "blocks that differ": "[[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1]]",
    "a block and a number": "[[1, 1, 1, 1, 1, 1, 1, 1], 3]",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_files_of_shares_are_refused_in_one_line(text: str, tmp_path: Any) -> None:
    path = tmp_path / "shares.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        RunConfig(**{**LLAMA, "ranks": 2, "routing": f"measured:{path}"})
    assert "\n" not in str(caught.value)


def test_a_file_of_shares_that_changed_is_read_again(tmp_path: Any) -> None:
    path = tmp_path / "shares.json"
    for shares in ((1.0,) * 8, (2.0,) * 8):
        path.write_text(json.dumps(shares), encoding="utf-8")
        spread = RunConfig(**{**LLAMA, "routing": f"measured:{path}"}).experts.spread_of(8, 0)
        assert spread is not None
        assert spread.shares == shares


ALIKE: dict[str, dict[str, Any]] = {
    "full experts": dict(ranks=8, ep=8, stage=1, routing="zipf:1", capacity_factor=0.5),
    "a router beside a norm": dict(ranks=16, cp=2, ep=2, etp=1, stage=1, layers=1, **SP),
}


@pytest.mark.parametrize("on", ALIKE.values(), ids=ALIKE)
def test_ranks_with_equal_records_share_a_class(on: dict[str, Any]) -> None:
    """Under a capacity popular experts have as many rows as each other; one all-reduce adds up the gradients that tp's
    ranks share, of however many weights."""
    every = plan(RunConfig(**{**LLAMA, **on}), every_rank=True, keep_events=True)
    few = plan(RunConfig(**{**LLAMA, **on}))
    check_classes(every, few.stands_for)
    assert len({*few.stands_for}) < on["ranks"] // 2
