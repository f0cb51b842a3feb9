"""The picture of addresses: what is drawn are the extents that an allocator gave, read from a finished record."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from test_plots import assert_readable

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.allocator import arena_knobs, caching_knobs
from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.blocks import MIB
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.events import Alloc, Event, Free, Mark, Retag, Scope
from zerosim.errors import InputError
from zerosim.report.export.extents import Extent, read_addresses
from zerosim.report.plots import addresses_figure
from zerosim.report.plots.draw import draw, write_chart
from zerosim.report.plots.panel import Boxes, Rule
from zerosim.train.plan import plan

SMALL = RunConfig(layers=3, hidden=16, heads=4, seq=16, ranks=2, stage=2, steps=1, recompute="full", micro_batch=2)


def by_hand() -> list[Event]:
    """In an arena of 100: 60 and 20 live, the 60 go, 70 come. They fit where the 20 are moved."""
    init, step = Scope(), Scope(0, "forward", "h.0")
    return [
        Alloc(init, 1, 60, 0, "param", 0),
        Alloc(init, 2, 20, 0, "optim", 0),
        Free(step, 1),
        Mark(step, "here"),
        Alloc(step, 3, 70, 0, "activation", 0),
        Retag(step, 3, "kept"),
    ]


def test_a_record_by_hand() -> None:
    shown = read_addresses(by_hand(), Arena(100), step=0)
    assert shown.live == (
        Extent(0, 60, 0, 1, "param", ""),
        Extent(60, 20, 0, 3, "optim", ""),
        Extent(20, 70, 3, 4, "activation", "h.0"),
        Extent(0, 20, 3, 5, "optim", ""),
        Extent(20, 70, 4, 5, "kept", "h.0"),
    )
    assert shown.reserved == (Extent(0, 100, 0, 5),)
    assert (shown.num_events, shown.num_bytes, shown.refusal) == (5, 100, None)
    assert (shown.peaks.moved_bytes, shown.peaks.moves) == (20, 1)
    refused = read_addresses(by_hand(), Arena(100, arena_knobs("defragment:False")), step=0)
    assert refused.refusal is not None
    assert refused.room is not None
    assert (refused.refusal.nbytes, refused.room.largest_hole, refused.room.free_bytes) == (70, 60, 80)
    with pytest.raises(InputError, match="step 4"):
        read_addresses(by_hand(), Arena(100), step=4)


@pytest.mark.parametrize("conf", [None, "expandable_segments:True"])
def test_extents_add_up_to_the_ledgers_peaks_and_never_overlap(conf: str | None) -> None:
    config = SMALL.replace(allocator="caching", allocator_conf=conf)
    shown = read_addresses(plan(SMALL, keep_events=True).events[0], CachingAllocator(None, caching_knobs(conf)))
    held = plan(config).memory[0].allocator
    assert shown.peaks == held
    for extents, most in ((shown.live, shown.peaks.requested_bytes), (shown.reserved, shown.peaks.reserved_bytes)):
        totals = []
        for moment in range(shown.num_events):
            there = sorted((one.address, one.nbytes) for one in extents if one.start <= moment < one.end)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(there))
            assert max((a + size for a, size in there), default=0) <= shown.num_bytes
            totals.append(sum(size for _, size in there))
        assert max(totals) == most


def test_a_page_given_back_is_cut_out_of_what_was_taken() -> None:
    """30 MiB, 30 more, the first go, 50 come: of the 40 MiB that were taken first one page of 20 is given back."""
    where = Scope()
    sizes = [Alloc(where, id, size * MIB, 0, "temp", 0) for id, size in ((1, 30), (2, 30), (3, 50))]
    allocator = CachingAllocator(110 * MIB, caching_knobs("expandable_segments:True"))
    shown = read_addresses([sizes[0], sizes[1], Free(where, 1), sizes[2]], allocator)
    at_the_end = [(one.address // MIB, one.nbytes // MIB) for one in shown.reserved if one.end == shown.num_events]
    assert sorted(at_the_end) == [(20, 20), (40, 20), (60, 60)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_draws_them(theme: str) -> None:
    chart = addresses_figure(read_addresses(by_hand(), Arena(100), step=0), "arena", step=0)
    (panel,) = chart.panels
    corners = {boxes.name: set(boxes.corners) for boxes in panel.of(Boxes)}
    assert corners["live.optim"] == {(0, 60, 3, 80), (3, 0, 5, 20)}
    assert corners["live.kept"] == {(4, 20, 5, 90)}
    assert corners["reserved"] == {(0, 0, 5, 100)}
    svg = io.BytesIO()
    write_chart(chart, svg, "svg", theme=theme)
    assert f"<title>{chart.title}</title>".encode() in svg.getvalue()
    for name, wanted in corners.items():
        (drawn,) = draw(chart).findobj(lambda artist, name=name: artist.get_gid() == name)
        paths = [path.vertices for path in drawn.get_paths()]  # type: ignore[attr-defined]
        assert {(*path.min(axis=0), *path.max(axis=0)) for path in paths} == wanted


def test_out_of_memory_is_told_in_words_that_can_be_read() -> None:
    shown = read_addresses(by_hand(), Arena(100, arena_knobs("defragment:False")))
    chart = addresses_figure(shown, "arena")
    (rule,) = next(chart.panels).of(Rule)
    assert (rule.x, rule.words) == (shown.num_events, "out of memory: 70 B of activation; 80 B free, largest hole 60 B")
    for size in (None, (5.0, 3.0)):
        figure = draw(chart, size=size)
        assert rule.words in [text.get_text() for text in figure.axes[0].texts]
        assert_readable(figure)


def test_the_command_writes_the_picture_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "a.svg", tmp_path / "a.json"
    flags = ["--layers", "2", "--hidden", "16", "--heads", "2", "--ranks", "2", "--seq", "16", "-o", str(out)]
    assert main(["plot", "addresses", *flags, "--allocator", "caching", "--json", str(figures)]) == 0
    values = json.loads(figures.read_text(encoding="utf-8"))
    assert values["peaks"]["reserved_bytes"] == max(start + size for start, size, _, _ in values["reserved"])
    assert {kind for kind, *_ in values["live"]} >= {"param", "optim", "activation"}
    assert out.read_bytes().startswith(b"<?xml")
    capsys.readouterr()
    for words, said in (
        ([], "--allocator exact"),
        (["--allocator", "arena"], "--capacity"),
        (["--allocator", "caching", "--rank", "2"], "--rank 2"),
        (["--allocator", "caching", "--step", "1"], "--step 1"),
        (["--allocator", "caching", "--allocator-conf", "max_split_size:1"], "did you mean 'max_split_size_mb'"),
    ):
        assert main(["plot", "addresses", *flags, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
