"""Multi-token prediction: every cut of it trains what one rank trains, and a plan leaves the record of a run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from crosses import CLUSTER, check
from same import assert_close, no_garbage_collector, on_one_rank

from zerosim.analysis.expect.closed_forms import parameters_of
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.build import declare
from zerosim.train.plan import plan
from zerosim.train.run import run

LLAMA: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, seq=16, micro_batch=2, steps=2, lr=0.2,
    mtp_layers=2, mtp_loss=0.3,
)  # fmt: skip
SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
PIPE: dict[str, Any] = dict(ranks=4, pp=2, stage=1, accumulate=3)
ROUNDS: dict[str, Any] = dict(PIPE, pipeline="interleaved", layers=4)
MIXED: dict[str, Any] = dict(experts=8, top_k=2, expert_ffn=12)
LATENT: dict[str, Any] = dict(MIXED, model="deepseek_v3", head_dim=8, kv_heads=4, shared_experts=1)

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 0": (dict(clip_norm=0.05), dict(ranks=4, stage=0)),
    "stage 1": ({}, dict(ranks=4, stage=1)),
    "stage 2": ({}, dict(ranks=4, stage=2, accumulate=2)),
    "stage 3": (dict(clip_norm=0.05), dict(ranks=4, stage=3)),
    "stage 3, tied": (dict(tie_embeddings=True), dict(ranks=4, stage=3)),
    "one depth": (dict(mtp_layers=1), dict(ranks=2, stage=3)),
    "tp": ({}, dict(ranks=4, tp=2, stage=3)),
    "tp, padded": (dict(vocab=250), dict(ranks=2, tp=2, stage=0, pad_vocab=True)),
    "sp": (dict(clip_norm=0.05), dict(ranks=4, stage=1, **SP)),
    "sp, gathered inputs kept": ({}, dict(ranks=2, stage=1, keep_gathered=True, **SP)),
    "pipeline": (dict(clip_norm=0.05), PIPE),
    "pipeline, tied": (dict(tie_embeddings=True), PIPE),
    "pipeline, stage 3": ({}, dict(PIPE, stage=3)),
    "interleaved": ({}, ROUNDS),
    "interleaved, sp": ({}, dict(ROUNDS, ranks=8, **SP)),
    "cp": ({}, dict(ranks=4, cp=2, stage=3)),
    "replicas": ({}, dict(ranks=4, dp_replicate=2, stage=3)),
    "owner": ({}, dict(ranks=4, stage=3, partition="owner")),
    "full": ({}, dict(ranks=2, stage=3, recompute="full")),
    "full, sp": ({}, dict(ranks=4, stage=1, recompute="full", **SP)),
    "parts": ({}, dict(ranks=2, stage=3, recompute="selective:mlp_act,layernorm")),
    "chunked": ({}, dict(ranks=2, stage=3, loss="chunked")),
    "fsdp2": ({}, dict(ranks=4, stage=3, recipe="fsdp2")),
    "megatron": ({}, dict(PIPE, recipe="megatron", ranks=8, **SP)),
    "experts": (MIXED, dict(ranks=4, ep=2, stage=3)),
    "latents": (LATENT, dict(ranks=4, ep=4, etp=1, stage=1, **SP)),
}  # fmt: skip


def fields(way: str) -> dict[str, Any]:
    of, on = WAYS[way]
    return {**LLAMA, "layers": on.get("layers", 2), **of}


@pytest.mark.quick(6)
@pytest.mark.parametrize("way", WAYS)
def test_every_cut_trains_what_one_rank_trains(way: str) -> None:
    exact = {**fields(way), "precision": "fp64", "optimizer": "sgd"}
    cut = RunConfig(**{**exact, **WAYS[way][1]})
    assert_close(run(cut), on_one_rank(exact, cut), 1e-14)


@pytest.mark.quick(6)
@pytest.mark.parametrize("way", WAYS)
def test_shapes_leave_the_record_of_a_run(way: str) -> None:
    """Event by event, and counts equal their closed forms."""
    config = RunConfig(**{**fields(way), **WAYS[way][1], "routing": "even" if "experts" in fields(way) else None})
    with no_garbage_collector():
        check(config, plan(config, cluster=CLUSTER))


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (dict(model="gpt", kv_heads=4), "mtp_layers 2: needs a decoder with rotary positions and a last norm; choose"),
        (dict(model="t5", kv_heads=4), "mtp_layers 2: needs a decoder with rotary positions"),
        (dict(mtp_layers=16), "mtp_layers 16: a row of 16 tokens has no token so far ahead; choose 15 or fewer"),
        (dict(PIPE, pipeline="zb-h1"), "mtp_layers 2: is not modelled with pipeline zb-h1; choose 1f1b or interleaved"),
        (dict(PIPE, pipeline="gpipe"), "mtp_layers 2: is not modelled with pipeline gpipe"),
        (dict(PIPE, partition="owner"), "mtp_layers 2: the table is on two pipeline stages, and has an owner on each"),
        (dict(gather="module"), "mtp_layers 2: is not modelled with gather 'module'; choose unit"),
        (dict(lora_rank=2), "mtp_layers 2: is not modelled beside frozen weights"),
        (dict(optimizer="sophia"), "mtp_layers 2: is not modelled with optimizer sophia"),
        (dict(fp8="tensorwise", ffn=32, hidden=64), "mtp_layers 2: is not modelled in 8 bits"),
        (dict(documents="8"), "mtp_layers 2: is not modelled with documents in a row"),
        (dict(offload_activations=True), "mtp_layers 2: has values beside its blocks' inputs"),
        (dict(mtp_layers=0), "mtp_loss 0.3: it has no effect without mtp_layers"),
    ],
)
def test_what_is_refused(of: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        RunConfig(**{**LLAMA, "ranks": 2, "stage": 3, **of})


def test_parameters_are_those_of_released_files() -> None:
    """DeepSeek-V3's have a copy of the table and of the head for the further block, and 256 biases a block that choose
    experts."""
    without, with_one = (declare(RunConfig(model="deepseek-v3", mtp_layers=n)).model.num_parameters for n in (0, 1))
    assert with_one - without == 11_610_068_224 - 256
    for config in (RunConfig(model="deepseek-v3", mtp_layers=2), RunConfig(model="llama3-8b", mtp_layers=1)):
        assert parameters_of(config) == declare(config).model.num_parameters
    assert with_one + 2 * 7168 * 129280 + 59 * 256 == 684_489_845_504
