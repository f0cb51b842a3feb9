"""Advice about the options that a person gave: those that cost too much come first, before any other change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from zerosim.analysis.cheapest import cheapest_fits
from zerosim.analysis.left_out import MAY_GO, left_out
from zerosim.cli.main import main
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import OutOfMemory
from zerosim.train.plan import peak_of

SMALL: dict[str, Any] = dict(layers=6, hidden=32, heads=2, seq=16, vocab=256, stage=3, ranks=4)
WORDS = [f"--{name}={value}" for name, value in SMALL.items()]


def costs(**each: int) -> Any:
    """A trial in which every option that is not at its default adds some bytes to the 100 of all."""

    def trial(config: RunConfig, capacity: int) -> Mapping[str, int]:
        held = {name: nbytes for name, nbytes in each.items() if config.value(name) != OPTIONS[name].default}
        return {"param": 100 + sum(held.values())}

    return trial


def words_of(config: RunConfig, capacity: int, trial: Any) -> list[str]:
    found = cheapest_fits(config, capacity, trial, given=config.given)
    return [tip.split(" would fit")[0] for tip in found]


def test_the_flag_that_does_not_fit_is_named_first_and_before_more_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole gradients of 6 blocks, accumulated over microbatches, beside slices of everything else."""
    given = RunConfig(**SMALL, micro_batch=1, saves="megatron", attention="flash", accumulate=4, grad_sync=False)
    without, least = peak_of(given.replace(grad_sync=True)), peak_of(given.replace(recompute="full", loss="in-place"))
    assert without < least  # no other change of the ladder is enough
    flags = ["plan", *WORDS, "--accumulate", "4", "--no-grad-sync", "--limit", str(without)]
    assert main([*flags, "--quiet", "--json", "-"]) == 3
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice.startswith("leaving out --no-grad-sync would fit: its peak is ")
    assert "--ranks" not in advice
    assert main([word for word in flags if word != "--no-grad-sync"]) == 0
    capsys.readouterr()
    assert main(flags) == 3
    assert "Cheapest change: leaving out --no-grad-sync would fit" in " ".join(capsys.readouterr().out.split())


def test_defaults_of_a_plan_are_not_told_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--limit", "20KB", "--quiet", "--json", "-"]) == 3
    assert "out" not in json.loads(capsys.readouterr().out)["advice"]


def test_each_costly_option_is_told_else_as_few_together_as_are_needed() -> None:
    given = RunConfig(**SMALL, grad_sync=False, foreach=True, keep_last_unit=True, reshard_after_forward=False)
    trial = costs(grad_sync=50, foreach=40, keep_last_unit=1, reshard_after_forward=60)
    assert words_of(given, 201, trial)[:2] == ["leaving out --no-reshard-after-forward", "leaving out --no-grad-sync"]
    assert words_of(given, 150, trial)[:1] == ["leaving out --no-reshard-after-forward --no-grad-sync"]
    assert words_of(given, 99, trial) == []


def test_an_option_that_another_one_needs_goes_with_it() -> None:
    """--keep-upcast has no effect without --upcast-grads, which is refused."""
    given = RunConfig(**SMALL, upcast_grads=True, keep_upcast=True)
    assert words_of(given, 100, costs(upcast_grads=1))[0] == "leaving out --upcast-grads --keep-upcast"


def test_what_is_too_costly_beside_all_other_changes_is_left_out_of_them() -> None:
    given = RunConfig(**SMALL, grad_sync=False, micro_batch=1)

    def trial(config: RunConfig, capacity: int) -> Mapping[str, int]:
        return {"activation": 100 + 50 * (not config.grads.sync) + 50 * (config.memory.recompute != "full")}

    flags = "--attention flash --recompute full without --no-grad-sync"
    assert words_of(given, 100, trial) == [flags]


def test_only_options_about_how_a_step_is_executed_are_left_out() -> None:
    kept = {
        "model",
        "layers",
        "ranks",
        "tp",
        "pp",
        "stage",
        "precision",
        "grad_dtype",
        "optimizer",
        "lora_rank",
        "freeze",
    }
    assert not kept & set(MAY_GO)
    given = RunConfig(**SMALL, precision="fp32", optimizer="adamw", grad_sync=False, foreach=False)
    assert [words for _, words in left_out(given, given.given, lambda changed: True)] == ["--no-grad-sync"]


def test_a_run_is_told_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    given = RunConfig(**SMALL, accumulate=4, grad_sync=False, steps=1)
    capacity = peak_of(given.replace(grad_sync=True))
    flags = [*WORDS, "--accumulate=4", "--no-grad-sync", "--steps=1", f"--capacity={capacity}"]
    assert main(["run", *flags, "-q"]) == 3
    assert "Tried for you: leaving out --no-grad-sync would fit" in " ".join(capsys.readouterr().err.split())


def test_a_trial_that_refuses_is_passed_over() -> None:
    given = RunConfig(**SMALL, grad_sync=False, micro_batch=1)

    def trial(config: RunConfig, capacity: int) -> Mapping[str, int]:
        if config.grads.sync:
            raise OutOfMemory("the host is full", memory="host")
        return {"param": 1000}

    assert words_of(given, 100, trial) == []
