"""The benchmark runs, says numbers, and judges goals by comparison. Nothing here depends on how fast anything is."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from zerosim.bench import figures, processes, pytorch, suite
from zerosim.bench.bystanders import Bystanders
from zerosim.bench.contest import Effort, interleave
from zerosim.bench.figures import Figure
from zerosim.bench.products import BareProducts, watch
from zerosim.bench.training import TrainingRun, global_batch
from zerosim.cli import bench
from zerosim.config import RunConfig
from zerosim.errors import InputError, RankFailed
from zerosim.train.run import run

TINY = RunConfig(stage=0, layers=1, hidden=16, heads=2, seq=16, micro_batch=4, ranks=1, precision="fp32", lr=1e-3)
ONCE = Effort(0.0, least=2, most=2, warm_ups=1)
EFFORTS = suite.Efforts(ONCE, ONCE, ONCE, ONCE, Effort(0.0, least=1, most=1, warm_ups=0))


@pytest.mark.slow
def test_every_ratio_is_a_positive_number() -> None:
    said: list[str] = []
    had = list(suite.measure({"tiny": TINY}, EFFORTS, said.append))
    measured = [figure for figure in had if figure.value is not None]
    assert len(had) == 11
    assert len(measured) == len(had) - (not pytorch.installed())
    for figure in measured:
        assert figure.value is not None
        assert math.isfinite(figure.value)
        assert figure.value > 0 or figure.unit == "s"
        assert figure.rounds == 2
        assert "NOT the same" not in figure.note
        assert figure.verdict in ("met", "missed") or figure.goal is None
    assert {figure.goal for figure in had} == {None, 0.15, 1.1, 1.5, 1.7, 1.15, 0.75, 1.03}
    assert said  # the user sees that it lives
    assert len(figures.table(had).splitlines()) == len(had) + 1
    assert strict(figures.to_json(had, suite.machine()))["schema"] == 1


def test_goals_are_judged_by_comparison() -> None:
    times = {"slow": [2.0, 2.0], "fast": [1.0, 1.0]}
    assert figures.ratio("", "", times, "slow", "fast", goal=1.99).verdict == "missed"
    assert figures.ratio("", "", times, "slow", "fast", goal=2.0).verdict == "met"
    assert figures.ratio("", "", times, "slow", "fast").verdict == ""
    assert figures.difference("", "", times, "slow", "fast", goal=0.5).verdict == "missed"
    assert Figure("", "", None, goal=1.0, note="no torch").verdict == ""


def test_a_figure_is_the_median_of_rounds_or_the_ratio_of_minima() -> None:
    times = {"a": [2.0, 4.0, 3.0, 9.0, 5.0], "b": [1.0, 1.0, 1.0, 1.0, 2.0]}
    figure = figures.ratio("m", "n", times, "a", "b")
    assert (figure.value, figure.low, figure.high, figure.rounds) == (3.0, 2.5, 4.0, 5)
    assert figures.ratio("m", "n", times, "a", "b", of_minima=True).value == 2.0
    assert figures.difference("m", "n", times, "a", "b", 1.0).value == 3.0
    assert figures.ratio("m", "n", {"a": [3.0], "b": [2.0]}, "a", "b").value == 1.5


def test_the_summary_names_what_was_missed() -> None:
    had = [Figure("0.8M", "bf16 / fp32", 1.6, goal=1.5), Figure("0.8M", "fp16 / fp32", 1.6, goal=2.0)]
    assert figures.summary(had) == "1 of 2 goals met; missed: 0.8M bf16 / fp32"


def test_json_is_strict() -> None:
    body = strict(figures.to_json([Figure("m", "n", None, goal=1.0, note="no torch")], {"cores": 2}))
    assert body["figures"][0]["value"] is None
    assert body["figures"][0]["verdict"] is None
    with pytest.raises(AssertionError):
        figures.to_json([Figure("m", "n", math.nan)], {})


def strict(text: str) -> dict:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_contestants_take_turns() -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> float:
            order.append(self.name)
            return 1.0

    measured = interleave({"a": Fake("a"), "b": Fake("b")}, Effort(0.0, least=3, most=3, warm_ups=1), print, "fake")
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert measured == {"a": [1.0] * 3, "b": [1.0] * 3}


@pytest.mark.parametrize("record", [True, False])
def test_a_held_run_trains_as_a_free_one(record: bool, tmp_path: Path) -> None:
    config = suite.over_ranks(TINY)
    np.savez(tmp_path / "tokens.npz", tokens=np.stack([global_batch(config)] * 3))
    free = run(config.replace(tokens=str(tmp_path / "tokens.npz"), steps=3))
    with TrainingRun(config, record=record) as held:
        for _ in range(3):
            assert held.step() > 0
    assert [list(losses) for losses in zip(*held.losses, strict=True)] == free.losses


def test_a_held_run_that_fails_says_why() -> None:
    with TrainingRun(TINY, tokens=np.full((4, 17), 10**6)) as held, pytest.raises(RankFailed):
        held.step()


def test_the_products_of_a_step_are_seen_and_run_again() -> None:
    with TrainingRun(TINY) as held:
        products = watch(held.step)
    bare = BareProducts(products)
    tokens, weights = (
        TINY.global_batch * TINY.model.seq,
        12 * TINY.model.hidden**2 + TINY.model.vocab * TINY.model.hidden,
    )
    attention = 12 * TINY.global_batch * TINY.model.heads * TINY.model.seq**2 * (TINY.model.hidden // TINY.model.heads)
    assert 6 * tokens * weights < bare.flops <= 6 * tokens * weights + attention
    assert bare.step() > 0
    with pytest.raises(RuntimeError, match="linear maps"):
        suite.check_products(TINY, BareProducts(products[:3]))


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    sleeper = processes.Processes([[sys.executable, "-c", program]], 2.0, {})
    with pytest.raises(processes.ProcessFailed, match="more than 2 s"):
        sleeper.step()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text("utf-8")), 0)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(processes.ProcessFailed, match="ended with 1: ValueError: no"):
        processes.Processes([[sys.executable, "-c", "raise ValueError('no')"]], 30.0, {}).step()


@pytest.mark.slow
@pytest.mark.skipif(not pytorch.installed(), reason="PyTorch is not installed")
def test_fsdp_trains_the_same_model() -> None:
    (figure,) = suite.against_fsdp("tiny", TINY, EFFORTS.fsdp, print)
    assert figure.note == ""
    assert figure.value is not None
    assert figure.value > 0


def test_without_pytorch_its_figures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "installed", lambda: False)
    had = [*suite.single_rank("tiny", TINY, ONCE, print), *suite.against_fsdp("tiny", TINY, ONCE, print)]
    missing = [figure for figure in had if figure.value is None]
    assert [figure.note for figure in missing] == ["PyTorch is not installed"] * 2


@pytest.mark.slow
def test_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(suite, "MODELS", {"0.8M": TINY})
    monkeypatch.setattr(suite, "QUICK", EFFORTS)
    assert bench.main(arguments("--quick", "--json", str(tmp_path / "figures.json"))) == 0
    assert "goals met" in capsys.readouterr().out
    body = strict((tmp_path / "figures.json").read_text("utf-8"))
    assert {row["verdict"] for row in body["figures"]} <= {"met", "missed", None}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        bench.main(arguments("--json", str(tmp_path / "no" / "figures.json")))


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_what_others_took_is_a_share() -> None:
    share = Bystanders().share()
    assert share is None or 0.0 <= share <= 1.0
