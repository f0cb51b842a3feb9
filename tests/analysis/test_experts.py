"""What zerosim says of experts: active parameters beside all, and closed forms that agree with counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerosim.analysis.expect.closed_forms import active_of, parameters_of
from zerosim.analysis.shares import laid_out
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.train.check_trained import num_active
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
        assert f"({active:,} of them active for a token, " in said
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
