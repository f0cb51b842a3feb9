"""The benchmark runs, says numbers, and judges goals by comparison. Nothing here depends on how fast anything is."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import SECONDS

from zerosim.bench import figures, machine, plans, processes, pytorch, suite
from zerosim.bench.contest import Budget, Contestant, Rounds, Timing, interleave
from zerosim.bench.figures import Figure
from zerosim.bench.products import BareProducts, watch
from zerosim.bench.training import TrainingRun, initial_weights, over_ranks, text_tokens
from zerosim.cli import bench
from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError, RankFailed
from zerosim.train.run import run

TINY = RunConfig(stage=0, layers=2, hidden=16, heads=2, seq=16, micro_batch=4, ranks=1, precision="fp32", lr=1e-3)
ONCE = Budget(0.0, min_rounds=2, max_rounds=2, warm_ups=1)
BUDGETS = suite.Budgets(ONCE, ONCE, ONCE, ONCE, Budget(0.0, min_rounds=1, max_rounds=1, warm_ups=0))
NUMPY = suite.SUITES["numpy"]


def held(config: RunConfig, **options: bool) -> TrainingRun:
    return TrainingRun(config, initial_weights(config), text_tokens(config), **options)


def rounds(*seconds: float) -> Rounds:
    return Rounds(tuple(Timing(each, each) for each in seconds), {})


@pytest.mark.slow
def test_every_ratio_of_a_whole_benchmark_is_a_positive_number_and_the_verb_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny model, measured once. So are the plans, whose own configurations are made at least."""
    assert all(plan_config(**fields) for fields, _ in plans.PLANS.values())
    small = {name: (dict(model="gpt", ranks=8), goal) for name, (_, goal) in plans.PLANS.items()}
    monkeypatch.setattr(plans, "PLANS", small)
    said: list[str] = []
    groups = list(suite.measure(NUMPY, {"tiny": TINY}, BUDGETS, {}, said.append))
    had = [figure for group in groups for figure in group.figures]
    found = [figure for figure in had if figure.value is not None]
    assert len(had) == 13 + len(plans.PLANS)
    assert len(found) == len(had) - (pytorch.version() is None)
    for figure in found:
        assert figure.value is not None
        assert math.isfinite(figure.value)
        assert figure.value > 0 or figure.unit == "s"
        assert figure.rounds == 2
        assert "NOT the same" not in figure.note
        assert figure.verdict in ("met", "missed") or figure.goal is None
    of_runs = {None, 0.15, 1.1, 1.5, 1.7, 1.15, 0.75, 1.3, 1.03}
    assert {figure.goal for figure in had} == of_runs | {9, 120, 160, 240, 360, 1400}
    assert said  # the user sees that it lives
    assert len(figures.table(had).splitlines()) == len(had) + 1
    assert strict(figures.to_json(had, machine.describe("numpy"), NUMPY.method))["schema"] == 1

    asked: list[Any] = []
    monkeypatch.setattr(suite, "measure", lambda *words, **options: asked.append(words) or groups)
    assert bench.main(arguments("--quick", "--json", str(tmp_path / "figures.json"))) == 0
    assert "goals met" in capsys.readouterr().out
    body = strict((tmp_path / "figures.json").read_text("utf-8"))
    assert {row["verdict"] for row in body["figures"]} <= {"met", "missed", None}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    [(chosen, _, budgets, *_)] = asked
    assert (chosen, budgets) == (NUMPY, NUMPY.quick)


def test_goals_are_judged_by_comparison() -> None:
    times = {"slow": rounds(2.0, 2.0), "fast": rounds(1.0, 1.0)}
    assert figures.ratio("", "", times, "slow", "fast", goal=1.99).verdict == "missed"
    assert figures.ratio("", "", times, "slow", "fast", goal=2.0).verdict == "met"
    assert figures.ratio("", "", times, "slow", "fast").verdict == ""
    assert figures.difference("", "", times, "slow", "fast", goal=0.5).verdict == "missed"
    assert Figure("", "", None, goal=1.0, note="no torch").verdict == ""


def test_a_figure_is_the_median_of_rounds_or_the_ratio_of_minima() -> None:
    times = {"a": rounds(2.0, 4.0, 3.0, 9.0, 5.0), "b": rounds(1.0, 1.0, 1.0, 1.0, 2.0)}
    figure = figures.ratio("m", "n", times, "a", "b")
    assert (figure.value, figure.low, figure.high, figure.rounds) == (3.0, 2.5, 4.0, 5)
    assert figures.ratio("m", "n", times, "a", "b", of_minima=True).value == 2.0
    assert figures.difference("m", "n", times, "a", "b", 1.0).value == 3.0
    assert figures.ratio("m", "n", {"a": rounds(3.0), "b": rounds(2.0)}, "a", "b").value == 1.5


