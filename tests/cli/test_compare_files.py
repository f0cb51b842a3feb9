"""`zerosim compare A B`: two files planned, which settings differ, what each moves, what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main

A = 'model = "gpt2"\nranks = 8\nstage = 2\nattention = "flash"\n'
B = 'model = "gpt2"\nranks = 8\nstage = 3\nattention = "flash"\nrecompute = "full"\nseed = 5\n'
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(A, "utf-8")
    Path("b.toml").write_text(B, "utf-8")
    return tmp_path


def compared(*words: str) -> dict[str, Any]:
    assert main(["compare", *words, "--json", "out.json"]) == 0
    return dict(json.loads(Path("out.json").read_text("utf-8")))


def planned(*words: str) -> dict[str, Any]:
    main(["plan", *words, "--json", "plan.json", "--quiet"])
    return dict(json.loads(Path("plan.json").read_text("utf-8")))


def test_what_changed_is_what_both_plans_say(folder: Path, capsys: Capture) -> None:
    found = compared("a.toml", "b.toml", "--gpu", "a100-80")
    out, err = capsys.readouterr()
    assert err == ""
    said = " ".join(out.split())
    assert said.startswith("3 settings differ. From A to B: peak ")
    for side, file in (("A", "a.toml"), ("B", "b.toml")):
        own, column, totals = (
            planned(file, "--gpu", "a100-80"),
            found["columns"][side],
            found["changes"]["totals"][side],
        )
        figures = column["figures"]
        assert own["peak_bytes"] == column["peak_bytes"] == totals["taken_bytes"] == figures["peak"]["peak"]
        assert own["time"] == column["time"]
        kinds = [nbytes for kind, nbytes in figures["peak"].items() if kind not in ("peak", "reserved (estimated)")]
        assert sum(filter(None, kinds)) == sum(figures["units"].values()) == own["peak_bytes"]
        assert figures["time"]["step"] == own["time"]["step_s"]
        traffic = [(one["stands_for"], row) for one in own["ranks"] for row in one["traffic"]]
        sent = sum(alike * row["sent_bytes"] for alike, row in traffic if row["purpose"] != "control")
        assert sum(value for key, value in figures["sent"].items() if "dp_shard" in key) == sent / 8
        assert totals["sent_bytes"] == figures["sent"]["sent"] == sent / 8


def test_each_setting_stands_beside_what_it_moves_alone(folder: Path, capsys: Capture) -> None:
    found = compared("a.toml", "b.toml", "--gpu", "a100-80")
    settings = {one["name"]: (one["a"], one["b"]) for one in found["changes"]["settings"]}
    assert settings == {"stage": (2, 3), "recompute": ("none", "full"), "seed": (0, 5)}
    alone = found["changes"]["alone"]
    for flags in (["--stage", "3"], ["--recompute", "full"]):
        own = planned("a.toml", "--gpu", "a100-80", *flags)
        assert alone[flags[0].strip("-")]["taken_bytes"] == own["peak_bytes"]
        assert alone[flags[0].strip("-")]["step_s"] == own["time"]["step_s"]
    assert {key: alone["seed"][key] for key in found["changes"]["totals"]["A"]} == found["changes"]["totals"]["A"]


def test_settings_that_follow_and_settings_that_need_another(folder: Path, capsys: Capture) -> None:
    Path("b.toml").write_text(
        A.replace("gpt2", "gpt2-medium") + 'pp = 2\naccumulate = 4\npipeline = "gpipe"\n', "utf-8"
    )
    found = compared("a.toml", "b.toml")
    assert {one["name"] for one in found["changes"]["settings"] if not one["follows"]} == {
        "model",
        "pp",
        "pipeline",
        "accumulate",
    }
    assert {"layers", "hidden", "heads", "kv_heads", "ffn"} == {
        one["name"] for one in found["changes"]["settings"] if one["follows"]
    }
    errors = {name: one["error"] for name, one in found["changes"]["alone"].items() if "error" in one}
    assert list(errors) == ["pipeline"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"pipeline cannot stand alone: {errors['pipeline']}" in said
    assert "hidden 768 → 1,024" in said
    assert "a step is 8 x 1,024 tokens." in said
    assert "a step is 16 x 1,024 tokens." in said
    assert found["columns"]["A"]["time"] is None


def test_what_a_plan_wrote_is_a_file_too(folder: Path, capsys: Capture) -> None:
    planned("a.toml", "--recompute", "full")
    found = compared("a.toml", "plan.json")
    assert [one["name"] for one in found["changes"]["settings"]] == ["recompute"]
    planned("a.toml")
    assert compared("plan.json", "a.toml")["changes"]["settings"] == []
    assert "No setting differs: both are the same." in capsys.readouterr().out


@pytest.mark.quick(1)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_is_as_wide_as_the_terminal(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    compared("a.toml", "b.toml", "--gpu", "a100-80")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.toml no.toml", "cannot read scenario no.toml: No such file"),
        ("a.toml other.json", "scenario other.json: expected what zerosim run or plan wrote with --json (schema 2)"),
        ("a.toml wrong.toml", "scenario wrong.toml: unknown key 'ranksies'; did you mean 'ranks'?"),
        ("a.toml b.toml --stages 1,2", "--stages: works only with one scenario, and two were given, a.toml and b.toml"),
        ("a.toml b.toml --nic 100GB", "needs a device; pass --gpu NAME too"),
        ("a.toml b.toml --json b.toml", "would overwrite the input file"),
    ],
)
def test_bad_files_are_refused_in_one_line(folder: Path, capsys: Capture, words: str, said: str) -> None:
    Path("other.json").write_text('{"schema": 1, "config": {}}', "utf-8")
    Path("wrong.toml").write_text("ranksies = 4\n", "utf-8")
    assert main(["compare", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
