"""The picture of a step in time: what its bars say is what the clock says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.nodes import find_node
from zerosim.config.run import plan_config
from zerosim.device.events import COMPUTE, CPU
from zerosim.errors import InputError
from zerosim.ledger.clock import Timeline
from zerosim.report.plots import streams_figure
from zerosim.report.plots.draw import draw
from zerosim.report.plots.history import live_in_time
from zerosim.report.plots.panel import Areas
from zerosim.report.plots.streams import BUBBLE, COMMUNICATION, bars_of
from zerosim.train.plan import plan, timeline_of
from zerosim.train.result import RunResult

A100 = cluster_of(find_hardware("a100-80"))


@pytest.fixture(scope="module")
def result() -> RunResult:
    settings = dict(layers=4, hidden=64, heads=4, seq=32, vocab=128, ranks=4, tp=2, pp=2, accumulate=3, stage=1)
    return plan(plan_config(**settings), keep_events=True)


@pytest.fixture(scope="module")
def timeline(result: RunResult) -> Timeline:
    return timeline_of(result, A100)


def test_bars_of_a_lane_follow_one_another_and_hold_its_time(timeline: Timeline) -> None:
    for track in timeline.tracks.values():
        bars = bars_of(track, COMPUTE)
        seconds = dict.fromkeys((bar.what for bar in bars), 0.0)
        for bar in bars:
            seconds[bar.what] += bar.stop - bar.start
        assert seconds.pop(BUBBLE) == pytest.approx(track.bubble)
        assert sum(seconds.values()) == pytest.approx(track.compute)
        assert {bar.words[:2] for bar in bars if bar.what == "backward"} == {"B0", "B1", "B2"}
        assert all(first.stop <= second.start + 1e-15 for first, second in pairwise(bars))
        assert seconds.keys() == {"forward", "backward", "optimizer"}
        assert {bar.what for bar in bars_of(track, COMMUNICATION)} == {"collective", "message"}
        assert sum(span.name in ("send", "recv") for span in track.spans) == 2 * 3  # each way, each microbatch


def test_live_bytes_are_drawn_by_kind_and_add_up_to_the_clocks(result: RunResult, timeline: Timeline) -> None:
    for rank, track in timeline.tracks.items():
        seconds, totals = zip(*track.live, strict=True)
        live = live_in_time(result.events[rank], seconds, 0, columns=10**6)
        assert live.live.sum(axis=0).tolist() == list(totals)
        assert live.seconds.tolist() == list(seconds)
        few = live_in_time(result.events[rank], seconds, 0, columns=50)
        assert len(few.seconds) <= 2 * 50 + 2
        assert few.live.sum(axis=0).max() == max(totals)
    figure = streams_figure(timeline, [0], events=result.events[0])
    lanes, below = figure.panels
    assert {"param", "grad", "optim", "activation"} <= set(below.of(Areas)[0].names)
    assert {"parameters", "optimizer states"} <= {words for words, _ in below.key}
    assert lanes.y.rows == ("compute", "communication")


def test_the_hosts_cpu_has_a_lane_where_it_steps() -> None:
    """Beside forward and backward, where the update is delayed; what lies on the host is no byte of the device."""
    on = cluster_of(find_hardware("v100-32"), node=find_node("dgx-2"))
    settings = dict(layers=4, hidden=64, heads=4, seq=32, vocab=128, ranks=1, stage=2, offload="optimizer=host")
    for late in (0, 1):
        planned = plan(plan_config(**settings, delayed_update=late), keep_events=True)
        timeline = timeline_of(planned, on)
        steps, computes = (bars_of(timeline.last, lane) for lane in (CPU, COMPUTE))
        assert "optimizer" in {bar.what for bar in steps}
        assert (steps[0].start < computes[0].stop) == bool(late)
        assert "collective" not in {bar.what for bar in bars_of(timeline.last, COMMUNICATION)}
        figure = streams_figure(timeline, [0], events=planned.events[0], step=late)
        lanes, below = figure.panels
        assert lanes.y.rows == ("compute", "its host's CPU", "communication")
        assert "optim" not in below.of(Areas)[0].names


@pytest.mark.slow
def test_ranks_that_have_no_lanes_are_refused(timeline: Timeline) -> None:
    figure = draw(streams_figure(timeline, sorted(timeline.tracks)), theme="dark")
    assert figure.get_label().startswith("A step of ")
    with pytest.raises(InputError, match="rank 1 was not simulated: another one stands for it; expected one of 0, 2"):
        streams_figure(timeline, [1])


@pytest.mark.slow
def test_the_command_draws_and_says_what_it_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "step.svg", tmp_path / "step.json"
    words = ["plot", "streams", "--gpu", "h100-80", "--ranks", "4", "--layers", "2", "--hidden", "64", "--heads", "4"]
    assert main([*words, "--stage", "3", "--prefetch", "1", "-o", str(out), "--json", str(figures)]) == 0
    values = json.loads(figures.read_text("utf-8"))
    [rank] = values["ranks"]
    parts = [
        rank["compute_s"],
        rank["slowed_s"],
        rank["bubble_s"],
        rank["host_s"],
        rank["copies_s"],
        *rank["exposed_s"].values(),
    ]
    assert sum(parts) == pytest.approx(values["step_s"])
    assert "modelled" in out.read_text("utf-8")
    assert "wrote" in capsys.readouterr().out