def test_the_summary_names_what_was_missed() -> None:
    had = [Figure("0.8M", "bf16 / fp32", 1.6, goal=1.5), Figure("0.8M", "fp16 / fp32", 1.6, goal=2.0)]
    assert figures.summary(had) == "1 of 2 goals met; missed: 0.8M bf16 / fp32"


def test_json_is_strict() -> None:
    body = strict(figures.to_json([Figure("m", "n", None, goal=1.0, note="no torch")], {"cores": 2}, ""))
    assert body["figures"][0]["value"] is None
    assert body["figures"][0]["verdict"] is None
    with pytest.raises(AssertionError):
        figures.to_json([Figure("m", "n", math.nan)], {}, "")


def strict(text: str) -> dict:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_contestants_take_turns() -> None:
    order: list[str] = []

    class Fake(Contestant):
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> Timing:
            order.append(self.name)
            return Timing(1.0, 2.0)

    budget = Budget(0.0, min_rounds=3, max_rounds=3, warm_ups=1)
    measured = interleave({"a": Fake("a"), "b": Fake("b")}, budget, print, "fake")
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert measured == dict.fromkeys("ab", Rounds((Timing(1.0, 2.0),) * 3, {}))


@pytest.mark.quick(1)
@pytest.mark.parametrize("record", [True, False])
def test_a_held_run_trains_as_a_free_one(record: bool, tmp_path: Path) -> None:
    config = over_ranks(TINY)
    np.savez(tmp_path / "tokens.npz", tokens=np.stack([text_tokens(config)] * 3))
    free = run(config.replace(tokens=str(tmp_path / "tokens.npz"), steps=3))
    with held(config, record=record) as training:  # takes the first step
        for _ in range(2):
            seconds = training.step()
            assert seconds.device_s == seconds.host_s > 0
    assert [list(losses) for losses in zip(*training.losses, strict=True)] == free.losses


def test_meshes_are_measured_on_the_same_losses() -> None:
    case = suite.Case(NUMPY, BUDGETS, {}, print, "tiny", TINY, initial_weights(TINY), text_tokens(TINY))
    had = suite.meshes(case).figures
    assert [figure.name for figure in had] == ["tp 2, in turn / N = 1", "pp 2, 4 microbatches, in turn / N = 1"]
    assert {(figure.goal, figure.rounds, figure.note) for figure in had} == {(1.3, 2, "")}
    assert all(figure.value is not None and figure.value > 0 for figure in had)


def test_a_held_run_that_fails_says_why() -> None:
    with pytest.raises(RankFailed), TrainingRun(TINY, initial_weights(TINY), np.full((4, 17), 10**6)):
        pass


def test_the_products_of_a_step_are_seen_and_run_again() -> None:
    with held(TINY) as training:
        products = watch(training.step)
    bare = BareProducts(products)
    (flops,) = bare.flops.values()
    tokens, weights = (
        TINY.global_batch * TINY.model.seq,
        12 * TINY.model.layers * TINY.model.hidden**2 + TINY.model.vocab * TINY.model.hidden,
    )
    attention = 12 * TINY.model.layers * TINY.global_batch * TINY.model.seq**2 * TINY.model.hidden
    assert 6 * tokens * weights < flops <= 6 * tokens * weights + attention
    assert bare.step().device_s > 0
    with pytest.raises(RuntimeError, match="linear maps"):
        suite.check_products(TINY, BareProducts(products[:3]))


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    sleeper = processes.Processes([[sys.executable, "-c", program]], 2.0, {})
    with pytest.raises(processes.ProcessFailed, match="more than 2 s"):
        sleeper.step()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text("utf-8")), 0)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(processes.ProcessFailed, match="ended with 1: ValueError: no"):
        processes.Processes([[sys.executable, "-c", "raise ValueError('no')"]], SECONDS, {}).step()


def test_without_pytorch_its_figures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "version", lambda: None)
    case = suite.Case(NUMPY, BUDGETS, {}, print, "tiny", TINY, initial_weights(TINY), text_tokens(TINY))
    had = [*suite.one_rank(case).figures, processes.against_fsdp("tiny", TINY, ONCE, print)]
    missing = [figure for figure in had if figure.value is None]
    assert [figure.note for figure in missing] == ["PyTorch is not installed"] * 2


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        bench.main(arguments("--json", str(tmp_path / "no" / "figures.json")))


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_what_others_took_is_a_share() -> None:
    share = machine.OtherLoad().share()
    assert share is None or 0.0 <= share <= 1.0
