"""--recompute auto through verbs and files: what it chooses is in the configuration before anything is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerosim.cli.main import main

TINY = "--layers 4 --hidden 64 --heads 4 --recompute auto"


def chosen(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words.split(), "--json", "-", "--quiet"]) == 0
    return str(json.loads(capsys.readouterr().out)["config"]["recompute"])


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("plan --gpu a100-80", "none"),
        ("plan --limit 1.3MB", "0=full+1-2=selective:"),
        ("run --limit 2.4MB --steps 1", "0=full+1-2=selective:core_attn,"),
        ("run --capacity 1GB --steps 1", "none"),
    ],
)
def test_it_is_chosen_before_anything_is_planned(words: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, _, flags = words.partition(" ")
    assert value in chosen(f"{verb} {TINY} {flags}", capsys)


def test_a_file_may_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'recompute = "auto"\ncapacity = "2.4MB"\nlayers = 4\nhidden = 64\nheads = 4\nsteps = 1\n', encoding="utf-8"
    )
    assert "0=full+" in chosen(f"run {file}", capsys)


@pytest.mark.parametrize("verb", ["plan", "run", "compare", "fit", "step", "explain --stage 3 --ranks 4"])
def test_without_a_memory_there_is_nothing_to_fit_into(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), *TINY.split()]) == 2
    which = "--limit SIZE" if verb in ("run", "step") else "--gpu NAME or --limit SIZE"
    assert capsys.readouterr().err == (
        f"zerosim: error: --recompute auto: needs a device memory to fit into; pass {which} too\n"
    )


def test_a_page_says_in_a_sentence_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama3-8b --ranks 8 --gpu a100-80 --micro-batch 2 --recompute auto"
    assert main(words.split()) == 0
    assert "Recompute: 5 of 32 blocks in layernorm and mlp_act, 27 in mlp_act." in capsys.readouterr().out


def test_where_nothing_fits_the_plan_is_of_the_most_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY.split(), "--limit", "0.9MB"]) == 3
    assert "recompute full" in " ".join(capsys.readouterr().out.split())
