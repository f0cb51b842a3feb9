"""Checkpoints as a user has them: saved, killed, gone on with, looked into and converted; refusals in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.cli.main import main

SIZES = ["--layers", "1", "--hidden", "16", "--heads", "2", "--vocab", "256", "--seq", "8", "--micro-batch", "2"]
RUN = ["run", "--model", "llama", *SIZES, "--optimizer", "adamw", "-q"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with steps 2 and 4 of a run on 4 ranks in `ckpt`."""
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "--ranks", "4", "--stage", "3", "--steps", "4", "--save-state", "ckpt", "--every", "2"]) == 0
    return tmp_path


def refused(words: str, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    capsys.readouterr()
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("zerosim: error: ").strip()


def weights(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_a_run_goes_on_with_the_checkpoints_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [*RUN, "--ranks", "4", "--stage", "3", "--steps", "6", "--save-weights", "whole.npz"]
    assert main(whole) == 0
    assert main(["run", "--resume", "ckpt", "--steps", "6", "-q", "--save-weights", "on.npz"]) == 0
    ours, theirs = weights(folder / "on.npz"), weights(folder / "whole.npz")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    capsys.readouterr()
    other = ["--ranks", "6", "--stage", "2", "--precision", "fp32"]
    assert main(["run", "--resume", "ckpt", *other, "--steps", "5", "--json", "figures.json"]) == 0
    out = capsys.readouterr().out
    assert "Goes on from ckpt/step-00000004: step 4, written by 4 ranks." in out
    assert "The global batch was 8 rows, and is 12 now." in out
    assert "precision bf16 → fp32" in out
    assert "in step 4, the last" in out
    figures = json.loads((folder / "figures.json").read_text("utf-8"))
    assert (figures["first_step"], len(figures["losses"])) == (4, 1)


def test_an_older_step_and_a_damaged_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "ckpt/step-00000004/rank-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert main(["run", "--resume", "ckpt", "--steps", "5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rank-00002.safetensors: its checksum is not the manifest's" in out
    assert "Goes on from ckpt/step-00000002" in out
    assert main(["state", "ckpt", "--verify", "-q"]) == 1
    file.unlink()
    assert main(["state", "ckpt"]) == 1
    assert "rank-00002.safetensors" in capsys.readouterr().out
    assert main(["state", "ckpt", "--step", "2", "--verify", "-q"]) == 0


def test_state_says_who_wrote_what(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", "ckpt", "--verify", "--json", "found.json"]) == 0
    out = capsys.readouterr().out
    assert "step 4, 4 ranks, ZeRO stage 3" in out
    assert "Every file has its checksum." in out
    found = json.loads((folder / "found.json").read_text("utf-8"))
    assert found["damage"] == ""
    numel = sum(run["stop"] - run["start"] for run in found["runs"] if run["state"] == "param")
    assert numel == sum(int(np.prod(run["shape"])) for run in {run["tensor"]: run for run in found["runs"]}.values())
    assert sum(run["bytes"] for run in found["runs"]) == 12 * numel
    assert main(["state", "ckpt", "--tensor", "embed_tokens", "--rank", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "embed_tokens" in line]
    assert rows
    assert all(re.search(r"\s1\s+whole\s", row) for row in rows)
    assert main(["state", "ckpt", "--against", "ckpt/step-00000002"]) == 1
    assert "states differ" in capsys.readouterr().out
    assert main(["state", "ckpt", "--against", "ckpt/step-00000004", "-q"]) == 0


@pytest.mark.parametrize("form", ["dcp", "universal"])
def test_what_is_converted_and_back_is_equal(form: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = ["--pieces", "3"] if form == "dcp" else []
    assert main(["convert", "ckpt", "there", "--as", form, *pieces]) == 0
    model = ["--model", "llama", *[word for word in SIZES if word not in ("--micro-batch", "2")]]
    assert main(["convert", "there", "back", *model[:2], *SIZES[:-2]]) == 0
    out = capsys.readouterr().out
    assert "step 4: 12 weights, exp_avg, exp_avg_sq" in out
    assert main(["state", "back", "--against", "ckpt"]) == 0
    assert main(["run", "--resume", "back", "--ranks", "3", "--steps", "5", "-q"]) == 0


def test_weights_and_adapters_are_written_for_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "ckpt", "model"]) == 0
    assert sorted(os.listdir("model")) == ["config.json", "model.safetensors"]
    lora = [*RUN, "--ranks", "2", "--steps", "1", "--lora-rank", "2", "--save-state", "tuned"]
    assert main(lora) == 0
    assert main(["convert", "tuned", "adapters"]) == 0
    assert sorted(os.listdir("adapters")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "has adapters" in refused("convert tuned there --as dcp", capsys)
    assert not Path("there").exists()


def test_refusals_are_one_line_and_touch_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("x", encoding="utf-8")
    (folder / "empty").mkdir()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}
    run = " ".join(RUN)
    for words, said in (
        ("run --resume nowhere", "--resume nowhere: does not exist"),
        ("run --resume empty", "--resume empty: has no saved step"),
        ("run --resume file", "--resume file: is a file"),
        ("run --resume ckpt -q", "has done 4; pass more"),
        ("run --resume ckpt --steps 6 --hidden 32 -q", "embed_tokens.weight has shape (256, 16), expected (256, 32)"),
        ("run --resume ckpt --steps 6 --layers 2 -q", "missing model.layers.1."),
        ("run --resume ckpt --steps 6 --optimizer sgd -q", "has exp_avg, exp_avg_sq, and this run's optimizer"),
        ("run --resume ckpt --steps 6 --weights w.npz -q", "the weights are those of resume"),
        (f"{run} --save-state ckpt --ranks 2", "has step 4 of an earlier run"),
        (f"{run} --save-state file --ranks 2", "--save-state file: is a file"),
        (f"{run} --every 2", "no effect without save_state"),
        ("compare --model llama --save-state x", "unknown flag --save-state"),
        ("state empty", "empty: has no saved step"),
        ("state ckpt --step 3", "--step 3: ckpt has steps 2, 4"),
        ("state ckpt --tensor nothing", "--tensor nothing: no tensor has this name"),
        ("state ckpt --rank 9", "--rank 9: wrote nothing; 4 of 4 ranks did"),
        ("convert ckpt there --as zerosim", "is zerosim's already"),
        ("convert ckpt there --as gguf", "expected zerosim, safetensors, dcp or universal"),
        ("convert ckpt empty/there/more", "does not exist"),
        ("convert ckpt ckpt", "exists and is not empty"),
        ("convert file there", "file"),
        ("convert ckpt there --as dcp --masters", "--masters: works only with --as safetensors"),
    ):
        assert said in refused(words, capsys), words
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"} == before


def test_a_newer_schema_and_another_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder / "ckpt/step-00000004/manifest.json"
    values = json.loads(manifest.read_text("utf-8"))
    manifest.write_text(json.dumps({**values, "schema": 99}), encoding="utf-8")
    assert "schema 99 is newer than this zerosim's" in refused("state ckpt", capsys)
    manifest.write_text("[]", encoding="utf-8")
    assert str(manifest.relative_to(folder)) in refused("state ckpt", capsys)


@pytest.mark.slow
def test_a_killed_run_goes_on(folder: Path) -> None:
    words = [sys.executable, "-m", "zerosim", *RUN, "--ranks", "4", "--steps", "10000", "--save-state", "long"]
    process = subprocess.Popen([*words, "--every", "1", "--keep", "2"])
    while process.poll() is None and not list(folder.glob("long/step-*5")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    [step] = [max(folder.glob("long/step-*"))]
    done = int(step.name.removeprefix("step-"))
    assert main(["run", "--resume", "long", "--ranks", "6", "--stage", "3", "--steps", str(done + 2), "-q"]) == 0
    assert main(["state", "long", "--verify", "-q"]) == 0
