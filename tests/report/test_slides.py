"""Slides: who holds what and where bytes go, as counted; every text can be read; the set of all of them."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from test_plots import texts_of

from zerosim.cli.main import main
from zerosim.cli.plot_slides import SET, of_set
from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError
from zerosim.report.plots import flow_figure, stage_figure, stages_figure
from zerosim.report.plots.draw import draw
from zerosim.report.plots.flow import read_flows
from zerosim.report.plots.holdings import STRIPS, bounds, holdings, moments
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

SMALL: dict[str, Any] = dict(layers=3, hidden=16, heads=2, seq=8, vocab=64, steps=1)


@cache
def planned(stage: int, ranks: int = 4, collective: str = "direct") -> RunResult:
    config = plan_config(stage=stage, ranks=ranks, collective=collective, **SMALL)
    return plan(config, keep_events=True, every_rank=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pieces_are_the_live_bytes_and_cover_the_model_once(stage: int) -> None:
    """At the marks: the ledger's bytes; what is cut is held by one rank each, and by all together once."""
    result = planned(stage)
    held, psi = holdings(result), max(stop for _, stop in bounds(result).values())
    marks = {"before": "end_of_forward", "after": "end_of_backward"}
    for moment, mark in marks.items():
        for one in held[moment]:
            by_kind = result.memory[one.rank].marks[mark].by_kind
            assert one.nbytes == {strip: by_kind.get(strip, 0) for strip in STRIPS}
    cut = {0: (), 1: ("optim",), 2: ("grad", "optim"), 3: tuple(STRIPS)}[stage]
    for strip in STRIPS:
        pieces = [piece for one in held["after"] for piece in one.pieces[strip]]
        elements = [element for piece in pieces for element in range(piece.start, piece.stop)]
        assert sorted(elements) == sorted(list(range(psi)) * (1 if strip in cut else 4))


def test_during_backward_a_block_is_whole() -> None:
    held = holdings(planned(3))["during"]
    for one in held:
        assert one.unit == "h.1"
        assert {"unsharded_param"} <= {piece.kind for piece in one.pieces["param"]}
        assert {"unsharded_grad", "grad"} <= {piece.kind for piece in one.pieces["grad"]}
    at = moments(planned(3).events[0])
    assert at["before"] < at["during"] < at["after"]


@pytest.mark.parametrize("collective", ["direct", "ring"])
@pytest.mark.parametrize("stage", [0, 3])
def test_flows_are_what_ranks_sent(stage: int, collective: str) -> None:
    result = planned(stage, collective=collective)
    flows = read_flows(result.events)
    for rank in range(4):
        assert sum(sum(flow.sent[rank]) for flow in flows) == result.sent_bytes(rank, 0)
    expected = [("backward", "all_reduce")]
    if stage == 3:
        expected = [("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")]
    assert [(flow.phase, flow.op) for flow in flows] == expected
    for flow in flows:
        receivers = [sum(nbytes > 0 for nbytes in row) for row in flow.sent]
        assert receivers == [1 if collective == "ring" else 3] * 4


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_a_slide_can_be_read(theme: str) -> None:
    results = {f"ZeRO-{stage}": planned(stage) for stage in (1, 2, 3)}
    wide = planned(1, ranks=8)
    figures = [
        stage_figure(planned(3), holdings(planned(3)), "ZeRO-3"),
        stage_figure(wide, holdings(wide), "ZeRO-1"),
        stages_figure(results, {name: holdings(result)["after"] for name, result in results.items()}),
        flow_figure(planned(3), read_flows(planned(3).events), "ZeRO-3"),
    ]
    for chart in figures:
        figure = draw(chart, theme=theme)
        figure.draw_without_rendering()
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        texts = texts_of(figure)
        boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]
        assert len(boxes) > 8
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            wide_by = min(a.x1, b.x1) - max(a.x0, b.x0)
            high_by = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(wide_by, high_by) <= 1.5, f"{one!r} and {other!r} overlap"
        for words, box in boxes:
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width, words
        smallest = min(text.get_fontsize() for text in texts)
        assert smallest >= 14  # points, on a sheet of 12.8 inches
        assert chart.alt.count(".") >= 3


def test_the_set_is_made_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Each picture in both themes and forms; one of them is made here."""
    names = [name for name, _ in of_set()]
    assert len(names) == len(set(names)) == sum(2 if one.moves else 4 for one in SET)
    monkeypatch.setattr("zerosim.cli.plot_slides.SET", tuple(one for one in SET if one.name == "ring"))
    assert main(["plot", "--all", str(tmp_path / "set")]) == 0
    assert "wrote 2 pictures" in capsys.readouterr().out
    made = sorted(path.name for path in (tmp_path / "set").iterdir())
    assert made == ["ring-dark.svg", "ring.svg"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("owership -o x.png", "unknown figure 'owership': did you mean ownership?"),
        ("ownership --tp 2 -o x.png", "--tp 2: the picture is of data-parallel ranks alone; leave it out"),
        ("flow --ranks 16 -o x.png", "--ranks 16: one picture holds at most 8; choose 8 or fewer"),
        ("flow --ranks 1 -o x.png", "nothing is sent between ranks"),
        ("staircase --stage 2 -o x.svg", "ZeRO-2 gathers no units: there is no staircase; pass --stage 3"),
        ("staircase -o x.png", "-o x.png: the picture is animated, which needs SVG; choose a name that ends in .svg"),
        ("ring --ranks 9 -o x.svg", "--ranks 9: expected 2 to 6 in a drawn ring"),
        ("--all x memory", "--all x: writes the whole set, but memory is one figure; choose one of the two"),
        ("--all missing/set", "--all missing/set: cannot be written: No such file or directory; choose another folder"),
        ("--all there", "--all there: is a file; pass the name of a folder"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    assert main(["plot", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_numbers_of_a_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [word for key, value in SMALL.items() if key != "steps" for word in (f"--{key}", str(value))]
    assert main(["plot", "ownership", "--stage", "3", *small, "-o", str(tmp_path / "x.svg"), "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)["stages"]["ZeRO-3 (P_os+g+p)"]
    assert [one["rank"] for one in numbers["after"]] == [0, 1, 2, 3]
    config = RunConfig(**plan_config(stage=3, ranks=4, **SMALL).given)
    assert numbers["after"][1]["bytes"] == plan(config).memory[1].model_states()


def test_a_model_that_is_not_trained_has_no_backward() -> None:
    result = planned(3)
    with pytest.raises(InputError, match="there is no backward to show"):
        moments([event for event in result.events[0] if event.scope.phase != "backward"])
