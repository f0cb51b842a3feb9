"""Pictures: what is drawn are the results' integers, every text can be read, and files are the same bytes twice."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image as mpimg
import numpy as np
import pytest
from colours import closest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from zerosim.cli.main import main
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.device.events import Alloc, Event, Free, Kernel, Mark, Retag, Scope
from zerosim.errors import InputError
from zerosim.report.plots import memory_figure, scaling_figure, timeline_figure, traffic_figure
from zerosim.report.plots.bars import Bar
from zerosim.report.plots.by_stage import MOMENTS, memory_bars, traffic_bars, traffic_formulas
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.draw import draw, spread, write_chart
from zerosim.report.plots.history import COLUMNS, Peak, Span, read_history
from zerosim.report.plots.page import named, write_figure
from zerosim.report.plots.panel import Areas, Box, Line, Rule
from zerosim.report.plots.panel import Peak as Dot
from zerosim.report.plots.style import KIND_PAINTS, LINE_PAINTS, OP_PAINTS, THEMES, contrast, mixed
from zerosim.report.plots.words import stage_label, tick_bytes
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

STAGES = (0, 1, 2, 3)
SIZES = [None, (5.0, 3.0)]
GB = 10**9
V100 = ("V100", 32 * GB)


@cache
def planned(stage: int, keep_events: bool = False, **changes: Any) -> RunResult:
    """Three blocks on three ranks, of which N divides no unit."""
    small = dict(layers=3, hidden=10, heads=2, seq=7, vocab=257, ranks=3, micro_batch=1, precision="fp16")
    return plan(RunConfig(stage=stage, **{**small, **changes}), keep_events=keep_events)


def runs(*stages: int, **changes: Any) -> dict[str, RunResult]:
    return {stage_label(stage): planned(stage, **changes) for stage in stages or STAGES}


def of_psi(psi: int, ranks: int) -> dict[str, list[tuple[int, int]]]:
    """Points of a model of Ψ parameters in mixed precision, by hand."""
    cut = {"DDP": (16, 0), "ZeRO-1": (4, 12), "ZeRO-2": (2, 14), "ZeRO-3": (0, 16)}
    numbers = [2**power for power in range(ranks.bit_length())]
    return {name: [(n, whole * psi + part * psi // n) for n in numbers] for name, (whole, part) in cut.items()}


# -- what is drawn ----------------------------------------------------------------------------------
def marks_of(chart: Chart, kind: type[Any]) -> list[Any]:
    return [mark for panel in chart.panels for mark in panel.of(kind)]


def drawn_bars(chart: Chart) -> dict[tuple[int, str], float]:
    """Lengths of bars by (row, part)."""
    lengths = {}
    for box in marks_of(chart, Box):
        row, _, part = box.name.removeprefix("bar").partition(".")
        if part:
            lengths[int(row), part] = box.x[1] - box.x[0]
    return lengths


def totals(chart: Chart) -> list[str]:
    return [box.after for box in marks_of(chart, Box) if box.after]


def expected_bars(bars: list[Bar]) -> dict[tuple[int, str], float]:
    return {(row, part): nbytes for row, bar in enumerate(bars) for part, nbytes in bar.parts.items() if nbytes}


def with_gid(figure: Figure, gid: str) -> list[Any]:
    return figure.findobj(lambda artist: artist.get_gid() == gid)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mark", MOMENTS)
def test_memory_bars_are_the_ledgers_bytes(mark: str) -> None:
    results = runs()
    bars = memory_bars(results, mark)
    for bar, result in zip(bars, results.values(), strict=True):
        snapshots = [memory.peak if mark == "peak" else memory.marks[mark] for memory in result.memory]
        assert bar.parts == dict(snapshots[bar.rank].by_kind)
        assert bar.total_bytes == max(snapshot.total_bytes for snapshot in snapshots)
    assert drawn_bars(memory_figure(results, mark=mark)) == expected_bars(bars)


@pytest.mark.slow
def test_stages_hold_what_the_paper_says() -> None:
    """Figure 1: 7.5B parameters on 64 ranks, printed 120, 31.4, 16.6 and 1.9 GB."""
    results = runs(model="flat", params=7_500_000_000, ranks=64, **UNSET)
    assert [round(bar.total_bytes / GB, 1) for bar in memory_bars(results)] == [120.0, 31.4, 16.6, 1.9]
    assert totals(memory_figure(results, limit=V100)) == ["120 GB", "31.4 GB", "16.6 GB", "1.88 GB"]


def test_uneven_ranks_are_named() -> None:
    results = runs(partition="owner")
    bars = memory_bars(results, "peak")
    peaks = [[memory.peak.total_bytes for memory in result.memory] for result in results.values()]
    assert [bar.rank for bar in bars] == [row.index(max(row)) for row in peaks]
    words = " ".join(memory_figure(results, mark="peak").notes)
    assert "the rank that holds most" in words
    assert all(f"rank {bar.rank}" in words for bar in bars if not bar.alike)
    assert "Every rank holds the same." in memory_figure(runs(0)).notes


def test_traffic_bars_are_what_was_sent() -> None:
    results = runs(partition="owner") | runs(2, 3)
    bars = traffic_bars(results)
    for bar, result in zip(bars, results.values(), strict=True):
        sent = [result.sent_bytes(rank, 0) for rank in range(3)]
        assert bar.total_bytes == max(sent) == sent[bar.rank]
    assert drawn_bars(traffic_figure(results)) == expected_bars(bars)


def test_formulas_are_drawn_where_they_are() -> None:
    results = runs()
    psi = results["DDP"].num_parameters
    lines = traffic_formulas(results)
    assert [line.nbytes for line in lines] == [Fraction(2 * psi * 2 * 2, 3), Fraction(3 * psi * 2 * 2, 3)]
    assert all(line.label.startswith("formula") for line in lines)
    rules = marks_of(traffic_figure(results), Rule)
    assert [(rule.words, rule.x) for rule in rules] == [(line.label, float(line.nbytes)) for line in lines]
    assert sum(results["DDP"].sent_bytes(rank, 0) for rank in range(3)) == 3 * lines[0].nbytes
    assert traffic_formulas({**results, "fp32": planned(3, precision="fp32")}) == []
    assert traffic_formulas(runs(3, ranks=1)) == []


def test_limit_is_drawn_where_it_is() -> None:
    (rule,) = marks_of(near := memory_figure(runs(), limit=("", 20_000)), Rule)
    assert (rule.x, rule.words) == (20_000, "limit: 20.0 KB")
    (line,) = with_gid(draw(near), "rule")
    assert set(line.get_xdata()) == {20_000}
    far = draw(memory_figure(runs(), limit=V100))
    assert not with_gid(far, "rule")
    assert any("beyond this axis" in text.get_text() for text in far.axes[0].texts)
    (rule,) = marks_of(chart := scaling_figure(of_psi(10**9, 64), limit=("", 3 * GB)), Rule)
    assert rule.y == 3 * GB
    assert len(with_gid(draw(chart), "rule")) == 1
    assert not with_gid(draw(scaling_figure(of_psi(10**9, 64), limit=("", 3))), "rule")
    events = planned(3, keep_events=True).events[0]
    (rule,) = marks_of(timeline_figure([events], [0], 0, limit=("", 50_000)), Rule)
    assert rule.y == 50_000
    assert "Above this axis: limit: 1.00 GB." in timeline_figure([events], [0], 0, limit=("", GB)).notes


def test_scaling_lines_go_through_their_points() -> None:
    points = of_psi(7_500_000_000, 1024)
    for line in marks_of(scaling_figure(points, limit=V100), Line):
        assert list(line.points) == points[line.name]
        assert line.filled == [nbytes <= 32 * GB for _, nbytes in line.points]


# -- the timeline -----------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", STAGES)
def test_the_marked_peak_is_the_ledgers(stage: int) -> None:
    result = planned(stage, keep_events=True)
    for step in (None, 0):
        peak = result.memory[0].peak
        history = read_history(result.events[0], step)
        assert (history.peak.nbytes, history.peak.scope) == (peak.total_bytes, peak.scope)
        figure = timeline_figure([result.events[0]], [0], step)
        (dot,) = marks_of(figure, Dot)
        assert dot.where == (history.peak.index + 1, peak.total_bytes)
        assert peak.scope.unit in dot.words[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", STAGES)
def test_areas_end_at_each_mark_with_the_ledgers_bytes(stage: int) -> None:
    result = planned(stage, keep_events=True)
    events = [event for event in result.events[0] if event.scope.step == 0]
    history = read_history(result.events[0], 0)
    moments = dict(zip(history.at.tolist(), history.live.T.tolist(), strict=True))
    for index, event in enumerate(events):
        if isinstance(event, Mark):
            by_kind = dict(zip(history.kinds, moments[index + 1], strict=True))
            assert {kind: n for kind, n in by_kind.items() if n} == dict(result.memory[0].marks[event.name].by_kind)
    (areas,) = marks_of(chart := timeline_figure([result.events[0]], [0], 0), Areas)
    assert np.sum(areas.values, axis=0).max() == result.memory[0].peak.total_bytes
    top = max(patch.get_paths()[0].vertices[:, 1].max() for patch in draw(chart).axes[0].collections)
    assert top == result.memory[0].peak.total_bytes


def test_two_runs_are_compared_on_the_same_axes() -> None:
    runs = [planned(3, keep_events=True, recompute=recompute) for recompute in ("none", "full")]
    figure = timeline_figure([run.events[0] for run in runs], [0, 0], 0, names=["nothing again", "blocks again"])
    assert [panel.y.label for panel in figure.panels] == ["nothing again", "blocks again"]
    assert len({(panel.x.ends, panel.y.ends) for panel in figure.panels}) == 1
    assert figure.title == "Live bytes on rank 0, step 0"
    assert_readable(draw(figure))
    with pytest.raises(InputError, match="1 names for 2 panels"):
        timeline_figure([run.events[0] for run in runs], [0, 0], 0, names=["one"])


def test_a_history_by_hand() -> None:
    before, first, last = Scope(-1), Scope(0, "forward", "a"), Scope(0, "backward", "a")
    events: list[Event] = [
        Alloc(before, 1, 10, 16, "param", 0),
        Alloc(first, 2, 5, 8, "temp", 0),
        Retag(first, 2, "grad"),
        Retag(first, 2, "grad"),
        Kernel(last, "add", "vector", 1, 1, 1),
        Free(last, 2),
    ]
    history = read_history(events, 0)
    assert dict(zip(history.kinds, history.live.tolist(), strict=True)) == {
        "param": [10] * 6, "temp": [0, 5, 0, 0, 0, 0], "grad": [0, 0, 5, 5, 5, 0],
    }  # fmt: skip
    assert history.at.tolist() == [0, 1, 2, 3, 4, 5]
    assert history.peak == Peak(0, 15, first)
    assert history.phases == (Span("forward", 0, 3), Span("backward", 3, 5))
    assert read_history(events).num_events == 6


def test_phases_and_units_are_where_they_are() -> None:
    history = read_history(planned(3, keep_events=True).events[0], 0)
    assert [span.name for span in history.phases if span.end - span.start > 1] == ["forward", "backward", "optimizer"]
    assert [(a.end, a.end == b.start) for a, b in itertools.pairwise(history.phases)]
    assert history.phases[-1].end == history.num_events
    assert [span.name for span in history.units if span.name.startswith("h.")] == [
        *("h.0", "h.1", "h.2"), *("h.2", "h.1", "h.0"),
    ]  # fmt: skip


@cache
def many(count: int, seed: int = 0) -> list[Event]:
    """Events of three kinds, one of which is a lone spike."""
    draw, live, events, scope = random.Random(seed), [], [], Scope(0, "forward", "h.0")
    for number in range(count):
        if number == count // 3:
            events += [Alloc(scope, -1, 10**12, 10**12, "temp", 0), Free(scope, -1)]
        elif live and draw.random() < 0.45:
            events.append(Free(scope, live.pop(draw.randrange(len(live)))))
        elif draw.random() < 0.3:
            events.append(Kernel(scope, "add", "vector", 1, 1, 1))
        else:
            live.append(number)
            events.append(Alloc(scope, number, draw.randrange(10**6), 0, draw.choice(["param", "activation"]), 0))
    return events


@pytest.mark.slow
def test_a_long_record_keeps_its_peak_and_is_quick() -> None:
    events = many(100_000)
    start = time.process_time()
    history = read_history(events, 0)
    figure = draw(timeline_figure([events], [0], 0))
    assert time.process_time() - start < 10  # of the processor's time; usually a second
    assert len(history.at) <= 2 * COLUMNS + 3
    whole = read_history(events, 0, columns=10**6)
    assert history.peak == whole.peak
    assert whole.peak.index == 100_000 // 3
    assert history.live.sum(axis=0).max() == history.peak.nbytes > 10**12
    rows = dict(zip(whole.at.tolist(), whole.live.T.tolist(), strict=True))
    assert all(rows[at] == live for at, live in zip(history.at.tolist(), history.live.T.tolist(), strict=True))
    assert with_gid(figure, "peak")


def test_history_refuses_what_it_cannot_know() -> None:
    events = planned(3, keep_events=True).events[0]
    with pytest.raises(InputError, match=r"step 7: .*0 to 0"):
        read_history(events, 7)
    with pytest.raises(InputError, match="whole record"):
        read_history(events[200:], 0)
    with pytest.raises(InputError, match="step 0"):
        read_history([], 0)
    with pytest.raises(InputError, match="at most 8"):
        timeline_figure([events] * 9, range(9), 0)
    with pytest.raises(InputError, match="one for each"):
        timeline_figure([events], [0, 1], 0)
    with pytest.raises(InputError, match="too low"):
        draw(timeline_figure([events] * 8, range(8), 0), size=(5, 3))


# -- every text can be read -------------------------------------------------------------------------
def texts_of(figure: Figure) -> list[Text]:
    """Every text that is drawn."""
    found = list(figure.texts)
    for axes in figure.axes:
        found += axes.texts
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found.append(axis.label)
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text()]


def assert_readable(figure: Figure) -> None:
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts_of(figure)]
    assert len(boxes) > 4
    width, height = figure.bbox.width, figure.bbox.height
    for words, box in boxes:
        assert box.x0 >= 0, words
        assert box.y0 >= 0, words
        assert box.x1 <= width, words
        assert box.y1 <= height, words
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(wide, high) <= 1.5, f"{one!r} and {other!r} overlap by {wide:.1f} x {high:.1f} dots"


UNSET = dict(layers=None, hidden=None, heads=None, vocab=None)
LONG = ("NVIDIA A100-SXM4 with HBM2e", 80 * GB)
AWKWARD: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[str, int] | None]] = {
    "plain": (STAGES, {}, ("V100", 40_000)),
    "one stage": ((3,), {}, ("V100", 40_000)),
    "one rank": (STAGES, dict(ranks=1), ("V100", 40_000)),
    "far limit": (STAGES, {}, LONG),
    "tiny limit": (STAGES, {}, ("V100", 1)),
    "limit at a bar's end": (STAGES, {}, ("V100", 52_000)),
    "owners": (STAGES, dict(partition="owner"), None),
    "1T": (STAGES, dict(model="flat", params=10**12, ranks=1024, bucket_bytes=None, **UNSET), LONG),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), [("plain", None), *((case, SIZES[-1]) for case in AWKWARD)])
def test_bars_can_be_read(case: str, size: tuple[float, float] | None) -> None:
    stages, changes, limit = AWKWARD[case]
    results = runs(*stages, **changes)
    for mark in ("end_of_backward", "peak"):
        assert_readable(draw(memory_figure(results, limit=limit, mark=mark), size=size))
    assert_readable(draw(traffic_figure(results), size=size))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("stage", STAGES[::3])
def test_a_limit_hides_no_number(stage: int, number: int) -> None:
    """No line runs through a total or a part's bytes, and none of them is left out for it."""
    beyond, size = (0.4, 0.99, 1.02)[number % 3], (None, (5.0, 3.0))[number % 2]
    limit = int(beyond * memory_bars(runs())[stage].total_bytes)
    free, limited = memory_figure(runs()), memory_figure(runs(), limit=("", limit))
    assert totals(free) == totals(limited)
    without, numbers = (
        {text.get_gid(): text for text in texts_of(draw(one, size=size)) if text.get_gid()} for one in (free, limited)
    )
    for gid, text in without.items():
        assert numbers[gid].get_text().split()[-2:] == text.get_text().split()[-2:]
        paper = numbers[gid].get_bbox_patch()
        assert paper is not None  # on the line it stands on paper of its own
        assert paper.get_facecolor()[3] == 1
        assert numbers[gid].get_zorder() > 3


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("points", "limit"),
    [
        (of_psi(7_500_000_000, 1024), V100),
        (of_psi(7_500_000_000, 1024), LONG),
        (of_psi(10**12, 65536), ("V100", 1)),
        (of_psi(10**12, 1), ("V100", 10**18)),
        ({"ZeRO-3": [(n, 5) for n in range(1, 100)]}, None),
        ({f"variant {n}": [(4, 1000 + n), (8, 900)] for n in range(9)}, V100),
    ],
)
def test_lines_can_be_read(points: Mapping[str, Any], limit: Any, size: tuple[float, float] | None) -> None:
    assert_readable(draw(scaling_figure(points, limit=limit, subtitle="Ψ = 7.50B parameters"), size=size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "limit"),
    [(None, None), ((5.0, 3.0), (LONG[0], 30_000)), ((5.0, 3.0), LONG), ((10.0, 6.0), ("V100", 60_000))],
)
def test_timelines_can_be_read(limit: Any, size: tuple[float, float] | None) -> None:
    events = planned(3, keep_events=True, accumulate=2).events[0]
    named = [
        event._replace(scope=event.scope._replace(unit="model.layers.$17$." + event.scope.unit)) for event in events
    ]
    for shown in (events, named, many(20_000)):
        assert_readable(draw(timeline_figure([shown], [0], 0, limit=limit), size=size))
    assert_readable(draw(timeline_figure([events] * 2, [0, 1], None, limit=limit), size=size))
    for panels in (3, 4, 8):
        assert_readable(draw(timeline_figure([events] * panels, range(panels), 0, limit=limit)))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_limit_near_the_peak_does_not_run_through_its_label(size: tuple[float, float] | None) -> None:
    events = planned(3, keep_events=True, accumulate=2).events[0]
    peak = read_history(events, 0).peak.nbytes
    for near in (peak - 1, peak, peak + 1, int(peak * 1.05), int(peak * 1.15)):
        figure = draw(timeline_figure([events], [0], 0, limit=("V100", near)), size=size)
        assert_readable(figure)
        (label,) = with_gid(figure, "peak label")
        paper = label.get_bbox_patch()
        assert paper.get_facecolor()[3] == 1
        assert label.get_zorder() > with_gid(figure, "rule")[0].get_zorder()


