"""Pictures of meshes: memory by pipeline stage, and schedules as a Gantt picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from zerosim.analysis.formulas import bubble
from zerosim.analysis.slots import slots_of
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.stages import Chunks
from zerosim.report.plots import memory_figure, schedule_figure
from zerosim.report.plots.by_stage import memory_bars, traffic_formulas
from zerosim.report.plots.style import contrast
from zerosim.train.plan import plan

SIZES: dict[str, Any] = {"layers": 4, "hidden": 16, "heads": 4, "seq": 8, "micro_batch": 1, "steps": 1}


def test_memory_by_pipeline_stage() -> None:
    result = plan(RunConfig(**SIZES, ranks=8, tp=2, pp=4, stage=1, accumulate=4))
    bars = memory_bars({"ZeRO-1 (P_os)": result}, "peak")
    assert [bar.label for bar in bars] == [f"stage {stage}" for stage in range(4)]
    assert [bar.rank for bar in bars] == [0, 2, 4, 6]
    assert [bar.total_bytes for bar in bars] == [result.memory[rank].peak.total_bytes for rank in (0, 2, 4, 6)]
    figure = memory_figure({"ZeRO-1 (P_os)": result}, mark="peak")
    assert figure.get_label() == "Bytes per rank at the peak, by pipeline stage"
    both = {"ZeRO-1 (P_os)": result, "ZeRO-0": result}
    assert [bar.label for bar in memory_bars(both)] == list(both)  # several ZeRO stages: a bar for each
    assert traffic_formulas({"ZeRO-1": result}) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_a_schedule_is_drawn_slot_by_slot(kind: str, chunks: int, theme: str) -> None:
    lists = [SCHEDULES[kind](4, stage, 8, chunks) for stage in range(4)]
    slots = slots_of(lists, Chunks(4, chunks, turns_back=kind == "zb-v"))
    figure = schedule_figure(slots, kind, theme=theme)
    drawn = {str(patch.get_gid()): (patch.get_x(), patch.get_width()) for patch in figure.axes[0].patches}  # type: ignore[attr-defined]
    assert len(drawn) == sum(map(len, lists))
    for stage, own in enumerate(slots):
        for action, start, stop in own:
            name = f"stage{stage}.{action.letter}{action.slot}.{action.chunk}"
            assert drawn[name] == (start, stop - start)
    text = " ".join(each.get_text() for each in figure.findobj(Text))  # type: ignore[attr-defined]
    assert f"= {bubble(kind).at(p=4, m=8, v=chunks)}" in text
    assert ("By own span: 0" in text) == (kind == "zb-v")
    assert "which it is not" not in text
    paper = "#ffffff" if theme == "light" else "#10151b"
    for patch in figure.axes[0].patches:
        red, green, blue, _ = patch.get_facecolor()
        color = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
        assert contrast(color, paper) > 1.5


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
