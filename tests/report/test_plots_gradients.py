"""The picture of a run's gradients, and the command that draws it."""

from __future__ import annotations

import json
from pathlib import Path as File

import numpy as np
import pytest

from zerosim.cli.main import main
from zerosim.errors import InputError
from zerosim.report.plots import gradients_figure
from zerosim.report.plots.draw import draw
from zerosim.report.plots.gradients import power_of_two
from zerosim.report.plots.panel import Box, Boxes, Note
from zerosim.train.gradients import FORMATS, POWERS, Gradients

SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--steps", "2"]


@pytest.mark.slow
def test_bars_are_the_counts() -> None:
    found = Gradients()
    found.add(np.array([2.0**-30, 2.0**-10, -1.5 * 2.0**-10, 2.0**-9], np.float32))
    hills, ranges, *casts = gradients_figure(found).panels
    (bars,) = hills.of(Boxes)
    assert {round(left): high for left, _, _, high in bars.corners} == {-30: 0.25, -10: 0.5, -9: 0.25}
    assert ranges.y.rows == FORMATS
    assert [panel.title for panel in casts] == list(FORMATS)
    for panel, name in zip(casts, FORMATS, strict=True):
        drawn = [box.y[1] - box.y[0] for box in panel.of(Box)]
        shares = [found.share(name, power)[what] for power in POWERS for what in ("to_zero", "overflowed")]
        assert drawn == pytest.approx([share for share in shares if share])
    assert casts[0].of(Note)[0].words == "25"  # 2^-30 is half of fp16's smallest number, and 2^4 times that still is
    assert all(draw(gradients_figure(found), theme=theme).axes for theme in ("light", "dark"))


def test_ranges_begin_and_end_where_the_formats_do() -> None:
    found = Gradients()
    found.add(np.array([1.0], np.float32))
    _, ranges, *_ = gradients_figure(found).panels
    bars = [box.x for box in ranges.of(Box)]
    # Full, then pale: fp16, bf16 (whose subnormal numbers lie far to the left), e4m3, e5m2.
    assert bars == [(-14, 16), (-24, -14), (-27, 19), (-6, 9), (-9, -6), (-14, 16), (-16, -14)]
    assert power_of_two(-24) == "2⁻²⁴"


def test_gradients_that_are_all_0_are_not_drawn() -> None:
    found = Gradients()
    found.add(np.zeros(3, np.float32))
    with pytest.raises(InputError, match="all 3 gradients are 0: there is nothing to draw"):
        gradients_figure(found)


@pytest.mark.slow
def test_gradients_writes_the_counts_that_it_draws(tmp_path: File, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "g.svg", tmp_path / "g.json"
    assert main(["plot", "gradients", *SMALL, "-o", str(out), "--json", str(figures), "--theme", "dark"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"wrote {out}; lost without a loss scale: fp16 ")
    values = json.loads(figures.read_text("utf-8"))
    assert values["figure"] == "gradients"
    assert (values["config"]["ranks"], values["config"]["precision"], values["steps"]) == (1, "fp32", 2)
    assert sum(values["exponents"].values()) == values["gradients"] - values["zeros"]
    assert len(values["casts"]) == len(FORMATS) * len(POWERS)
    assert values["formats"]["e4m3"] == {"smallest": 2.0**-9, "min_normal": 2.0**-6, "largest": 448.0}
    assert "2⁻²⁴ to 65504" in out.read_text("utf-8")