@pytest.mark.slow
def test_long_words_are_wrapped_or_cut_short() -> None:
    points, limit = of_psi(10**9, 64), ("a device whose name " * 5, 8 * GB)
    assert_readable(draw(scaling_figure(points, limit=limit, subtitle="one word and another " * 12), size=(5, 3.5)))
    assert_readable(draw(memory_figure(runs(), limit=(limit[0], 40_000)), size=(5, 3)))


def test_labels_are_spread() -> None:
    assert spread([0.2, 0.5, 0.8], 0.1) == pytest.approx([0.2, 0.5, 0.8])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    for wanted, pitch in (([1.0, 1.0, 1.0], 0.2), ([0.0, 0.0, 0.5], 0.3), ([0.1] * 10, 0.1)):
        places = spread(wanted, pitch)
        assert all(b - a >= pitch - 1e-9 for a, b in itertools.pairwise(places))
        assert places[0] >= pitch / 2 - 1e-9
        assert places[-1] <= 1 - pitch / 2 + 1e-9


def test_words_on_axes() -> None:
    assert [tick_bytes(value) for value in (0, 999, 1000, 2.5e9, 1e12, 2e16)] == [
        "0", "999 B", "1 KB", "2.5 GB", "1 TB", "20 PB",
    ]  # fmt: skip
    assert named("ZeRO-3\n(P_os+g+p)") == "ZeRO-3\n($P_{os+g+p}$)"
    assert named("costs $5") == r"costs \$5"


