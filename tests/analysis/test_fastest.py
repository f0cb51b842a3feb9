"""The search for the fastest configuration finds what running every one of them finds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerosim.analysis.fastest import fastest, ladders, least_seconds
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.train.plan import Figures, figures_within

SMALL: dict[str, Any] = dict(layers=2, hidden=64, heads=4, seq=32, vocab=256, ranks=4)
A100 = cluster_of(find_hardware("a100-80"), node_gpus=2)
BATCH = 4


@pytest.mark.slow
def test_it_finds_what_running_all_finds_and_no_step_ends_before_its_bound() -> None:
    config, bound = plan_config(**SMALL), least_seconds(A100)
    everything: dict[RunConfig, Figures] = {}
    for ladder in ladders(config, BATCH):
        for asked in ladder:
            took = figures_within(asked, 10**12, A100)
            assert took is not None
            assert took.time is not None
            assert took.time.seconds >= bound(asked)
            everything[asked] = took
    capacity = sorted(took.peak_bytes for took in everything.values())[len(everything) // 3]
    ran: list[RunConfig] = []

    def trial(asked: RunConfig) -> Figures | None:
        ran.append(asked)
        return everything[asked] if everything[asked].peak_bytes <= capacity else None

    def room(asked: RunConfig) -> bool:
        ran.append(asked)
        return figures_within(asked, capacity) is not None

    result = fastest(config, BATCH, trial, bound, room)
    fits = [took for took in everything.values() if took.peak_bytes <= capacity]
    best = min(took.time.seconds for took in fits if took.time is not None)
    assert result.found[0].time.seconds == best
    assert result.tried == len(ran) < len(everything)
    assert all(one.config.global_batch == BATCH for one in result.found)
    assert len({one.config for one in result.found}) == 10
    seconds = [one.time.seconds for one in result.found]
    assert seconds == sorted(seconds)
    for ladder in ladders(config, BATCH):  # of each, the least recompute that fits: nothing faster was left out
        left = [asked for asked in ladder if everything[asked].peak_bytes <= capacity]
        if left and left[0] not in {one.config for one in result.found}:
            time = everything[left[0]].time
            assert time is not None
            assert time.seconds >= seconds[-1]
        times = [took.time.seconds for took in (everything[asked] for asked in ladder) if took.time is not None]
        assert times == sorted(times)


def test_the_flags_that_are_printed_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for name in ("layers", "hidden", "heads", "seq") for word in (f"--{name}", str(SMALL[name]))]
    words = [*sizes, "--gpu", "a100-80"]
    asked = ["fit", "--find", "fastest", *words, "--ranks", "2", "--global-batch", "4"]
    assert main([*asked, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    best = json.loads(out)["found"][0]
    flags = next(line for line in err.splitlines() if line.startswith("--ranks 2")).split()
    assert main(["plan", *words, *flags, "--json", "-", "--quiet"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["time"] == best["time"]
    assert planned["peak_bytes"] == best["peak_bytes"]


def test_the_other_searches_say_how_fast_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--hidden", "64", "--heads", "4", "--gpu", "a100-80", "--json", "-", "--all"]
    assert main(["fit", "--find", "ranks", *words]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out)
    assert values["time"]["tokens_per_s"] > 0
    assert f"{values['time']['tokens_per_s']:,.0f} tokens/s" in " ".join(err.split())
    assert main(["fit", "--find", "mesh", *words]) == 0
    assert json.loads(capsys.readouterr().out)["meshes"][0]["time"]["modelled_on"] == "a100-80"


def test_an_interrupted_search_shows_the_best_so_far(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ran = 0

    def trial(asked: RunConfig, capacity: int, cluster: Any) -> Figures | None:
        nonlocal ran
        ran += 1
        if ran > 2:
            raise KeyboardInterrupt
        return figures_within(asked, capacity, cluster)

    monkeypatch.setattr("zerosim.train.plan.figures_within", trial)
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["fit", "--find", "fastest", "--gpu", "a100-80", "--global-batch", "4", *words]) == 130
    said = capsys.readouterr().out
    assert "Interrupted after 2 configurations: there may be faster ones." in " ".join(said.split())
    assert "--micro-batch" in said


def test_a_mesh_and_stage_that_nothing_fits_are_tried_once() -> None:
    """However many rows and however much recompute there are to try; its smallest step is asked for without a time."""
    asked: list[RunConfig] = []
    smallest: list[RunConfig] = []
    config = plan_config(**SMALL)
    result = fastest(config, 64, asked.append, lambda one: 1.0, lambda one: bool(smallest.append(one)))

    def place(one: RunConfig) -> tuple[Any, ...]:
        return one.mesh.axes, one.parallel.zero_stage, one.parallel.sequence_parallel

    every = {place(ladder[0]) for ladder in ladders(config, 64)}
    assert len(every) < result.candidates
    assert len(asked) == len(smallest) == len(every) == len({place(one) for one in asked})
    assert {(one.data.micro_batch, one.data.accumulate, one.memory.recompute) for one in smallest} == {(1, 1, "full")}
    assert result.tried == result.too_much == 2 * len(every)
    assert not result.found


def test_where_some_rows_do_not_fit_no_more_are_tried_with_the_same_recompute() -> None:
    """But for all of them at once, which need no sums of gradients."""
    asked: list[RunConfig] = []
    result = fastest(plan_config(**SMALL), 64, asked.append, lambda one: float(one.data.micro_batch), lambda one: True)
    assert not result.found
    assert {one.data.micro_batch for one in asked if one.data.accumulate > 1} == {1}
    assert any(one.data.accumulate == 1 for one in asked)
