"""`zerosim explain`: the numbers it shows are the formulas', it says that nothing ran, and it refuses in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import zerosim
from zerosim.analysis.formulas import block_activations
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.train.plan import plan

ASKED = ["explain", "--stage", "2", "--params", "7.5B", "--ranks", "64"]
SIZES = ["--hidden", "1600", "--layers", "48", "--heads", "25", "--seq", "1024", "--micro-batch", "32"]


def shown(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


def figures(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, Any]:
    assert main([*words, "--json", "-"]) == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def terms(values: dict[str, Any], section: str) -> dict[str, Any]:
    return {term["name"]: term["bytes"] for term in values["sections"][section]["terms"]}


def test_the_papers_figure_term_by_term(capsys: pytest.CaptureFixture[str]) -> None:
    text = flat(shown(capsys, ASKED))
    for part in (
        "Formulas with your numbers put in: nothing was run and nothing was counted.",
        "zerosim plan --stage 2 --ranks 64",
        "optim 12Ψ/N 12 · 7,500,000,000 / 64 1,406,250,000 1.41 GB",
        "total 2Ψ + 14Ψ/N 16,640,625,000 16.6 GB",
        "✓ The paper prints 16.6 GB (Figure 1) and 16.6 GB (Table 1). Exact: 16.640625 GB.",
        "reduce_scatter Ψ 63/64 · 7,500,000,000 · 2 14,765,625,000",
        "✓ The paper prints 2Ψ (section 7).",
        "sections 3.1 and 5",
    ):
        assert part in text, part


def test_what_the_paper_does_not_print_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--precision", "fp32"], ["--optimizer", "sgd"], ["--recipe", "megatron"], ["--ranks", "63"]):
        values = figures(capsys, [*ASKED, *more])
        assert values["sections"]["model_states"]["agrees_with_printed"] is None, more
    values = figures(capsys, [*ASKED, "--accumulate", "4"])
    assert values["sections"]["volume"]["agrees_with_printed"] is None
    assert values["sections"]["volume"]["terms"][-1]["formula"] == "5Ψ"


def test_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    values = figures(capsys, [*ASKED[:-1], "7"])
    assert values["counted"] is False
    grad = next(term for term in values["sections"]["model_states"]["terms"] if term["name"] == "grad")
    assert Fraction(grad["exact"]) == Fraction(15 * 10**9, 7)
    assert values["question"]["recipe"] == "paper"


def test_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    values = figures(capsys, [*ASKED, "--recipe", "deepspeed"])
    assert terms(values, "optimizer_step")["total"] == 2 * 7_500_000_000 + 18 * 7_500_000_000 // 64
    assert [term["formula"] for term in values["sections"]["optimizer_step"]["terms"]] == [
        "2Ψ + 14Ψ/N",
        "4Ψ/N",
        "2Ψ + 18Ψ/N",
    ]
    assert [term["name"] for term in values["sections"]["volume"]["terms"]] == ["all_reduce", "all_gather", "total"]
    assert values["sections"]["volume"]["terms"][-1]["formula"] == "3Ψ"
    assert "The paper's own schedule moves 2Ψ." in values["sections"]["volume"]["notes"]
    fp32 = figures(capsys, [*ASKED, "--recipe", "deepspeed", "--precision", "fp32"])
    assert "optimizer_step" not in fp32["sections"]  # there is nothing to cast


def test_a_stage_that_the_framework_lacks_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Megatron itself has no stage 2" in flat(shown(capsys, [*ASKED, "--recipe", "megatron"]))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], "an fp32 master and two moments."),
        (["--precision", "fp32"], "two moments."),
        (["--optimizer", "sgd"], "an fp32 master."),
        (["--optimizer", "sgd", "--momentum", "0.9"], "an fp32 master and one moment."),
        (["--optimizer", "sgd", "--precision", "fp32"], "nothing."),
    ],
)
def test_what_the_optimizer_keeps(capsys: pytest.CaptureFixture[str], words: list[str], kept: str) -> None:
    assert f"The optimizer keeps {kept} ZeRO paper" in flat(shown(capsys, [*ASKED, *words]))


@pytest.mark.parametrize("optimizer", [name for name, preset in PRESETS.items() if preset.cut == "elements"])
def test_every_optimizer_costs_what_a_plan_counts(capsys: pytest.CaptureFixture[str], optimizer: str) -> None:
    asked = ["explain", "--stage", "2", "--params", "6400", "--ranks", "64", "--optimizer", optimizer]
    explained = terms(figures(capsys, asked), "model_states")
    same = zerosim.plan_config(model="flat", params=6400, units=1, stage=2, ranks=64, optimizer=optimizer)
    counted = zerosim.plan(same).memory[0].model_states()
    assert explained == {**counted, "total": sum(counted.values())}


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(terms(figures(capsys, [*ASKED[:-1], "1"]), "volume").values()) == {0}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations(capsys: pytest.CaptureFixture[str], recompute: str) -> None:
    values = figures(capsys, [*ASKED, *SIZES, "--recompute", recompute])
    block = block_activations(1024, 32, 1600, 25, recompute=recompute)
    assert terms(values, "activations_2205_05198")["a block keeps"] == block
    assert terms(values, "activations_2205_05198")["all blocks"] == 48 * block
    assert terms(values, "activations_1910_02054") == {"all kept": 60_397_977_600, "inputs only": 5_033_164_800}
    assert "activations_2205_05198" not in figures(capsys, ASKED)["sections"]
    assert "--layers 48 --hidden 1600 --heads 25 --seq 1024 --micro-batch 32" in values["count_with"]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "words",
    [
        ASKED,
        [*ASKED[:-1], "7", "--recipe", "deepspeed", *SIZES],
        ["explain", "--stage", "3", "--params", "999T", "--ranks", "999983", "--recipe", "fsdp2", *SIZES],
    ],
    ids=["paper", "deepspeed", "large"],
)
def test_it_fits_and_loses_no_digit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown(capsys, words)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for section in figures(capsys, words)["sections"].values():
        for term in section["terms"]:
            if "exact" not in term:
                assert f"{term['bytes']:,}" in text
    assert "\x1b" not in text


def run_apart(words: list[str], **environment: str) -> str:
    whole = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1]), **environment}
    done = subprocess.run(words, capture_output=True, env=whole, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_ascii_has_names_for_every_letter() -> None:
    text = run_apart([sys.executable, "-m", "zerosim", *ASKED, *SIZES], PYTHONIOENCODING="ascii")
    assert text.isascii()
    assert "?" not in text
    assert "2Psi + 14Psi/N" in text
    assert "5as^2b" in text


MESH = ["--stage", "2", "--params", "1M", "--ranks", "16", "--tp", "2", "--pp", "2"]


def test_a_mesh_has_the_bytes_that_are_counted_where_all_divides(capsys: pytest.CaptureFixture[str]) -> None:
    values = figures(capsys, ["explain", *MESH])
    result = plan(RunConfig(model="flat", params=10**6, stage=2, ranks=16, tp=2, pp=2))
    kept = result.memory[0].marks["end_of_backward"].by_kind
    states = terms(values, "model_states")
    assert {kind: kept[kind] for kind in ("param", "grad", "optim")} == {
        k: v for k, v in states.items() if k != "total"
    }
    assert result.sent_bytes(0, 0) == terms(values, "volume")["total"]
    assert values["sections"]["volume"]["agrees_with_printed"] is True


def test_what_a_mesh_sends_and_keeps_of_activations(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--hidden",
        "64",
        "--layers",
        "4",
        "--heads",
        "4",
        "--seq",
        "32",
        "--micro-batch",
        "2",
        "--accumulate",
        "4",
    ]
    sbh = 32 * 2 * 64
    plain = figures(capsys, ["explain", *MESH, *sizes])
    assert terms(plain, "exchanges") == {"tp: all_reduce": 4 * 2 * 4 * sbh * 2, "pp: send": 4 * sbh * 2}
    kept = terms(plain, "activations_2205_05198")
    assert kept["a block keeps"] == 22 * sbh + 5 * 4 * 32 * 32 * 2 // 2
    assert kept["first stage"] == 2 * 2 * kept["a block keeps"]
    for kind, live, sends in (("zb-h1", 2, 4), ("zb-v", 2, 2 * 4), ("gpipe", 4, 4)):
        under = figures(capsys, ["explain", *MESH, *sizes, "--pipeline", kind])
        first = terms(under, "activations_2205_05198")["first stage"]
        assert (first, terms(under, "exchanges")["pp: send"]) == (2 * live * kept["a block keeps"], sends * sbh * 2)
    words = flat(shown(capsys, ["explain", *MESH, *sizes, "--pipeline", "zb-v"]))
    assert "Bubble by makespan: (p-1)/(6m) = 1/24. By own span, of the stage with the most: 0." in words
    assert main(["explain", *MESH, *sizes, "--accumulate", "3", "--pipeline", "zb-v"]) == 2
    assert "--accumulate 3: zb-v takes at least 4 micro-batches" in capsys.readouterr().err
    cut = figures(capsys, ["explain", *MESH, *sizes, "--sequence-parallel"])
    assert terms(cut, "exchanges") == {
        "tp: all_gather": 6 * 2 * 4 * sbh,
        "tp: reduce_scatter": 4 * 2 * 4 * sbh,
        "pp: send": 4 * sbh,
    }
    assert terms(cut, "activations_2205_05198")["a block keeps"] == 17 * sbh + 5 * 4 * 32 * 32 * 2 // 2
    parts = ["--recompute", "full", "--partition-activations"]
    kept = figures(capsys, ["explain", *MESH, *sizes, *parts])
    sent = terms(kept, "exchanges")
    assert sent["tp: all_gather"] * 12 == sent["tp: all_reduce"] == 6 * 2 * 4 * sbh * 2
    assert terms(kept, "activations_2205_05198")["a block keeps"] == sbh
    on_host = figures(capsys, ["explain", *MESH, *sizes, *parts, "--cpu-checkpointing"])
    assert terms(on_host, "copies") == dict.fromkeys(("device to host", "host to device"), 2 * 4 * sbh)
    assert terms(on_host, "activations_2205_05198")["a block keeps"] == 0
    assert "Ψ_r = Ψ / (t · p) = 1,000,000 / (2 · 2)" in flat(shown(capsys, ["explain", *MESH, *sizes]))