# -- colours ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("theme", THEMES)
def test_colours_can_be_told_apart(theme: str) -> None:
    sheet = THEMES[theme]
    for text in (sheet.text, sheet.muted):
        assert contrast(text, sheet.background) >= 4.5
    for paints in (KIND_PAINTS, OP_PAINTS):
        assert all(contrast(sheet.color(paint), sheet.background) >= 3 for paint in paints.values())
    for paint in LINE_PAINTS:  # their labels are written in their colour
        assert contrast(sheet.color(paint), sheet.background) >= 4.5
    lines = {str(index): paint for index, paint in enumerate(LINE_PAINTS)}
    for paints in (KIND_PAINTS, OP_PAINTS, lines):
        colors = {name: sheet.color(paint) for name, paint in paints.items()}
        for eyes, least in {"all cones": 18, "protanopia": 12, "deuteranopia": 12, "tritanopia": 10}.items():
            distance, one, other = closest(colors, eyes)
            assert distance >= least, (eyes, one, other)


def test_every_kind_and_verb_has_a_paint() -> None:
    from zerosim.device.device import Kind
    from zerosim.verbs import VERBS

    assert set(KIND_PAINTS) == {kind.value for kind in Kind}
    assert set(OP_PAINTS) == set(VERBS) - {"recv", "barrier"}  # which send nothing
    assert mixed("#000000", "#ffffff") == "#7f7f7f"


