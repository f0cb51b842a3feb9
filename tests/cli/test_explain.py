"""`zerosim explain`: the numbers it shows are the formulas', it says that nothing ran, and it refuses in words."""

from __future__ import annotations

import json
import os
import shlex
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from processes import finished

import zerosim
from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import block_activations
from zerosim.cli.main import main
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

ASKED = ["explain", "--stage", "2", "--params", "7.5B", "--ranks", "64"]
SIZED = [
    "explain",
    "--stage",
    "2",
    "--ranks",
    "64",
    "--hidden",
    "1600",
    "--layers",
    "48",
    "--heads",
    "25",
    "--seq",
    "1024",
]
SIZED += ["--micro-batch", "32"]


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
        "Formulas with your numbers put in. Nothing was run or counted.",
        "zerosim plan --stage 2 --params 7500000000 --ranks 64 --model flat",
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
    assert values["config"]["recipe"] == "paper"


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


def test_frozen_weights_have_no_buckets_and_no_fp32_copies(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--layers", "2", "--ranks", "4", "--lora-rank", "4", "--recipe"]
    ddp = figures(capsys, [*words, "ddp", "--stage", "0"])
    trained = ddp["num_trained"]
    assert 0 < trained < ddp["num_parameters"]
    assert lines(ddp, "reduction_buffers") == [("comm", "2Ψ_t", 2 * trained)]
    second, third = (figures(capsys, [*words, "deepspeed", "--stage", stage]) for stage in "23")
    assert "reduction_buffers" not in second["sections"]
    assert terms(third, "reduction_buffers") == {"comm": 2 * 500_000_000}
    for deepspeed in (second, third):
        assert lines(deepspeed, "optimizer_step")[1] == ("upcast", "4Ψ_t/N", Fraction(4 * trained, 4))


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


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "words",
    [
        ["--params", "6400", "--ranks", "64", "--optimizer", "adam-sage"],
        ["--params", "6400", "--ranks", "4", "--tp", "2", "--stage", "1"],
        ["--layers", "2", "--stage", "3", "--ranks", "4", "--accumulate", "3", "--keep-last-unit"],
        ["--layers", "2", "--stage", "3", "--ranks", "4", "--partition", "owner", "--dp-replicate", "2"],
        ["--layers", "2", "--stage", "3", "--ranks", "4", "--recipe", "deepspeed", "--persistent-numel", "500"],
        ["--layers", "2", "--stage", "3", "--ranks", "4", "--recipe", "fsdp2", "--recompute", "full"],
        ["--layers", "4", "--stage", "1", "--ranks", "8", "--pp", "2", "--tp", "2", "--sp", "--accumulate", "4"],
        [
            "--model",
            "llama",
            "--kv-heads",
            "2",
            "--layers",
            "4",
            "--stage",
            "3",
            "--ranks",
            "8",
            "--tp",
            "4",
            "--pp",
            "2",
        ],
        ["--layers", "4", "--stage", "2", "--ranks", "4", "--pp", "2", "--pipeline", "zb-v", "--accumulate", "4"],
        ["--layers", "2", "--ranks", "4", "--stage", "3", "--tp", "2", "--recompute", "full", "--cpu-checkpointing"],
        ["scenarios/first.toml"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_it_says_what_a_plan_of_the_same_run_is_compared_with(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """3Ψ + 2VD here is 3Ψ + 2VD there: texts and numbers, and the printed command is that plan's."""
    asked = ["explain", *words, *([] if "--stage" in words or "scenarios" in words[0] else ["--stage", "2"])]
    values = figures(capsys, asked)
    command = shlex.split(values["count_with"])
    assert command[:2] == ["zerosim", "plan"]
    assert figures(capsys, ["plan", *command[2:], "-q"])["config"] == values["config"]
    result = plan(zerosim.plan_config(**values["config"]))
    states = [(check.name, local(check.text, result), check.formula) for check in checks(result)[0].states]
    assert lines(values, "model_states") == states
    sent = [(local(check.text, result), check.formula) for check in checks(result, 0)[0].sent]
    assert [(formula, value) for _, formula, value in lines(values, "volume")] == sent
    exchanged = [(f"{check.axis}: {check.name}", check.text, check.formula) for check in checks(result, 0)[0].exchanged]
    assert exchanged == (lines(values, "exchanges") if exchanged else [])
    if result.config.memory.cpu_checkpointing:
        copied = [(check.name, check.text, check.formula) for check in checks(result, 0)[0].copied][:2]
        assert lines(values, "copies") == copied


def lines(values: dict[str, Any], section: str) -> list[tuple[str, str, Fraction]]:
    terms = values["sections"][section]["terms"]
    return [(term["name"], term["formula"], Fraction(term.get("exact", term["bytes"]))) for term in terms]


def local(text: str, result: RunResult) -> str:
    is_part = result.config.mesh.tp * result.config.mesh.pp > 1
    return text.replace("Ψ", "Ψ_r") if is_part else text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stage", "3", "--ranks", "4"], "--params is missing: pass it, --model NAME, sizes"),
        (["--params", "7B", "--ranks", "4"], "--stage missing"),
        (["--params", "7B"], "--stage and --ranks missing"),
        (["--layers", "4", "--stage", "1"], "--ranks missing"),
        (["--params", "22B", "--layers", "48", "--stage", "1", "--ranks", "4"], "leave out --params, or --layers"),
        (["--model", "gpt2", "--params", "7B"], "params 7000000000: a size of model flat only"),
        (["--params", "7B", "--stage", "3", "--ranks", "6", "--tp", "4"], "ranks"),
        (["--params", "7B", "--stage", "3", "--ranks", "70000"], "--ranks 70000"),
        (["--layers", "32", "--stage", "1", "--ranks", "6", "--pp", "3"], "--layers 32 do not divide into 3"),
        (["--model", "gpt2-xxl"], "gpt2-xxl"),
    ],
)
def test_it_refuses_what_a_run_refuses(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(["explain", *words]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_the_printed_command_is_a_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan takes no sample and no memory of its own."""
    scenario = tmp_path / "run.toml"
    scenario.write_text('stage = 3\nranks = 4\nsample = "hello you"\nsample_tokens = 4\ncapacity = "1GB"\n', "utf-8")
    command = shlex.split(figures(capsys, ["explain", str(scenario), "--layers", "2"])["count_with"])
    assert main([*command[1:], "-q"]) == 0


def test_where_the_cost_depends_on_the_tensor_it_is_a_mean(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--layers", "2", "--stage", "2", "--ranks", "3", "--optimizer", "adafactor"]
    result = plan(zerosim.plan_config(layers=2, stage=2, ranks=3, optimizer="adafactor"))
    counted = [(check.name, check.text) for check in checks(result)[0].states]
    assert [(name, formula) for name, formula, _ in lines(figures(capsys, words), "model_states")] == counted
    assert "4.142 is a mean: what Adafactor keeps depends on the tensor" in flat(shown(capsys, words))


def test_models_and_recipes_have_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = flat(shown(capsys, ["explain", "--model", "llama2-7b", "--tp", "4", "--ranks", "8"]))
    assert "llama2-7b: ZeRO-3 on 8 ranks: dp 2 x tp 4, Ψ = 6,738,415,616 parameters" in text
    assert "Ψ_r = 1,684,803,584" in text


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(terms(figures(capsys, [*ASKED[:-1], "1"]), "volume").values()) == {0}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations(capsys: pytest.CaptureFixture[str], recompute: str) -> None:
    values = figures(capsys, [*SIZED, "--recompute", recompute])
    block = block_activations(recompute).at(s=1024, b=32, h=1600, a=25, f=6400, t=1)
    assert terms(values, "activations_2205_05198")["a block keeps"] == block
    assert terms(values, "activations_2205_05198")["all blocks"] == 48 * block
    assert terms(values, "activations_1910_02054") == {"all kept": 60_397_977_600, "inputs only": 5_033_164_800}
    assert "activations_2205_05198" not in figures(capsys, ASKED)["sections"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "words",
    [
        ASKED,
        [*SIZED, "--ranks", "7", "--recipe", "deepspeed"],
        ["explain", "--stage", "3", "--params", "999T", "--ranks", "65521", "--recipe", "fsdp2"],
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
    done = finished(words, env=whole)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ascii_has_names_for_every_letter() -> None:
    text = run_apart([sys.executable, "-m", "zerosim", *SIZED], PYTHONIOENCODING="ascii")
    assert text.isascii()
    assert "?" not in text
    assert "2Psi + 14Psi/N" in text
    assert "5as^2b" in text


def test_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank of the first pipeline stage sends and keeps of activations."""
    words = "explain --stage 2 --ranks 16 --tp 2 --pp 2 --hidden 64 --layers 4 --heads 4 --seq 32 --micro-batch 2"
    asked, sbh = [*words.split(), "--accumulate", "4"], 32 * 2 * 64
    plain = figures(capsys, asked)
    assert terms(plain, "exchanges") == {"tp: all_reduce": (4 * 2 + 1) * 4 * sbh * 2, "pp: send": 4 * sbh * 2}
    block = terms(plain, "activations_2205_05198")["a block keeps"]
    assert block == 22 * sbh + 5 * 4 * 32 * 32 * 2 // 2
    for kind, live, sends in (("1f1b", 2, 4), ("zb-h1", 2, 4), ("gpipe", 4, 4)):
        under = figures(capsys, [*asked, "--pipeline", kind])
        first = terms(under, "activations_2205_05198")["first stage"]
        assert (first, terms(under, "exchanges")["pp: send"]) == (2 * live * block, sends * sbh * 2)
    said = flat(shown(capsys, [*asked, "--pipeline", "zb-v"]))
    assert "Bubble by makespan: (p-1)/(6m) = 1/24. By own span, of the stage with the most: 0." in said
    assert "Ψ_r = " in said
    assert "pipeline stage 0" in said
    parts = figures(capsys, [*asked, "--recompute", "full", "--partition-activations", "--cpu-checkpointing"])
    assert terms(parts, "copies") == dict.fromkeys(("device to host", "host to device"), 2 * 4 * sbh)
    assert terms(parts, "activations_2205_05198")["a block keeps"] == 0
