"""The picture of a run's operands in 8 bits, and the command that draws it."""

from __future__ import annotations

import json
from pathlib import Path as File

import pytest
from test_plots import assert_readable

from zerosim.backends.numpy.narrow import Fates
from zerosim.cli.main import main
from zerosim.config.parts.fp8 import SCALINGS
from zerosim.errors import InputError
from zerosim.report.plots import operands_figure
from zerosim.report.plots.draw import draw
from zerosim.report.plots.panel import Box
from zerosim.report.plots.words import percent
from zerosim.train.operands import FORMATS, OPERANDS, Cast, Operands

SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--steps", "2"]


def counted() -> Operands:
    found = Operands(steps=1)
    for operand in OPERANDS:
        found.num[operand] = 1000
        for scaling in SCALINGS:
            for form in FORMATS:
                found.add(Cast(operand, scaling, form), Fates(1000, 0, 0, 0), 0)
    found.fates[Cast("gradients", "tensorwise", "e4m3")] = Fates(850, 20, 130, 0)
    found.fates[Cast("gradients", "delayed", "e4m3")] = Fates(995, 0, 0, 5)
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bars_are_the_shares(theme: str) -> None:
    chart = operands_figure(counted())
    ends = {panel.title: [box.x[1] for box in panel.of(Box)] for panel in chart.panels}
    assert ends.pop("output gradients in e4m3") == pytest.approx([0.005, 0.02, 0.13])
    assert not any(ends.values())
    assert [box.after for panel in chart.panels for box in panel.of(Box)] == ["0.5", "2", "13"]
    assert_readable(draw(chart, theme=theme))


def test_shares_have_few_digits() -> None:
    assert [percent(share) for share in (0, 1e-7, 2.2e-5, 0.0123, 0.4711)] == ["0", "<0.001", "0.002", "1", "47"]


def test_a_run_without_blocks_is_not_drawn() -> None:
    with pytest.raises(InputError, match="no linear map of a block ran"):
        operands_figure(Operands())


@pytest.mark.slow
def test_operands_writes_the_counts_that_it_draws(tmp_path: File, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.svg"
    assert main(["plot", "operands", *SMALL, "-o", str(out), "--json", "-"]) == 0
    said = capsys.readouterr()
    values = json.loads(said.out)
    assert values["figure"] == "operands"
    assert (values["config"]["ranks"], values["config"]["fp8"], values["steps"]) == (1, "none", 2)
    assert len(values["casts"]) == len(OPERANDS) * len(SCALINGS) * len(FORMATS)
    for cast in values["casts"]:
        of = values["operands"][cast["operand"]]
        kinds = ("full", "fewer_digits", "to_zero", "overflowed")
        assert sum(cast[kind] for kind in kinds) == of["numbers"] - of["zeros"]
    assert "output gradients" in said.err
    assert len([line for line in said.err.splitlines() if line.startswith("e4m3 ")]) == 15