# -- files and the command --------------------------------------------------------------------------
def bytes_of(chart: Chart, form: str, theme: str = "light") -> bytes:
    file = io.BytesIO()
    write_chart(chart, file, form, theme=theme)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "theme"), list(zip(["png", "svg"], THEMES, strict=True)))
def test_files_are_the_same_bytes_twice(form: str, theme: str) -> None:
    events = planned(3, keep_events=True).events[0]

    def draw() -> list[bytes]:
        figures = [
            memory_figure(runs(), limit=("V100", 40_000)),
            traffic_figure(runs()),
            scaling_figure(of_psi(10**9, 64)),
            timeline_figure([events], [0], 0),
        ]
        return [bytes_of(figure, form, theme) for figure in figures]

    first = draw()
    assert first == draw()
    for data in first:
        assert data.startswith(b"\x89PNG" if form == "png" else b"<?xml")


def test_svg_is_xml_that_names_nothing_outside() -> None:
    svg = bytes_of(memory_figure(runs(), limit=("V100 <&>", 40_000)), "svg").decode()
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<!DOCTYPE" not in svg
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.endswith("href"):
                assert value.startswith("#")
            assert not re.search(r"url\((?!#)", value)
            assert "http" not in value


SVG = "{http://www.w3.org/2000/svg}"


