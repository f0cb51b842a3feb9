"""Runs on pipelines: one stage's bits, what crosses borders, the record of shapes, and what goes wrong on one stage.

A pipeline of p stages with m microbatches is held against one stage with as many, on the other axes alike.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from poisoned import poisoned
from same import assert_close, assert_same_training
from test_schedule import run_with
from test_shapes import assert_same_record

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import NonFiniteGradient
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero3 import Zero3
from zerosim.stepper import debug
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

GPT: dict[str, Any] = dict(layers=4, hidden=16, heads=2, seq=4, vocab=256)
LLAMA: dict[str, Any] = dict(model="llama", **GPT, kv_heads=1)
FLAT: dict[str, Any] = dict(model="flat", params=1001, units=5, vocab=256, seq=8)
TRAINING: dict[str, Any] = dict(micro_batch=1, accumulate=4, steps=2, precision="fp32")
PIPELINE = ("pp", "pipeline", "virtual_stages", "micro_batch_group", "stage_layers", "balance_ends")


def sizes(of: dict[str, Any], **changes: Any) -> dict[str, Any]:
    untied = {} if of is FLAT else {"tie_embeddings": False}
    return {**of, **untied, **TRAINING, **changes}


@cache
def _trained(*fields: tuple[str, Any]) -> RunResult:
    return run(RunConfig(**dict(fields)))


def trained(fields: dict[str, Any]) -> RunResult:
    return _trained(*sorted(fields.items()))


def one_stage(fields: dict[str, Any]) -> RunResult:
    """The same run without a pipeline, on as many fewer ranks."""
    ranks = fields["ranks"] // fields["pp"]
    return trained({**{name: value for name, value in fields.items() if name not in PIPELINE}, "ranks": ranks})


# -- values ---------------------------------------------------------------------------------------------
EXACT: list[dict[str, Any]] = [
    sizes(GPT, ranks=2, pp=2, stage=0, pipeline="gpipe", precision="bf16", clip_norm=0.5),
    sizes(GPT, ranks=4, pp=4, stage=1, precision="fp64", dropout=0.1, clip_norm=0.5),
    sizes(GPT, ranks=2, pp=2, stage=0, pipeline="interleaved", precision="fp64", clip_norm=0.5),
    sizes(GPT, ranks=2, pp=2, stage=3, initial_scale_power=18, hysteresis=1, precision="fp16", steps=4),
    sizes(GPT, ranks=3, pp=3, stage=2, stage_layers="1,2,1", dropout=0.1, recompute="full"),
    sizes(GPT, ranks=2, pp=2, stage=1, stage_layers="0,4", recompute="selective", accumulate=1),
    sizes(GPT, ranks=2, pp=2, stage=1, pipeline="interleaved", stage_layers="0,1,2,1"),
    sizes(GPT, ranks=4, pp=2, stage=3, pipeline="interleaved", dropout=0.1, recipe="fsdp2", precision="bf16"),
    sizes(GPT, ranks=4, pp=2, stage=3, partition="owner", parallel=3),
    sizes(GPT, ranks=8, pp=2, stage=1, dp_replicate=2, tp=2, pipeline="gpipe", dropout=0.1),
    sizes(GPT, ranks=4, pp=2, stage=3, tp=2, sequence_parallel=True, pipeline="interleaved", precision="bf16"),
    sizes(LLAMA, ranks=2, pp=2, stage=0, precision="fp16", clip_norm=0.5),
    sizes(LLAMA, ranks=4, pp=2, stage=3, pipeline="interleaved", recompute="full", precision="bf16"),
    sizes(GPT, ranks=2, pp=2, stage=1, pipeline="interleaved", accumulate=5, micro_batch_group=3, dropout=0.1),
    sizes(GPT, ranks=2, pp=2, stage=1, pipeline="interleaved", virtual_stages=3, balance_ends=True, dropout=0.1),
    sizes(GPT, ranks=4, pp=2, stage=3, pipeline="interleaved", virtual_stages=3, stage_layers="0,2,0,0,2,0"),
    sizes(LLAMA, ranks=2, pp=2, stage=2, pipeline="zb-v", stage_layers="2,2,0,0", recompute="full"),
    sizes(FLAT, ranks=2, pp=2, stage=1, units=4, pipeline="interleaved", virtual_stages=3, stage_layers="1,1,0,0,1,1"),
    sizes(FLAT, ranks=5, pp=5, stage=0),
    sizes(FLAT, ranks=4, pp=2, stage=2, partition="owner", units=8, pipeline="interleaved", virtual_stages=4),
    sizes(GPT, ranks=4, pp=4, stage=1, pipeline="zb-h1", dropout=0.1, precision="bf16", clip_norm=0.5),
    sizes(
        GPT, ranks=2, pp=2, stage=3, pipeline="zb-h1", initial_scale_power=18, hysteresis=1, precision="fp16", steps=4
    ),
    sizes(GPT, ranks=4, pp=2, stage=3, pipeline="zb-h1", gather="module", recompute="full", recipe="deepspeed"),
    sizes(GPT, ranks=4, pp=2, stage=3, pipeline="zb-v", recipe="fsdp2", precision="bf16", prefetch=1),
    sizes(GPT, ranks=8, pp=2, tp=2, stage=3, pipeline="zb-v", sequence_parallel=True, recompute="selective"),
    sizes(LLAMA, ranks=4, pp=2, tp=2, stage=2, pipeline="zb-h1", loss="chunked"),
    sizes(FLAT, ranks=4, pp=2, stage=2, partition="owner", pipeline="zb-v", stage_layers="1,1,2,1"),
]
MORE_EXACT: list[dict[str, Any]] = [
    sizes(GPT, ranks=4, pp=4, stage=0, layers=6, balance_ends=True, optimizer="sgd", momentum=0.9, lr=0.1),
    sizes(GPT, ranks=4, pp=2, stage=2, pipeline="gpipe", collective="ring", bucket_bytes=512),
    sizes(GPT, ranks=8, pp=2, stage=2, dp_replicate=2, replica_reduction="micro_batch"),
    sizes(LLAMA, ranks=4, pp=2, tp=2, stage=1, pipeline="gpipe", precision="fp64"),
    sizes(FLAT, ranks=6, pp=3, stage=3, stage_layers="1,1,3", pipeline="gpipe", precision="bf16"),
    sizes(GPT, ranks=2, pp=2, stage=1, pipeline="zb-h1", optimizer="muon", overlap="reduce"),
    sizes(GPT, ranks=4, pp=2, stage=2, pipeline="zb-v", optimizer="sophia", recompute="full"),
    sizes(LLAMA, ranks=8, pp=2, dp_replicate=2, stage=3, pipeline="zb-v", overlap="all", precision="bf16"),
]


def named(fields: dict[str, Any]) -> str:
    return str({name: value for name, value in fields.items() if {**GPT, **TRAINING}.get(name) != value})


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(
    "fields", [*EXACT, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_EXACT)], ids=named
)
def test_a_pipeline_of_untied_units_has_the_bits_of_one_stage(fields: dict[str, Any]) -> None:
    result, expected = trained(fields), one_stage(fields)
    assert_same_training(result, expected)
    if fields["precision"] == "fp16" and "initial_scale_power" in fields:
        assert {step.skipped for step in result.steps} == {True, False}
    if "clip_norm" in fields:
        assert any(step.grad_norm > fields["clip_norm"] for step in result.steps)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("accumulate", [2, 1])
def test_stages_of_one_mesh_are_equal_in_pairs(accumulate: int) -> None:
    """With accumulation 0 = 1 and 2 = 3, as without a pipeline; with one microbatch all four. The table is tied."""
    fields = {**GPT, **TRAINING, "ranks": 4, "pp": 2, "clip_norm": 0.5, "accumulate": accumulate}
    ddp, *others = [trained({**fields, "stage": stage}) for stage in range(4)]
    assert_same_training(others[0], ddp)
    assert_same_training(others[2], others[1])
    if accumulate == 1:
        assert_same_training(others[1], ddp)


TIED: list[dict[str, Any]] = [
    dict(ranks=2, pp=2, stage=0),
    dict(ranks=4, pp=4, stage=1, pipeline="gpipe", clip_norm=0.5),
    dict(ranks=4, pp=2, stage=3, pipeline="interleaved", recompute="full"),
    dict(ranks=6, pp=3, stage=2, stage_layers="1,2,1"),
    dict(ranks=4, pp=2, tp=2, stage=1, sequence_parallel=True),
    dict(ranks=8, pp=2, dp_replicate=2, stage=3, replica_reduction="micro_batch"),
    dict(ranks=2, pp=2, stage=1, pipeline="zb-h1"),
    dict(ranks=4, pp=2, stage=3, pipeline="zb-v"),
    dict(ranks=4, pp=2, stage=0, pipeline="zb-v", persistent_grads=True),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", TIED, ids=str)
def test_tied_tables_add_up_across_stages(fields: dict[str, Any], kind: str) -> None:
    """Both ends add their microbatches before they add each other's sums: rounding apart."""
    of = GPT if kind == "gpt" else LLAMA
    whole = {**of, **TRAINING, "precision": "fp64", **fields, "tie_embeddings": True}
    result = trained(whole)
    assert_close(result, one_stage(whole), 1e-11)


