"""The same flags give the same numbers in every verb: each compared or drawn column is what `zerosim plan` plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main

PAIR = ("--model", "llama3-8b", "--ranks", "8", "--gpu", "a100-80", "--recompute", "full", "--seq", "4096")
SMALL = ("--layers", "2", "--hidden", "64", "--heads", "4", "--seq", "16", "--ranks", "4", "--gpu", "a100-80")
FIGURES = ("config", "peak_bytes", "fits", "reserve_bytes", "warnings", "time", "ranks")
RECIPES = ["ddp", "deepspeed", "deepspeed", "fsdp2"]


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json", "-", "--quiet"] if "plot" not in words else [*words, "--json", "-"]) in (0, 3)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("flags", [PAIR, (*SMALL, "--shapes")], ids=["the pair", "small"])
def test_each_stage_is_its_plan(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """With the recipe that people run there, in plan and in compare."""
    columns = figures(capsys, "compare", *flags)["columns"]
    assert [column["config"]["recipe"] for column in columns.values()] == RECIPES
    for stage, column in columns.items():
        own = figures(capsys, "plan", *(word for word in flags if word != "--shapes"), "--stage", stage)
        assert {key: own[key] for key in FIGURES} == {key: column[key] for key in FIGURES}, stage


@pytest.mark.parametrize(
    ("compared", "flags"),
    [
        ("--recipes fsdp2,megatron,paper", "--recipe {}"),
        ("--optimizers adam,lion --stage 1", "--optimizer {} --stage 1"),
        ("--precisions bf16,fp16 --stage 2", "--precision {} --stage 2"),
        ("--compressions none,int8 --stage 2 --grad-dtype fp32", "--compress {} --stage 2 --grad-dtype fp32"),
        ("--memories host,nvme", "--offload optimizer={0},params={0}"),
        ("--memories host,nvme --stage 2", "--offload optimizer={} --stage 2"),
        ("--stages 2,3 --offload optimizer=host", "--stage {} --offload optimizer=host"),
    ],
)
def test_each_column_is_the_plan_of_its_flags(compared: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns = figures(capsys, "compare", *SMALL, "--shapes", *compared.split())["columns"]
    assert len(columns) > 1
    for name, column in columns.items():
        own = figures(capsys, "plan", *SMALL, *flags.format(name).split())
        assert {key: own[key] for key in FIGURES} == {key: column[key] for key in FIGURES}, name


def test_a_trained_column_counts_what_its_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    columns = figures(capsys, "compare", *SMALL, "--steps", "2")["columns"]
    for stage, column in columns.items():
        own = figures(capsys, "plan", *SMALL, "--stage", stage)
        assert column["losses"]
        assert max(rank["memory"]["peak"]["bytes"] for rank in column["ranks"]) == own["peak_bytes"]
        assert column["time"] == own["time"]
        assert column["config"]["recipe"] == own["config"]["recipe"] == RECIPES[int(stage)]


def test_pictures_draw_the_same_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bars = figures(capsys, "plot", "memory", "--mark", "peak", *SMALL, "-o", "m.svg")["bars"]
    points = figures(capsys, "plot", "throughput", *SMALL[:-4], *SMALL[-2:], "--ranks-list", "4", "-o", "t.svg")
    for stage, (bar, line) in enumerate(zip(bars, points["lines"].values(), strict=True)):
        own = figures(capsys, "plan", *SMALL, "--stage", str(stage))
        assert sum(bar["bytes"].values()) == own["peak_bytes"]
        assert [(point["peak_bytes"], point["time"]) for point in line] == [(own["peak_bytes"], own["time"])]


def test_files_are_their_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, stage in (("a.json", 1), ("b.json", 3)):
        Path(name).write_text(
            json.dumps(
                {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
            ),
            "utf-8",
        )
    columns = figures(capsys, "compare", "a.json", "b.json", *SMALL, "--model", "gpt")["columns"]
    for name, column in zip(("a.json", "b.json"), columns.values(), strict=True):
        own = figures(capsys, "plan", name, *SMALL, "--model", "gpt")
        assert {key: own[key] for key in FIGURES} == {key: column[key] for key in FIGURES}
