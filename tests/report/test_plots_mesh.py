"""Pictures of meshes: memory by pipeline stage, and schedules as a Gantt picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.analysis.formulas import bubble
from zerosim.analysis.slots import slots_of
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.stages import Chunks
from zerosim.report.plots import memory_figure, schedule_figure
from zerosim.report.plots.by_stage import memory_bars, traffic_formulas
from zerosim.report.plots.draw import draw
from zerosim.report.plots.panel import Box
from zerosim.report.plots.style import THEMES, contrast
from zerosim.train.plan import plan

SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "micro_batch": 1, "steps": 1}


def test_memory_by_pipeline_stage() -> None:
    result = plan(RunConfig(**SIZES, ranks=8, tp=2, pp=4, stage=1, accumulate=4))
    bars = memory_bars({"ZeRO-1 (P_os)": result}, "peak")
    assert [bar.label for bar in bars] == [f"stage {stage}" for stage in range(4)]
    assert [bar.rank for bar in bars] == [0, 2, 4, 6]
    assert [bar.total_bytes for bar in bars] == [result.memory[rank].peak.total_bytes for rank in (0, 2, 4, 6)]
    figure = memory_figure({"ZeRO-1 (P_os)": result}, mark="peak")
    assert figure.title == "Bytes per rank at the peak, by pipeline stage"
    both = {"ZeRO-1 (P_os)": result, "ZeRO-0": result}
    assert [bar.label for bar in memory_bars(both)] == list(both)  # several ZeRO stages: a bar for each
    assert traffic_formulas({"ZeRO-1": result}) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_a_schedule_is_drawn_slot_by_slot(kind: str, chunks: int, theme: str) -> None:
    lists = [SCHEDULES[kind](4, stage, 8, chunks) for stage in range(4)]
    slots = slots_of(lists, Chunks(4, chunks, turns_back=kind == "zb-v"))
    chart = schedule_figure(slots, kind)
    (panel,) = chart.panels
    drawn = {box.name: (box.x, box.words) for box in panel.of(Box)}
    assert len(drawn) == sum(map(len, lists))
    for stage, own in enumerate(slots):
        for action, start, stop in own:
            name = f"stage{stage}.{action.letter}{action.slot}.{action.chunk}"
            assert drawn[name] == ((start, stop), (str(action.slot),))
    assert f"= {bubble(kind).at(p=4, m=8, v=chunks)}" in chart.subtitle
    assert ("By own span: 0" in chart.subtitle) == (kind == "zb-v")
    assert "which it is not" not in chart.subtitle
    assert all(contrast(THEMES[theme].color(paint), THEMES[theme].background) > 1.5 for _, paint in chart.key)
    assert {box.paint for box in panel.of(Box)} == {paint for _, paint in chart.key}
    assert len(draw(chart, theme=theme).axes[0].patches) == len(drawn)


def test_the_command_writes_the_picture_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "s.svg", tmp_path / "s.json"
    flags = ["--pp", "4", "--ranks", "4", "--accumulate", "8"]
    assert main(["plot", "schedule", *flags, "-o", str(out), "--json", str(figures)]) == 0
    values = json.loads(figures.read_text(encoding="utf-8"))
    assert values["bubble"] == {"counted": "3/8", "formula": "3/8", "own_span": "3/8"}
    assert len(values["stages"]) == 4
    assert values["stages"][3][0] == {"what": "forward", "micro_batch": 0, "chunk": 0, "start": 3, "stop": 4}
    assert out.read_bytes().startswith(b"<?xml")
    assert main(["plot", "schedule", "-o", str(out)]) == 2
    assert "pass --pp 2 or more" in capsys.readouterr().err
