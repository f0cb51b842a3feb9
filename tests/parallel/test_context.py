"""Ranks that share rows train what one rank trains: values, bits, text, labels and losses.

A mesh is compared with one rank on the same global batch. Under SGD a weight moves by its gradient, so that no
difference is hidden by an optimizer, or made larger.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_files import small
from crosses import CLUSTER, check
from same import assert_close, assert_same_training, on_one_rank

from zerosim.cli.run import train
from zerosim.config import RunConfig
from zerosim.optim.sophia import SophiaG
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

LLAMA: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, seq=16, micro_batch=2, steps=2, lr=0.5
)
GPT: dict[str, Any] = dict(model="gpt", kv_heads=4, dropout=0.1)
SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
USP: dict[str, Any] = dict(context="ulysses+ring", ranks_per_node=2)
PIPE: dict[str, Any] = dict(ranks=8, cp=2, pp=2, stage=2, accumulate=3)
FOUR: dict[str, Any] = dict(ranks=4, cp=2, stage=3)
"""Two pairs that share rows."""


def fields(of: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    return {**LLAMA, "precision": "fp64", "optimizer": "sgd", **of, **on}


def trained(of: dict[str, Any], on: dict[str, Any], **others: Any) -> RunResult:
    return run(RunConfig(**fields(of, on)), **others)


def alone(of: dict[str, Any], on: dict[str, Any]) -> RunResult:
    return on_one_rank(fields(of, {}), RunConfig(**fields(of, on)))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # how tokens are read
    "ring": (GPT, dict(ranks=4, cp=4, stage=3)),
    "ring, contiguous": ({}, dict(ranks=4, cp=4, stage=3, context_order="contiguous")),
    "ring of 3": (dict(seq=18), dict(ranks=3, cp=3, stage=2)),
    "allgather": (GPT, dict(ranks=4, cp=2, stage=2, context="allgather")),
    "allgather, contiguous": ({}, dict(ranks=4, cp=4, stage=3, context="allgather", context_order="contiguous")),
    "ulysses": (GPT, dict(ranks=4, cp=2, stage=1, context="ulysses")),
    "ulysses, flash": (GPT, dict(ranks=2, cp=2, stage=0, context="ulysses", attention="flash")),
    "ulysses, copied keys": (dict(kv_heads=1), dict(ranks=4, cp=4, stage=2, context="ulysses")),
    "ulysses and ring": (GPT, dict(ranks=4, cp=4, stage=2, **USP)),
    "ulysses and ring, contiguous": (dict(kv_heads=1), dict(ranks=8, cp=8, stage=3, **USP, context_order="contiguous")),
    "ulysses and ring, tp": ({}, dict(ranks=8, cp=4, stage=3, **SP, **USP | dict(ranks_per_node=4))),
    "alibi": (dict(model="bloom", kv_heads=4), dict(ranks=4, cp=4, stage=2)),
    "alibi, ulysses": (dict(model="bloom", kv_heads=4), dict(ranks=2, cp=2, stage=2, context="ulysses")),
    "repeated keys": ({}, dict(ranks=4, cp=4, stage=2, repeat_kv=True)),
    "repeated keys, ulysses": ({}, dict(ranks=4, cp=4, stage=2, repeat_kv=True, context="ulysses")),
    # what else is cut
    "tp": (GPT, dict(ranks=4, cp=2, tp=2, stage=1)),
    "tp, ulysses": ({}, dict(ranks=4, cp=2, tp=2, stage=2, context="ulysses")),
    "sp": (GPT, dict(ranks=8, cp=2, stage=2, **SP)),
    "sp, kept": ({}, dict(ranks=4, cp=2, stage=3, **SP, keep_gathered=True)),
    "sp, odd rows": (dict(GPT, micro_batch=3), dict(ranks=4, cp=2, stage=2, **SP)),
    "1f1b": (GPT, PIPE),
    "zb-h1": ({}, dict(PIPE, pipeline="zb-h1", stage=3, context="allgather")),
    "zb-v": (dict(layers=4, tie_embeddings=False), dict(PIPE, pipeline="zb-v", accumulate=4, context="ulysses")),
    "interleaved": (dict(layers=4), dict(PIPE, pipeline="interleaved", accumulate=4, virtual_stages=2)),
    "replicas": ({}, dict(ranks=8, cp=2, dp_replicate=2, stage=3)),
    "accumulate": (GPT, dict(ranks=4, cp=2, stage=2, accumulate=2)),
    "owner": ({}, dict(FOUR, partition="owner")),
    # memory
    "full": (GPT, dict(FOUR, recompute="full")),
    "full:2": ({}, dict(FOUR, recompute="full:2", context="allgather")),
    "selective": (GPT, dict(FOUR, recompute="selective")),
    "selective:op": ({}, dict(FOUR, recompute="selective:op", context="ulysses")),
    "parts": (GPT, dict(FOUR, recompute="selective:core_attn,layernorm,mlp", context="ulysses")),
    "checkpoints on the host": ({}, dict(FOUR, recompute="full", cpu_checkpointing=True)),
    "activations on the host": (GPT, dict(FOUR, offload_activations=True)),
    "by module": ({}, dict(FOUR, gather="module")),
    "tiles": ({}, dict(FOUR, gather="module", tiles=2)),
    "chunked loss": (GPT, dict(FOUR, loss="chunked")),
    # what is trained, and how it is sent
    "lora": (dict(lora_rank=2, lora_dropout=0.2), FOUR),
    "lora, sp": (dict(lora_rank=2, lora_dropout=0.2, lora_target="all-linear"), dict(ranks=4, cp=2, stage=3, **SP)),
    "lora, tp, ulysses": (
        dict(lora_rank=2, lora_dropout=0.2, lora_target="all-linear"),
        dict(ranks=4, cp=2, tp=2, stage=3, context="ulysses"),
    ),
    "frozen": (dict(freeze="layers.0"), FOUR),
    "clip": (dict(clip_norm=0.01), FOUR),
    "buckets": ({}, dict(FOUR, bucket_bytes=256)),
    "collective ring": ({}, dict(FOUR, collective="ring", context="allgather")),
    "pairs": ({}, dict(ranks=4, cp=4, stage=2, collective="pairs", context="ulysses")),
    "threads": ({}, dict(FOUR, parallel=4)),
    "fsdp2": ({}, dict(FOUR, recipe="fsdp2")),
    "deepspeed": (dict(clip_norm=1.0), dict(FOUR, recipe="deepspeed", context="ulysses")),
    "megatron": ({}, dict(ranks=4, cp=2, stage=1, recipe="megatron")),
}


# -- values -------------------------------------------------------------------------------------------------------
@pytest.mark.quick(8)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_rows_train_what_one_rank_trains(way: str) -> None:
    assert_close(trained(*WAYS[way]), alone(*WAYS[way]), 1e-14)


FILES = ["gemma2", "qwen3", "olmo2"]
"""A window of 4 tokens with a cap, and norms at other places."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", FILES)
def test_published_families_do(family: str, tmp_path: Path) -> None:
    of = dict(model=small(family, tmp_path), seq=16, micro_batch=2, steps=2, lr=0.5, optimizer="sgd")
    one = run(RunConfig(**of, precision="fp64", ranks=1, stage=0))
    for on in (
        dict(cp=4),
        dict(cp=4, context_order="contiguous"),
        dict(cp=2, context="allgather"),
        dict(cp=2, context="ulysses"),
    ):
        config = RunConfig(**of, **on, ranks=on["cp"], stage=2)
        assert_close(run(config.replace(precision="fp64")), one, 1e-14)
        check(config, plan(config, cluster=CLUSTER))