def texts_in(svg: bytes) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow
def test_svg_has_real_text_and_a_title() -> None:
    """Texts can be searched and read aloud, in a font that a reader has; formulas from left to right."""
    events = planned(3, keep_events=True).events[0]
    titles = {
        "Bytes per rank when backward ends": memory_figure(runs(), limit=("V100 <&>", 40_000)),
        "Bytes sent per rank in one step": traffic_figure(runs()),
        "Bytes per rank when backward ends, by number of ranks": scaling_figure(of_psi(10**9, 64)),
        "Live bytes on rank 0, step 0": timeline_figure([events], [0], 0),
    }
    for title, chart in titles.items():
        svg, figure = bytes_of(chart, "svg"), draw(chart)
        assert [element.text for element in ET.fromstring(svg).iter(f"{SVG}title")] == [title]
        figure.draw_without_rendering()
        drawn = [text.get_text().replace(r"\$", "$") for text in texts_of(figure)]
        expected = [re.sub(r"\$P_\{(.*?)\}\$", r"P\1", text) for text in drawn]
        lines = [part for text in expected for line in text.split("\n") for part in re.split(r"(\(Pos.*?\))", line)]
        assert sorted(texts_in(svg)) == sorted(line.strip() for line in lines if line.strip())
        families = set(re.findall(rb"font(?:-family)?: ([^;\"]*)", svg))
        assert families
        assert all(family.endswith(b"Verdana, Geneva, sans-serif") for family in families)


