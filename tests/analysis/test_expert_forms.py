"""What zerosim says of experts: active parameters beside all, and closed forms that agree with counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.expect.closed_forms import active_of, parameters_of
from zerosim.analysis.shares import laid_out
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.train.check_trained import num_active
from zerosim.train.plan import plan
from zerosim.train.run import run
from zerosim.train.work import step_flops

MODEL: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=2, ffn=32, experts=8, top_k=2, expert_ffn=32, vocab=32, seq=8,
    micro_batch=1,
)  # fmt: skip
SIZES = "--model llama --layers 2 --hidden 16 --heads 2 --ffn 32 --experts 8 --top-k 2 --vocab 32 --seq 8"
FLAGS = SIZES.split()


@pytest.mark.parametrize("more", [{}, {"tp": 2, "ranks": 2}, {"shared_experts": 1}, {"model": "gpt"}], ids=str)
def test_active_parameters_are_those_of_the_chosen_experts(more: dict[str, Any]) -> None:
    config = RunConfig(**MODEL | more)
    placed = laid_out(config)
    assert placed.num_parameters == parameters_of(config)
    assert num_active(config.model, placed.layout.flats.values()) == active_of(config.model)


def test_flops_of_a_step_count_active_parameters() -> None:
    """Work with 2 of 8 experts is that with 2 of 2, but for the wider router."""
    many, few = (RunConfig(**MODEL | {"experts": experts}) for experts in (8, 2))
    routers = 2 * (8 - 2) * 16
    assert step_flops(many) == step_flops(few) + 6 * many.tokens * routers


def test_plan_and_explain_name_total_and_active(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(**MODEL)
    active = active_of(config.model)
    for command in ("plan", "explain"):
        assert main([command, *FLAGS, "--ranks", "2", "--stage", "1"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"({active:,} active for a token, " in said
        assert "A token uses 2 of 8 experts in a layer. Memory holds all of them." in said
        assert main([command, *FLAGS, "--ranks", "2", "--stage", "1", "--json", "-"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["num_active"] == active


WARNED = {
    "deepspeed": ("--recipe deepspeed --stage 3", "DeepSpeed's own MoE layers refuse ZeRO stage 3"),
    "megatron": ("--recipe megatron --stage 1 --tp 2", "Megatron-LM trains experts with tensor parallelism only under"),
    "paper": ("--stage 1", "routing even"),
}


@pytest.mark.parametrize(("flags", "words"), WARNED.values(), ids=WARNED)
def test_a_plan_says_what_frameworks_refuse_and_what_it_assumes(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *FLAGS, "--ranks", "4", *flags.split()]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


SP: dict[str, Any] = dict(ranks=8, tp=2, sequence_parallel=True, etp=1)
PARTS = "selective:layernorm,mlp,attn_proj"
WAYS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": dict(stage=stage) for stage in range(4)},
    **{f"shared, stage {stage}": dict(stage=stage, shared_experts=1) for stage in (1, 3)},
    "gpt": dict(model="gpt", stage=3, ep=4),
    "glm4_moe": dict(model="glm4_moe", kv_heads=2, stage=3),
    **{f"sp, etp {etp}, stage {stage}": dict(SP, stage=stage, etp=etp) for stage in range(4) for etp in (1, 2)},
    "sp, shared": dict(SP, shared_experts=1),
    **{f"sp, full, shared {own}": dict(SP, stage=3, recompute="full", shared_experts=own) for own in (0, 1)},
    **{f"sp, parts, shared {own}": dict(SP, stage=3, recompute=PARTS, shared_experts=own) for own in (0, 1)},
    "sp, keep_gathered": dict(SP, keep_gathered=True),
    "ep over tp": dict(SP, ranks=4, ep=4),
    "etp alone": dict(SP, ep=1),
    "etp without tp": dict(ep=1, etp=2),
    "ep x etp": dict(stage=3, etp=2),
    "allgather": dict(stage=3, dispatcher="allgather"),
    "allgather, etp, full": dict(SP, stage=3, etp=2, dispatcher="allgather", recompute="full"),
    "cp": dict(stage=3, cp=2, ep=4),
    "weights travel": dict(SP, stage=3, model="llama4_text", etp=2, recompute="full"),
    "gpt_oss": dict(stage=3, model="gpt_oss"),
    "deepseek_v3": dict(SP, stage=3, model="deepseek_v3"),
    "lora on experts": dict(lora_rank=2, lora_target="experts"),
    "dropped": dict(capacity_factor=1.0, routing="zipf:1"),
    "padded to capacity": dict(capacity_factor=1.5, pad_to_capacity=True),
    "bias": dict(bias_rate=0.001, aux_loss=0.01),
    "pp": dict(pp=2, accumulate=4),
    "pp, stage 3": dict(pp=2, ranks=8, accumulate=4, stage=3),
    "zb-v": dict(pp=2, accumulate=4, pipeline="zb-v", layers=4),
    "hsdp": dict(ranks=8, dp_replicate=2, stage=3),
    "hsdp, padded": dict(ranks=8, dp_replicate=2, hidden=36, heads=3, expert_ffn=25, vocab=65),
    "full:2": dict(stage=3, recompute="full:2"),
    "module": dict(stage=3, gather="module", recompute="selective:layernorm,mlp", shared_experts=1),
    "module, sp": dict(SP, stage=3, gather="module", recompute="selective:layernorm,mlp"),
    "module, pp": dict(stage=3, gather="module", pp=2, ranks=8),
    "lora": dict(stage=3, lora_rank=2),
    "lora on shared ones": dict(SP, lora_rank=2, lora_target="down", shared_experts=1),
    "experts frozen": dict(SP, stage=3, freeze="*experts*"),
    "experts frozen, shared ones too": dict(SP, stage=3, shared_experts=1, freeze="*experts*"),
    "only experts, sp": dict(SP, stage=3, etp=2, model="llama4_text", freeze="*,!*experts*", recompute="full"),
    "only experts": dict(stage=3, freeze="*,!*experts*"),
    "qlora": dict(stage=3, lora_rank=2, base="nf4"),
    "fsdp2": dict(stage=3, recipe="fsdp2"),
    "deepspeed": dict(stage=3, recipe="deepspeed", sub_group=1000),
    "megatron": dict(SP, ep=4, recipe="megatron"),
    "offload": dict(stage=3, offload="optimizer=host,params=host"),
    "a delayed update": dict(stage=2, offload="optimizer=host", delayed_update=1, steps=2),
    "owners": dict(stage=2, partition="owner"),
    "muon": dict(optimizer="muon"),
    "pairs": dict(stage=0, collective="pairs"),
    "zipf": dict(stage=3, routing="zipf:1"),
    "zipf, sp": dict(SP, stage=3, etp=2, routing="zipf:1"),
    "fp32 router": dict(stage=3, router_dtype="fp32"),
    "nodes": dict(stage=3, ranks=8, ranks_per_node=4),
}
EP: dict[str, Any] = dict(
    model="llama", layers=2, hidden=32, heads=4, seq=16, vocab=64, experts=8, top_k=2, expert_ffn=24, micro_batch=1,
    accumulate=2, steps=1, ranks=4, stage=1, ep=2,
)  # fmt: skip
QUICK = "stage 3", "sp, etp 1, stage 1", "lora", "hsdp, padded"


@pytest.mark.parametrize("way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_every_count_is_its_form_over_two_numbers_of_ranks(way: str) -> None:
    """Dense states are cut over dp_shard x cp, experts' over edp; a rank's tokens travel to experts."""
    assert formulas_agree(checks(plan(RunConfig(**EP | WAYS[way]))))


def test_what_a_router_sends_has_a_form_and_no_number_that_is_due() -> None:
    config = RunConfig(**EP | {"vocab": 256})
    for routing, due in ((None, None), ("even", True)):
        result = run(config.replace(routing=routing))
        assert formulas_agree(checks(result))
        [sent] = [check for check in checks(result)[0].exchanged if check.axis == "ep"]
        assert sent.agrees is due
        assert str(sent.form) == "16kbsh"


def test_explain_says_which_parameters_are_cut_over_which_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *FLAGS, "--ranks", "4", "--stage", "3", "--ep", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "16Ψ_d/N + 16Ψ_e/N_e" in said
    assert "are cut over N = 4 ranks, and its experts' Ψ_e = 12,288 over N_e = 2 (edp)." in said