def test_muon_is_as_near_as_its_rounding_allows() -> None:
    """A matrix's update is its gradient with all singular values made about 1: those that rounding makes up, too. Five
    Newton-Schulz steps each multiply what is small by 3.4."""
    of = dict(optimizer="muon", lr=0.02)
    for on in (FOUR, dict(FOUR, context="ulysses"), dict(ranks=4, cp=4, stage=1, context="allgather")):
        assert_close(trained(of, on), alone(of, on), 1e-9)


WAYS_ROUND = [
    dict(ranks=4, cp=4, stage=3),
    dict(ranks=4, cp=4, stage=2, context="allgather", context_order="contiguous"),
    dict(ranks=2, cp=2, stage=1, context="ulysses"),
    dict(ranks=4, cp=4, stage=3, **USP),
]


STATES_ON_HOST = dict(FOUR, offload="optimizer=host,params=host", accumulate=2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("on", [*WAYS_ROUND, STATES_ON_HOST], ids=str)
def test_fp32_is_within_its_rounding(on: dict[str, Any]) -> None:
    """Losses under Adam; the first gradients, read off a step so large that a weight is lost in it."""
    of = dict(precision="fp32", optimizer="adam", lr=1e-3, steps=3)
    np.testing.assert_allclose(trained(of, on).mean_losses, alone(of, on).mean_losses, rtol=0, atol=2e-6)
    of = dict(precision="fp32", lr=2.0**12, steps=1)
    ours, theirs = trained(of, on).weights, alone(of, on).weights
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name] / 2.0**12, values / 2.0**12, rtol=0, atol=2e-6, err_msg=name)