@pytest.mark.slow
def test_figure_1_and_a_timeline_are_small_files() -> None:
    results = runs(model="flat", params=7_500_000_000, ranks=64, **UNSET)
    assert len(bytes_of(memory_figure(results, limit=V100), "svg")) < 60_000
    events = plan(RunConfig(model="gpt2-xl", stage=3, ranks=64, steps=1, **PLAN_DEFAULTS), keep_events=True).events[0]
    figure = timeline_figure([events], [0], 0, limit=V100)
    assert len(read_history(events, 0).at) > 2000
    assert len(bytes_of(figure, "svg")) < 300_000


def drawn_path(data: str) -> list[tuple[float, float]]:
    """Where a path of steps goes, point by point."""
    places: list[tuple[float, float]] = []
    x, y = 0.0, 0.0
    for name, words in re.findall(r"([Mmlhvz])([^A-Za-z]*)", data):
        numbers = [float(word) for word in re.findall(r"-?[\d.]+", words)]
        dx, dy = (*numbers, 0)[:2] if name != "v" else (0, *numbers)
        x, y = x + dx, y + dy
        places.append((round(x, 2), round(y, 2)))
    return places


def test_a_timelines_path_loses_nothing_that_is_seen() -> None:
    """Each moment's bytes are where they are, to a hundredth of a point: as exactly as 80 dots to a millimetre show."""
    events = many(3000)
    chart = timeline_figure([events], [0], 0)
    svg, figure = ET.fromstring(bytes_of(chart, "svg")), draw(chart)
    (group,) = (element for element in svg.iter(f"{SVG}g") if element.get("id") == "total")
    corners = drawn_path(group[0].get("d", ""))
    history, axes = read_history(events, 0), figure.axes[0]
    at, live = np.append(history.at, history.num_events), history.live.sum(axis=0)
    dots = 72 / figure.dpi
    places = axes.transData.transform(np.column_stack([at[:-1], live])) * dots
    places[:, 1] = 72 * figure.get_size_inches()[1] - places[:, 1]
    ends = axes.transData.transform(np.column_stack([at[1:], live]))[:, 0] * dots
    level = 0
    for (x, y), end in zip(places, ends, strict=True):
        middle = (x + end) / 2
        while corners[level + 1][0] < middle - 0.011:
            level += 1
        reached = [corner for corner in corners[level : level + 4] if abs(corner[1] - y) < 0.011]
        assert reached, (x, y)


