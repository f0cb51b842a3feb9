"""The picture of TFLOP/s: its points are plans, and what does not fit is marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.errors import InputError
from zerosim.report.plots import throughput_figure
from zerosim.report.plots.draw import draw
from zerosim.report.plots.panel import Line, Note
from zerosim.report.plots.throughput import Point
from zerosim.report.time import time_values
from zerosim.train.plan import plan

WIDE = ("--hidden", "64", "--heads", "4", "--gpu", "a100-80", "--stages", "0,3")


@pytest.mark.slow
def test_points_are_plans_of_that_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for along, words in (("parameters", ("--sizes", "1,2")), ("ranks", ("--ranks-list", "1,2", "--layers", "2"))):
        out = tmp_path / "x.svg"
        assert main(["plot", "throughput", *WIDE, *words, "-o", str(out), "--json", "-"]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["along"] == along
        assert "Modelled, not measured" in out.read_text("utf-8")
        for stage, line in ((0, numbers["lines"]["DDP"]), (3, numbers["lines"]["ZeRO-3"])):
            for point in line:
                sizes = dict(layers=point["layers"], hidden=64, heads=4, attention="flash", stage=stage, recipe="usual")
                cluster = cluster_of(find_hardware("a100-80"))
                result = plan(plan_config(**sizes, ranks=point["ranks"]), cluster=cluster)
                assert point["time"] == time_values(result, cluster)
                assert point["parameters"] == result.num_parameters
                assert point["fits"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_does_not_fit_is_hollow_and_said_to_be(theme: str) -> None:
    lines = {"DDP": [Point(1, 90.0, True), Point(8, 100.0, False)], "ZeRO-3": [Point(1, 80.0, True)]}
    chart = throughput_figure(lines, "ranks", trust="Never compared.")
    (panel,) = chart.panels
    assert [line.filled for line in panel.of(Line)] == [[True, False], [True]]
    assert [note.words for note in panel.of(Note)] == ["OOM"]
    assert "Never compared." in chart.notes
    assert any("Hollow, OOM" in note for note in chart.notes)
    first = draw(chart, theme=theme).axes[0].collections[0].get_facecolors()
    assert tuple(first[1]) != tuple(first[0])
    with pytest.raises(InputError, match="nothing to draw"):
        throughput_figure({}, "ranks")


def test_a_band_is_drawn_where_steps_were_measured() -> None:
    measured = [Point(1, 90.0, True, (70.0, 95.0)), Point(8, 100.0, True, (80.0, 120.0))]
    lines = {"DDP": measured, "ZeRO-3": [Point(1, 80.0, True)]}
    figure = throughput_figure(lines, "ranks")
    (panel,) = figure.panels
    assert [list(line.band) for line in panel.of(Line)] == [[(1, 70.0, 95.0), (8, 80.0, 120.0)], []]
    assert any("bands overlap are not ranked" in note for note in figure.notes)
    assert panel.y.ends[1] > 120
