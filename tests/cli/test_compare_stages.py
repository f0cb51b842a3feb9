"""`zerosim compare` of a model that is too large to train: its stages are plans, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.train.machine import is_too_large
from zerosim.train.plan import plan

SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "8", "--ranks", "2"]
LARGE = ["compare", "--model", "llama3-8b", "--ranks", "8"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plans_of(words: list[str], code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json", "out.json"]) == code
    return dict(json.loads(Path("out.json").read_text("utf-8"))["columns"])


def test_a_large_model_goes_by_shapes_and_says_so(folder: Path, capsys: Capture) -> None:
    plans = plans_of([*LARGE, "--gpu", "a100-80", "--recipe", "paper"])
    out, err = capsys.readouterr()
    assert err == ""
    said = " ".join(out.split())
    assert "Stages 1, 2 and 3 fit on an 85 GB A100, stage 0 does not." in said
    assert "recipe paper, bf16" in said
    assert "this is on tensor shapes only" in said
    assert [plans[stage]["fits"] for stage in "0123"] == [False, True, True, True]
    for stage in "0123":
        config = plan_config(model="llama3-8b", ranks=8, stage=int(stage), attention="flash")
        assert plans[stage]["config"]["recipe"] == "paper"
        assert plans[stage]["peak_bytes"] == max(one.peak.total_bytes for one in plan(config).memory)


@pytest.mark.quick(1)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_has_a_bar_a_stage_at_any_width(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*LARGE, "--gpu", "a100-80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
        assert sum(line.startswith(name) and "█" in line for line in lines) == 1, name


def test_no_stage_that_fits_is_exit_3(folder: Path, capsys: Capture) -> None:
    plans = plans_of([*LARGE, "--gpu", "a100-40"], code=3)
    assert "No stage fits on a 42.3 GB A100. ZeRO-3 takes the least" in " ".join(capsys.readouterr().out.split())
    assert not any(own["fits"] for own in plans.values())
    assert main([*LARGE, "--stages", "3", "--gpu", "a100-40", "--capacity", "80GB", "--quiet"]) == 0  # as of a plan


def test_a_stage_that_cannot_be_planned_has_a_row(folder: Path, capsys: Capture) -> None:
    """Stage 0 has no owners of units, so a table that is tied across pipeline stages may stand there."""
    plans = plans_of(["compare", "--shapes", *SMALL, "--pp", "2", "--partition", "owner", "--tie-embeddings"])
    why = "--partition 'owner': a table tied across pipeline stages has an owner on each of them; choose slices"
    assert [plans[stage].get("error") for stage in "0123"] == [None, why, why, why]
    assert f"Stage 2: {why}" in " ".join(capsys.readouterr().out.split())


def test_a_small_model_trains_unless_shapes_are_asked_for(folder: Path, capsys: Capture) -> None:
    assert main(["compare", *SMALL, "--steps", "2", "--stages", "1,3"]) == 0
    assert "bit-identical" in capsys.readouterr().out
    plans = plans_of(["compare", *SMALL, "--shapes", "--stages", "1,3"])
    assert "bit-identical" not in capsys.readouterr().out
    for stage, own in plans.items():
        traffic = plan(RunConfig.from_dict(own["config"])).traffic[0]
        assert own["ranks"][0]["traffic"] == [row._asdict() for row in traffic], stage


def test_each_stage_may_have_its_own_recipe(folder: Path, capsys: Capture) -> None:
    plans = plans_of([*LARGE, "--gpu", "a100-80", "--stages", "0,3"])
    assert [own["config"]["recipe"] for own in plans.values()] == ["ddp", "fsdp2"]
    assert "recipes ddp at 0 and fsdp2 at 3" in " ".join(capsys.readouterr().out.split())


def test_an_allocator_that_refuses_a_stage_has_a_verdict(folder: Path, capsys: Capture) -> None:
    plans = plans_of(["compare", "--shapes", *SMALL, "--allocator", "caching", "--capacity", "1MB"], code=3)
    assert not any(own["fits"] for own in plans.values())
    assert "at least" in capsys.readouterr().out
    assert main(["compare", "--shapes", *SMALL, "--allocator", "caching", "--capacity", "40MB", "--quiet"]) == 0


def test_what_is_too_large_is_what_takes_long_or_does_not_fit() -> None:
    assert not is_too_large(RunConfig(), 60 * 4)
    assert is_too_large(RunConfig(model="gpt2", ranks=8), 60 * 4)
    assert is_too_large(RunConfig(model="1t", ranks=1024), 1)