def test_a_stepped_pipeline_leaves_what_the_run_leaves() -> None:
    config = RunConfig(**sizes(GPT, ranks=4, pp=2, stage=3, layers=2, accumulate=2))
    with debug(config) as world:
        assert [view.place for view in world.ranks][:3] == ["pp 0, dp_shard 0", "pp 0, dp_shard 1", "pp 1, dp_shard 0"]
        world.next(count=40)
        assert_same_training(world.finish(), run(config))


# -- traffic --------------------------------------------------------------------------------------------
def sent(result: RunResult, rank: int, purpose: str) -> int:
    """Bytes along pp in the last step."""
    last = len(result.steps) - 1
    rows = [row for row in result.traffic[rank] if (row.step, row.axis, row.purpose) == (last, "pp", purpose)]
    return sum(row.wire_bytes for row in rows)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "fields",
    [
        sizes(GPT, ranks=2, pp=2, stage=0),
        sizes(GPT, ranks=4, pp=4, stage=1, pipeline="gpipe", precision="bf16", micro_batch=2),
        sizes(GPT, ranks=4, pp=2, stage=3, pipeline="interleaved", accumulate=6),
        sizes(GPT, ranks=2, pp=2, stage=2, pipeline="interleaved", accumulate=7),
        sizes(GPT, ranks=4, pp=2, stage=3, pipeline="interleaved", virtual_stages=3, stage_layers="0,2,0,0,2,0"),
        sizes(GPT, ranks=4, pp=2, stage=1, pipeline="zb-v", stage_layers="2,2,0,0", recipe="megatron"),
        sizes(LLAMA, ranks=4, pp=4, stage=1, layers=8, pipeline="interleaved", recompute="full"),
        sizes(GPT, ranks=2, pp=2, stage=1, layers=6, pipeline="interleaved", virtual_stages=3),
        sizes(GPT, ranks=8, pp=2, tp=2, stage=1),
        sizes(GPT, ranks=8, pp=2, tp=4, heads=4, stage=1, sequence_parallel=True),
        sizes(GPT, ranks=8, pp=2, tp=2, sequence_parallel=True, stage=2, pipeline="interleaved", precision="bf16"),
        sizes(GPT, ranks=4, pp=4, stage=1, pipeline="zb-h1"),
        sizes(GPT, ranks=4, pp=2, stage=3, pipeline="zb-v", accumulate=5),
        sizes(GPT, ranks=3, pp=3, stage=0, layers=6, pipeline="zb-v", accumulate=6),
    ],
    ids=named,
)
def test_each_micro_batch_crosses_each_border_once_in_each_direction(fields: dict[str, Any]) -> None:
    result, config = plan(RunConfig(**fields)), RunConfig(**fields)
    p, v, m = config.mesh.pp, config.parallel.num_chunks, config.data.accumulate
    t = config.mesh.tp if config.parallel.sequence_parallel else 1
    item = 2 if fields["precision"] == "bf16" else 4
    border = config.data.micro_batch * config.model.seq * config.model.hidden * item // t
    for rank in range(config.mesh.ranks):
        stage = config.mesh.axes.index(rank, "pp")
        forward, backward = v - (stage == p - 1), v - (stage == 0)
        if config.chunks.turns_back:  # both ends of the model are on stage 0, and stage p - 1 hands on to itself
            forward = backward = v - (stage in (0, p - 1))
        assert sent(result, rank, "activations") == m * border * (forward + backward)
        assert sent(result, rank, "states") == 0
    pipelines = config.mesh.ranks // p
    assert sum(sent(result, rank, "activations") for rank in range(config.mesh.ranks)) == (
        2 * m * border * (p * v - 1 - config.chunks.turns_back) * pipelines
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_table_is_added_up_once_a_step_by_both_ends(stage: int) -> None:
    result = plan(RunConfig(**{**sizes(GPT, ranks=6, pp=3, stage=stage, stage_layers="1,2,1"), "tie_embeddings": True}))
    held = 256 * 16 * 4 // (2 if stage else 1)
    assert [sent(result, rank, "states") for rank in range(6)] == [held, held, 0, 0, held, held]


# -- shapes ---------------------------------------------------------------------------------------------
SHAPES: list[dict[str, Any]] = [
    dict(ranks=4, pp=2, stage=0, pipeline="gpipe", dropout=0.1, clip_norm=0.5),
    dict(ranks=3, pp=3, stage=1, stage_layers="1,2,1", precision="fp16", initial_scale_power=24, hysteresis=1),
    dict(ranks=6, pp=2, stage=3, pipeline="interleaved", hidden=10, precision="bf16"),
    dict(ranks=8, pp=2, tp=2, dp_replicate=2, stage=1, recompute="full"),
    dict(ranks=12, pp=2, tp=2, stage=2, collective="ring", hidden=12, accumulate=2),
    dict(ranks=8, pp=4, tp=2, stage=3, sequence_parallel=True, saves="megatron", dropout=0.1),
    dict(ranks=12, pp=4, stage=2, partition="owner", tie_embeddings=False, hidden=10),
    dict(ranks=8, pp=4, stage=3, pipeline="zb-h1", precision="bf16", clip_norm=0.5),
    dict(ranks=8, pp=2, tp=2, stage=3, pipeline="zb-v", sequence_parallel=True, recompute="full"),
    dict(ranks=2, pp=2, stage=3, pipeline="zb-h1", lora_rank=2, precision="bf16"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_shapes_leave_the_record_of_a_pipeline(fields: dict[str, Any]) -> None:
    assert_same_record(RunConfig(**{**GPT, **TRAINING, "steps": 1, "seq": 4, **fields}))


def test_one_rank_of_each_stage_is_enough_where_slices_are_even() -> None:
    assert plan(RunConfig(**sizes(GPT, ranks=16, pp=4, dp_replicate=2, stage=3))).ran == [0, 4, 8, 12]


# -- what goes wrong ------------------------------------------------------------------------------------


SICK: dict[str, Any] = {**GPT, **TRAINING, "ranks": 4, "pp": 2}


@pytest.mark.parametrize(("stage", "kind"), [(1, Zero1), (3, Zero3)])
def test_a_bad_gradient_is_blamed_on_its_rank_and_unit(stage: int, kind: type[Strategy]) -> None:
    with pytest.raises(NonFiniteGradient, match=r"rank 3's gradient of h\.2 is not finite at step 1:") as raised:
        run_with(poisoned(kind, 3, "h.2", slot=1), **SICK, stage=stage)
    assert raised.value.rank == 3


def test_an_overflow_on_one_stage_skips_the_step_on_all() -> None:
    fields: dict[str, Any] = {**SICK, "stage": 3, "precision": "fp16"}
    before, after = (
        run_with(None, **{**fields, "steps": 1}),
        run_with(poisoned(Zero3, 3, "h.2", np.inf, slot=1), **fields),
    )
    assert [step.skipped for step in after.steps] == [False, True]
    for name, values in before.weights.items():
        np.testing.assert_array_equal(after.weights[name], values, err_msg=name)


# -- the command line -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_weights_are_the_whole_models_on_any_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = "run --layers 4 --hidden 16 --heads 2 --seq 8 --micro-batch 1 --accumulate 4 --steps 2 --precision fp64"
    common += " --no-tie-embeddings --stage 1 --sample ab --sample-tokens 4"

    def sample(words: str) -> str:
        assert main(f"{common} {words}".split()) == 0
        out = capsys.readouterr().out
        assert "step 1 of 2" in out  # progress waits for no rank without losses
        lines = out.splitlines()
        return lines[lines.index("Sample") + 1]

    assert sample("--ranks 2 --pp 2 --save-weights two.npz") == sample("--ranks 1 --save-weights one.npz")
    interleaved = sample("--ranks 2 --pp 2 --pipeline interleaved --weights one.npz --save-weights four.npz")
    assert sample("--ranks 1 --weights two.npz --save-weights three.npz") == interleaved
    for left, right in (("one", "two"), ("three", "four")):
        with np.load(f"{left}.npz") as ours, np.load(f"{right}.npz") as theirs:
            assert ours.files == theirs.files
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours.files)