def test_a_hatchs_small_tile_is_its_whole_picture() -> None:
    """What lies on the tile that is written repeats on matplotlib's own picture, along and down."""
    for paint in (*KIND_PAINTS.values(), *OP_PAINTS.values()):
        if paint.hatch:
            figure, look = Figure(figsize=(2, 2), dpi=72 * 5), {"facecolor": "w", "edgecolor": "k", "linewidth": 0}
            figure.add_artist(Rectangle((0, 0), 1, 1, hatch=paint.hatch, **look))
            svg = io.BytesIO()
            write_figure(figure, svg, "svg")
            pattern = re.search(rb'<pattern [^>]*width="(\d+)" height="(\d+)"', svg.getvalue())
            assert pattern is not None
            wide, high = (5 * int(side) for side in pattern.groups())
            assert wide < 5 * 72
            file = io.BytesIO()
            figure.savefig(file, format="rgba")
            dots = np.frombuffer(file.getvalue(), np.uint8).reshape(720, 720, 4)[..., 0].astype(int)
            assert dots.std() > 0
            for shifted in (np.roll(dots, high, 0), np.roll(dots, wide, 1)):
                inside = np.abs(shifted - dots)[high:-high, wide:-wide]
                assert inside.max() <= 40, paint.hatch  # of 255: anti-aliasing