# -- bits ---------------------------------------------------------------------------------------------------------
ZERO = [(0, "slices"), *[(stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner")]]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
def test_stages_partitions_and_recompute_change_no_bit(context: str) -> None:
    of = dict(GPT, layers=1, precision="bf16", optimizer="adam", lr=1e-3, clip_norm=0.5)
    mesh = dict(ranks=4, cp=2, context=context)
    first, *others = [trained(of, dict(mesh, stage=stage, partition=partition)) for stage, partition in ZERO]
    others += [trained(of, dict(mesh, stage=3, recompute=how)) for how in ("full", "selective")]
    others += [trained(of, dict(mesh, stage=2, **how)) for how in (dict(parallel=4), dict(bucket_bytes=64))]
    assert any(step.grad_norm > 0.5 for step in first.steps)
    for other in others:
        assert_same_training(other, first)


# -- what is wrong in the obvious version ---------------------------------------------------------------------------
ALL_WAYS = [*WAYS_ROUND, dict(ranks=4, cp=2, stage=2, context_order="contiguous")]


@pytest.mark.quick(2)
@pytest.mark.parametrize("on", ALL_WAYS, ids=str)
def test_text_is_the_same(on: dict[str, Any]) -> None:
    """From 3 bytes to more than fit. The logits of the last token are on a rank that changes with the length."""
    of = dict(sample="abc", sample_tokens=17)
    expected = alone(of, on)
    assert len(expected.sample or "") == 17
    assert trained(of, on).sample == expected.sample


@pytest.mark.slow
def test_text_goes_through_a_pipeline_and_past_tp() -> None:
    of = dict(sample="abc", sample_tokens=17, accumulate=3)
    for on in (PIPE, dict(PIPE, tp=2, pp=1, sequence_parallel=True)):
        assert trained(of, on).sample == alone(of, on).sample


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", ["in-place", "chunked"])
@pytest.mark.parametrize("on", ALL_WAYS, ids=str)
def test_labels_are_drawn_for_the_same_tokens(on: dict[str, Any], loss: str) -> None:
    """Sophia's steps are bounded where its estimate is small: with a large rho few are, so that labels show."""
    of = dict(loss=loss, optimizer="sophia", accumulate=2)
    tokens = RunConfig(**fields(of, on)).global_batch * LLAMA["seq"]
    bounded, free = (SophiaG(tokens, estimates_every=1, rho=rho) for rho in (0.0, 1e3))
    one = dict(fields(of, on), ranks=1, cp=1, stage=0, context=None, context_order=None, ranks_per_node=0)
    one["accumulate"] = RunConfig(**fields(of, on)).global_batch // one["micro_batch"]
    expected = run(RunConfig(**one), optimizer=free)
    assert_close(trained(of, on, optimizer=free), expected, 1e-12)
    moved = trained(of, on, optimizer=bounded).weights
    for name, values in expected.weights.items():
        assert "embed" in name or np.mean(moved[name] == values) < 0.5, name


def test_losses_are_those_of_all_tokens_of_a_row() -> None:
    """By data rank, and in the lines that progress prints."""
    of = dict(precision="fp32", steps=3)
    expected = trained(of, dict(ranks=2, stage=2))
    for context in ("ring", "ulysses"):
        config, said = RunConfig(**fields(of, dict(FOUR, context=context))), io.StringIO()
        result = train(config, said, quiet=False)
        np.testing.assert_allclose(result.losses, expected.losses, rtol=0, atol=2e-6)
        assert re.findall(r"loss (.*)", said.getvalue()) == [f"{loss:.4f}" for loss in result.mean_losses]
