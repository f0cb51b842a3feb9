"""Counts beside closed forms on meshes: model states and traffic of every pipeline stage, to the byte."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import bubble, live_micro_batches, live_weights
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import alike_stages, extra_of, itemsizes, shares_of
from zerosim.config import RunConfig
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.parallel.schedule import live
from zerosim.placement.stages import smallest_group
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "vocab": 256, "micro_batch": 2, "steps": 1}
GPT = {**SIZES, "model": "gpt"}
LLAMA = {**SIZES, "model": "llama", "kv_heads": 2}
FLAT: dict[str, Any] = {"model": "flat", "params": 1001, "units": 4, "micro_batch": 2, "steps": 1}

MESHES: list[dict[str, Any]] = [
    {**GPT, "ranks": 4, "tp": 2, "stage": 0},
    {**GPT, "ranks": 4, "tp": 4, "stage": 1, "recompute": "full"},
    {**GPT, "ranks": 8, "tp": 2, "stage": 3, "dp_replicate": 2, "recompute": "selective", "accumulate": 2},
    {**GPT, "ranks": 4, "tp": 2, "stage": 2, "sequence_parallel": True, "accumulate": 2},
    {**GPT, "ranks": 4, "tp": 4, "stage": 0, "sequence_parallel": True, "keep_gathered": True, "recompute": "full"},
    {**GPT, "ranks": 4, "pp": 2, "stage": 0, "accumulate": 4},
    {**GPT, "ranks": 4, "pp": 2, "stage": 1, "accumulate": 4, "pipeline": "interleaved"},
    {**GPT, "ranks": 4, "pp": 4, "stage": 1, "accumulate": 2, "pipeline": "gpipe"},
    {**GPT, "ranks": 6, "pp": 2, "stage": 3, "accumulate": 3, "keep_last_unit": True, "tie_embeddings": False},
    {**GPT, "ranks": 8, "tp": 2, "pp": 2, "stage": 1, "accumulate": 4},
    {**GPT, "ranks": 8, "tp": 2, "pp": 2, "stage": 2, "accumulate": 2, "sequence_parallel": True, "vocab": 254},
    {**GPT, "ranks": 8, "tp": 2, "pp": 4, "stage": 0, "accumulate": 4, "sequence_parallel": True, "pad_vocab": True},
    {**LLAMA, "ranks": 8, "tp": 4, "stage": 1, "sequence_parallel": True},
    {**LLAMA, "ranks": 8, "tp": 4, "pp": 2, "stage": 3, "accumulate": 2, "recompute": "full"},
    {**LLAMA, "ranks": 12, "tp": 2, "pp": 2, "stage": 1, "accumulate": 2, "stage_layers": "3,1"},
    {**LLAMA, "ranks": 8, "pp": 2, "stage": 3, "dp_replicate": 2, "accumulate": 4, "pipeline": "interleaved"},
    {**LLAMA, "ranks": 8, "pp": 4, "stage": 3, "accumulate": 4, "recipe": "fsdp2"},
    {**LLAMA, "ranks": 4, "pp": 2, "stage": 2, "accumulate": 2, "partition": "owner"},
    {**LLAMA, "ranks": 8, "tp": 2, "pp": 2, "stage": 3, "accumulate": 2, "reshard_after_forward": False},
    {**FLAT, "ranks": 8, "tp": 2, "pp": 2, "stage": 1, "accumulate": 2},
    {**GPT, "ranks": 4, "tp": 2, "stage": 1, "sequence_parallel": True, "recompute": "selective:mlp,layernorm"},
    {**GPT, "ranks": 4, "tp": 4, "stage": 0, "recompute": "selective:mlp,attn_proj"},
    {**LLAMA, "ranks": 8, "tp": 4, "stage": 3, "sequence_parallel": True, "accumulate": 2, "recompute": "selective:op"},
    {**GPT, "ranks": 8, "tp": 2, "pp": 2, "stage": 1, "accumulate": 2, "stage_layers": "3,1", "recompute": "full:3"},
]


def assert_agrees(result: RunResult) -> None:
    mesh, whole = result.layout.mesh, 0
    for share in shares_of(result):
        for state in checks(result)[share.stage].states:
            assert state.agrees, (share.stage, state)
        for sent in [*checks(result, 0)[share.stage].sent, *checks(result, 0)[share.stage].exchanged]:
            assert sent.agrees, (share.stage, sent.name, sent.axis, sent.mean, sent.formula, sent.with_padding)
        extra = extra_of(result, share.stage)
        whole += mesh.tp * share.num_parameters - (mesh.tp - 1) * extra.replicated - extra.padding
        if extra.copied:
            copies = mesh.tp // result.config.model.kv_heads
            whole -= mesh.tp * extra.copied * (copies - 1) // copies
        if share.ends and share.stage:
            whole -= mesh.tp * sum(share.numels[name] for name in share.ends) - extra.padding
    assert whole == result.num_parameters


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plans_agree(mesh: dict[str, Any]) -> None:
    assert_agrees(plan(RunConfig(**mesh)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("mesh", MESHES[3::4], ids=str)
def test_runs_agree(mesh: dict[str, Any]) -> None:
    assert_agrees(run(RunConfig(**mesh)))


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[5], MESHES[9]], ids=str)
def test_pairs_agree(mesh: dict[str, Any]) -> None:
    """Every all-reduce, of gradients, replicas, shares, sums and activations, sends N-1 times its payload."""
    assert_agrees(plan(RunConfig(**{**mesh, "collective": "pairs"})))


CUTS: list[tuple[Any, ...]] = [
    *product(("1f1b", "gpipe"), ("0,2", "2,0", "1,1"), (1, 2, 4), (True, False), ("unit", "module")),
    *product(("interleaved",), ("0,1,2,1", "2,1,1,0"), (2, 4), (True, False), ("unit", "module")),
]
FEW = [("1f1b", "0,2", 4, True, "module"), ("gpipe", "0,2", 3, False, "module"), ("1f1b", "2,0", 4, True, "unit")]


@pytest.mark.parametrize("cuts", [FEW, pytest.param(CUTS, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_unit_that_is_used_next_again_is_not_gathered_again(model: str, cuts: list[tuple[Any, ...]]) -> None:
    """Also where a pipeline stage has a table or a head alone: its forwards use one unit over and over."""
    shape: dict[str, Any] = {**SIZES, "hidden": 8, "vocab": 32, "ranks": 4, "pp": 2, "stage": 3, "keep_last_unit": True}
    for pipeline, cut, accumulate, tied, gather in cuts:
        more = {"layers": sum(map(int, cut.split(","))), "stage_layers": cut, "tie_embeddings": tied, "gather": gather}
        result = plan(RunConfig(**{**shape, **more, "model": model, "pipeline": pipeline, "accumulate": accumulate}))
        assert_gathers_are_those_of_the_text(result)


@pytest.mark.parametrize("gather", ["unit", "module"])
def test_a_flat_models_unit_that_is_used_next_again_is_not_gathered_again(gather: str) -> None:
    sizes: dict[str, Any] = {**FLAT, "params": 1000, "ranks": 4, "pp": 2, "stage": 3, "keep_last_unit": True}
    result = plan(RunConfig(**{**sizes, "pipeline": "interleaved", "accumulate": 8, "gather": gather}))
    assert_gathers_are_those_of_the_text(result)


def assert_gathers_are_those_of_the_text(result: RunResult) -> None:
    """Two gathers of everything in each microbatch less U, which is what was counted less."""
    times, ranks = 2 * result.config.data.accumulate, result.config.mesh.shards
    for share in shares_of(result):
        check = next(row for row in checks(result, 0)[share.stage].sent if row.name == "all_gather")
        gathered = check.mean / itemsizes(result.config)[0] * Fraction(ranks, ranks - 1)
        saved = times * sum(share.whole.values()) - gathered
        assert check.agrees, (share.stage, check)
        assert saved == letters_of(result, share.stage, padded=True)["U"]
        assert check.text == (f"{times}Ψ - U" if saved else f"{times}Ψ")


def test_ring_agrees() -> None:
    assert_agrees(plan(RunConfig(**{**MESHES[9], "collective": "ring"})))


def test_a_wrong_count_is_seen() -> None:
    """A byte more on one axis is a disagreement of that row alone."""
    result = plan(RunConfig(**MESHES[9]))
    rows = [
        row._replace(sent_bytes=(row.sent_bytes or 0) + (row.op == "send")) if row.purpose == "activations" else row
        for row in result.traffic[0]
    ]
    wrong = replace(result, traffic=[rows if own is result.traffic[0] else own for own in result.traffic])
    assert {check.name: check.agrees for check in checks(wrong, 0)[0].exchanged} == {"all_reduce": True, "send": False}
    assert all(check.agrees for check in checks(wrong, 0)[1].exchanged)


def test_the_loss_is_in_the_form_of_the_last_stage_alone() -> None:
    """Each of 2 microbatches: 4 all-reduces in each of 2 layers, 1 at either end of the model, and 3 of the loss."""
    result = plan(RunConfig(**{**GPT, "ranks": 4, "tp": 2, "pp": 2, "stage": 0, "accumulate": 2}))
    texts = [{check.name: check.text for check in checks(result, 0)[stage].exchanged} for stage in (0, 1)]
    bsh, bs = 2 * 2 * (2 * 4 + 1), 2 * 2 * 3  # an all-reduce moves its payload twice
    assert [text["all_reduce"] for text in texts] == [f"{bsh}bsh", f"{bsh}bsh + {bs}bs"]


def test_stages_that_are_alike_stand_together() -> None:
    assert alike_stages([561, 545, 545, 545, 562]) == [range(1), range(1, 4), range(4, 5)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_live_micro_batches_follow_from_the_schedules(kind: str) -> None:
    """What is alive at once in each stage's list of actions is the closed form."""
    chunks = {"interleaved": 3, "zb-v": 2}.get(kind, 1)
    for stages in (2, 3, 4):
        for micro_batches in (stages, 2 * stages, 4 * stages, 3 * stages + 1)[kind == "zb-v" :]:
            together = smallest_group(stages, micro_batches)
            for stage in range(stages):
                sizes = {"i": stage, "p": stages, "m": micro_batches, "v": chunks}
                most = max(live(SCHEDULES[kind](stages, stage, micro_batches, chunks)))
                assert most.whole == live_micro_batches(kind, together).at(sizes)
                assert most.weights == live_weights(kind).at(sizes)
    assert bubble().at(p=4, m=8) == bubble("interleaved").at(p=4, m=4, v=2)