def test_a_notebooks_picture_is_on_paper_of_its_own() -> None:
    """Whatever the page's theme and matplotlib's settings, no text stands on another colour than it was chosen for."""
    for theme in THEMES:
        figure = draw(memory_figure(runs(3)), theme=theme)
        with matplotlib.rc_context({"savefig.transparent": True, "savefig.facecolor": "red"}):
            dots = mpimg.imread(io.BytesIO(figure._repr_png_()[0]))
        paper = [int(THEMES[theme].background[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        for corner in (dots[0, 0], dots[-1, -1], dots[0, -1]):
            assert corner.tolist() == pytest.approx([*paper, 1.0], abs=0.01)


@pytest.mark.slow
def test_a_picture_says_in_words_what_it_shows() -> None:
    """In a notebook's metadata, and as an SVG's description: title, colours in words, and what stands at the ends."""
    bars = memory_figure(runs(), mark="peak")
    data, metadata = bars._repr_png_()
    assert data.startswith(b"\x89PNG")
    alt = metadata["alt"]
    assert alt.startswith("Bytes per rank at the peak. ")
    assert all(f"{name}: {total}" in alt for name, total in zip(runs(), totals(bars), strict=True))
    tide = timeline_figure([planned(3, keep_events=True).events[0]], [0], 0)
    for chart in (bars, tide):
        words = {words for words, _ in chart.key}
        assert {"parameters", "optimizer states", "activations"} <= words
        assert not words & set(KIND_PAINTS)
        assert "Colours: parameters, " in chart.alt
        [described] = [element.text for element in ET.fromstring(bytes_of(chart, "svg")).iter(f"{SVG}desc")]
        assert described == chart.alt == draw(chart).alt
    assert marks_of(tide, Dot)[0].words[0] in tide.alt


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plot", *words])
    out, err = capsys.readouterr()
    return code, out, err


SMALL = ("--layers", "2", "--hidden", "8", "--heads", "2", "--seq", "4")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("figure", "form"),
    [*itertools.product(["memory", "scaling", "timeline", "traffic"], ["png", "svg"]), ("memory", "SVG")],
)
def test_command_writes_the_figure_and_its_numbers(
    figure: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{figure}.{form}"
    more = ("--ranks-list", "1,2") if figure == "scaling" else ("--ranks", "2")
    code, out, err = run_cli(capsys, figure, *SMALL, *more, "-o", str(path), "--json", "-", "--theme", "dark")
    assert (code, err) == (0, f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG" if form == "png" else b"<?xml")
    numbers = json.loads(out)
    assert (numbers["schema"], numbers["figure"]) == (1, figure)


@pytest.mark.slow
def test_numbers_are_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def numbers(figure: str, *words: str) -> dict[str, Any]:
        return json.loads(run_cli(capsys, figure, *SMALL, *words, "-o", str(tmp_path / "x.svg"), "--json", "-")[1])

    config = RunConfig(**{**PLAN_DEFAULTS, "layers": 2, "hidden": 8, "heads": 2, "seq": 4, "ranks": 2})
    results = {stage: plan(config.replace(stage=stage)) for stage in STAGES}
    memory = numbers("memory", "--ranks", "2", "--capacity", "3KB")
    assert memory["limit"] == {"name": "", "bytes": 3000}
    assert [bar["bytes"] for bar in memory["bars"]] == [
        dict(result.memory[0].marks["end_of_backward"].by_kind) for result in results.values()
    ]
    traffic = numbers("traffic", "--ranks", "2", "--stages", "3,0")
    assert [bar["total_bytes"] for bar in traffic["bars"]] == [results[s].sent_bytes(0, 0) for s in (3, 0)]
    assert [line["bytes"] for line in traffic["formulas"]] == [n * results[0].num_parameters for n in (2, 3)]
    scaling = numbers("scaling", "--ranks-list", "2", "--mark", "peak", "--stages", "1")
    assert scaling["lines"] == {"ZeRO-1": [[2, results[1].memory[0].peak.total_bytes]]}
    timeline = numbers("timeline", "--ranks", "2", "--stage", "2", "--rank", "all")
    assert [panel["peak"]["bytes"] for panel in timeline["panels"]] == [
        memory.peak.total_bytes for memory in results[2].memory
    ]


def test_a_scenario_is_taken_anywhere_on_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "run.toml"
    scenario.write_text("layers = 1\nhidden = 8\nheads = 2\nseq = 4\nranks = 2\nsteps = 3\ncapacity = '1KB'\n", "utf-8")
    out = str(tmp_path / "x.svg")
    for words in ((str(scenario), "--step", "2", "-o", out), ("-o", out, "--step", "2", str(scenario))):
        code, said, _ = run_cli(capsys, "timeline", "--json", "-", *words)
        assert code == 0
        numbers = json.loads(said)
        assert numbers["panels"][0]["peak"]["step"] == numbers["step"] == 2
        assert numbers["limit"]["bytes"] == 1000


def test_a_device_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.png"
    out = run_cli(capsys, "memory", *SMALL, "--gpu", "v100-32", "-o", str(path), "--json", "-")[1]
    assert json.loads(out)["limit"] == {"name": "v100-32", "bytes": 32 * GB}


@pytest.mark.slow
def test_beside_the_states_stands_what_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a limit: each bar, what its peak is more, and the reserve; without one and for a flat model bars alone."""

    def bars(*words: str) -> list[dict[str, Any]]:
        out = run_cli(capsys, "memory", *words, "-o", str(tmp_path / "x.svg"), "--json", "-")[1]
        return list(json.loads(out)["bars"])

    sizes = (*SMALL, "--ranks", "2", "--pp", "2", "--stage", "1")  # one pipeline: a bar for each stage
    sizes = (*SMALL, "--ranks", "2", "--pp", "2", "--stage", "1", "--attention", "flash")  # a bar for each stage
    peaks = {bar["label"]: bar["total_bytes"] for bar in bars(*sizes, "--mark", "peak")}
    kept = bars(*sizes, "--limit", "3KB", "--reserve", "500")
    assert len(kept) == len(peaks) == 2
    for bar in kept:
        beyond = bar["beyond"]
        assert beyond["outside the program"] == 500
        assert bar["total_bytes"] + beyond["up to the peak"] == peaks[bar["label"]]
    assert "In brackets, the bytes that decide" in (tmp_path / "x.svg").read_text("utf-8")
    assert all("beyond" not in bar for bar in bars(*sizes))
    flat = ("--model", "flat", "--params", "1K", "--units", "1", "--ranks", "2", "--gpu", "a100-80")
    assert all("beyond" not in bar for bar in bars(*flat))


def test_figures_refuse_nothing_to_draw() -> None:
    for chart_of in (memory_figure, traffic_figure, scaling_figure):
        with pytest.raises(InputError, match="nothing to draw"):
            chart_of({})
    with pytest.raises(InputError, match="theme 'blue'"):
        draw(memory_figure(runs(3)), theme="blue")
    with pytest.raises(InputError, match="mark 'end'"):
        memory_figure(runs(3), mark="end")
    with pytest.raises(InputError, match="at least 1"):
        scaling_figure({"DDP": [(1, 0)]})
