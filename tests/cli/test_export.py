"""A trace by the documented rules: complete events nest, arrows have two ends, counters count what the ledger does."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config.run import RunConfig, plan_config
from zerosim.train import plan as planning
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

RUN = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--ranks", "4", "--tp", "2", "--pp", "2"]
RUN += ["--accumulate", "3", "--stage", "1"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    assert main(["export", "trace", "--gpu", "a100-80", "-o", str(file), *RUN]) == 0
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def test_every_event_has_what_its_kind_needs(trace: dict[str, Any]) -> None:
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "B", "E", "s", "f", "C"}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert event["ts"] >= 0
        assert event["ts"] == round(event["ts"] * 1e3) / 1e3  # whole nanoseconds
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 2"]  # one of each kind
    assert "not measured" in trace["otherData"]["times"]


def slices_by_thread(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[float, float, str, int]]]:
    """Start, end, name and depth of each. An end is that of what began last, and time does not go back."""
    found, open_ones = defaultdict(list), defaultdict(list)
    now: dict[tuple[int, int], float] = defaultdict(float)
    for event in trace["traceEvents"]:
        thread = event["pid"], event["tid"]
        if event["ph"] in ("B", "E"):
            assert event["ts"] >= now[thread]
            now[thread] = event["ts"]
        if event["ph"] == "B":
            open_ones[thread].append((event["ts"], event["name"]))
        elif event["ph"] == "E":
            start, name = open_ones[thread].pop()
            assert event["name"] == name
            assert start < event["ts"]
            found[thread].append((start, event["ts"], name, len(open_ones[thread])))
    assert not any(open_ones.values())
    return found


def test_slices_nest_on_each_thread(trace: dict[str, Any]) -> None:
    depths = {thread: {depth for *_, depth in slices} for thread, slices in slices_by_thread(trace).items()}
    assert {thread for thread, found in depths.items() if found == {0, 1, 2}} == {(0, 0), (2, 0)}  # phase, unit, kernel
    assert {frozenset(found) for thread, found in depths.items() if thread[1]} == {frozenset({0})}


def test_each_arrow_goes_forward_in_time_from_a_send_to_its_receive(trace: dict[str, Any]) -> None:
    ends: dict[str, dict[str, Any]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    assert len(ends) == 2 * 3  # forward and back, for each microbatch
    slices = slices_by_thread(trace)
    for pair in ends.values():
        assert pair["s"]["pid"] != pair["f"]["pid"]
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert pair["f"]["bp"] == "e"
        for end, name in (("s", "send"), ("f", "recv")):
            at = pair[end]["ts"]
            around = [slice for slice in slices[pair[end]["pid"], pair[end]["tid"]] if slice[0] <= at < slice[1]]
            assert [slice[2] for slice in around] == [name]


def test_the_counter_reaches_the_peak(trace: dict[str, Any]) -> None:
    settings = dict(layers=2, hidden=32, heads=2, seq=16, ranks=4, tp=2, pp=2, accumulate=3, stage=1)
    of_the_gpu = dict(recipe="usual", attention="flash")
    memory = plan(plan_config(**settings, **of_the_gpu), keep_events=True).memory
    for rank in (0, 2):
        counted = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
        assert max(counted) <= memory[rank].peak.total_bytes  # what lives for no time is not drawn
        assert max(counted) > 0.9 * memory[rank].peak.total_bytes


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", ["plot streams -o out.svg --json out.json", "export trace -o out.json"])
def test_a_step_in_time_runs_no_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    found, ran = [], []
    of_one = planning._plan

    def counting(config: RunConfig, *rest: Any) -> RunResult:
        ran.append(config.optim.steps or 1)
        return of_one(config, *rest)

    monkeypatch.setattr(planning, "_plan", counting)
    for steps in ([], ["--steps", "3"]):
        assert main([*words.split(), "--gpu", "a100-80", *steps]) == 0
        values = json.loads(Path("out.json").read_text("utf-8"))
        found.append(values.get("ranks", values.get("traceEvents")))
    assert ran == [1, 1]
    assert found[0] == found[1]
