"""`zerosim compare` over optimizers, precisions and memories: the same batches, what each keeps, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zerosim.cli.main import main

SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--ranks", "2", "--steps", "2"]


def test_each_keeps_its_states_of_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    words = ["compare", "--optimizers", "adam,lion,sgd", "--stage", "2", "--json", str(file), *SMALL]
    assert main(words) == 0
    runs = json.loads(file.read_text("utf-8"))["columns"]
    assert [runs[name]["figures"]["states"]["optim per parameter"] for name in ("adam", "lion", "sgd")] == [12, 8, 4]
    assert len({runs[name]["losses"][0] for name in runs}) == 1
    assert len({runs[name]["losses"][1] for name in runs}) == 3
    assert set(runs["lion"]["ranks"][0]["memory"]["states"]) == {"master", "exp_avg"}
    said = capsys.readouterr().out
    assert "Optimizers adam, lion and sgd on 2 ranks, ZeRO-2, recipe paper, bf16" in said
    assert re.search(r"optimizer keeps +exp_avg +exp_avg +master", said)


def test_each_precision_of_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, names = tmp_path / "out.json", ("bf16", "bf16-pure:stochastic", "bf16-pure:kahan")
    words = ["compare", "--precisions", ",".join(names), "--stage", "1", "--json", str(file), *SMALL]
    assert main([*words, "--lr", "1e-4"]) == 0
    runs = json.loads(file.read_text("utf-8"))["columns"]
    assert [runs[name]["figures"]["states"]["states per parameter"] for name in names] == [16, 8, 10]
    assert [len(runs[name]["lost_updates"]) for name in names] == [0, 2, 2]
    assert len({runs[name]["losses"][0] for name in names}) == 1
    said = capsys.readouterr().out
    assert "on 2 ranks, ZeRO-1, recipe paper, Adam" in " ".join(said.split())
    share = 100 * sum(runs["bf16-pure:kahan"]["lost_updates"]) / 2
    assert f"{share:.3g} %" in said
