"""Notebook pictures: well-formed, self-contained, escaped, legible on light and dark, and with the counted numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from colours import closest, hue

import zerosim
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.ledger.traffic import TrafficRow
from zerosim.report.notebook import LETTERS, TONES, memory_html, result_html, traffic_html
from zerosim.report.plots.style import KIND_PAINTS, contrast
from zerosim.stepper import LiveBuffer, OwnedSlice, Ownership
from zerosim.stepper.ownership import RANK_TONES
from zerosim.stepper.views import LiveTable, world_html

EVIL = '<script>alert("1")</script>&\''
VOID = {"br", "img", "polyline"}


def config(**changes: Any) -> RunConfig:
    small = dict(layers=1, hidden=16, heads=2, seq=7, micro_batch=1, steps=2, stage=3, ranks=3)
    return RunConfig(**{**small, **changes})


class Checker(HTMLParser):
    """Every tag is closed in its turn; keeps texts and styles. Shares of bars are in `flex`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.tags: set[str] = set()
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name in {"style", "title", "width", "height", "viewbox", "role", "aria-label", "points", "fill",
                            "stroke", "stroke-width"}, name  # fmt: skip
            if name == "style":
                self.styles.append(value or "")
            if name == "title":
                self.titles.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def evil_pages() -> Iterator[str]:
    yield LiveTable([LiveBuffer(EVIL, EVIL, EVIL, (2,), EVIL, 8, 0, 1)])._repr_html_()
    yield memory_html({EVIL: 8, "param": 2}, EVIL, {"param": 1})
    yield Ownership(2, (OwnedSlice(EVIL, 3, 0, 0, 2, 0), OwnedSlice(EVIL, 3, 1, 2, 4, 1)))._repr_html_()
    yield traffic_html([TrafficRow(0, EVIL, EVIL, EVIL, EVIL, EVIL, 1, 2, 3, 4)], EVIL)


def test_every_page_is_whole_self_contained_and_escaped() -> None:
    with zerosim.debug(config()) as world:
        world.until("all_gather", rank=2, phase="backward")
        owned = world.ownership()
        pages = [
            *evil_pages(),
            world.ranks[1].live()._repr_html_(),
            LiveTable()._repr_html_(),
            memory_html(world.ranks[1].memory().by_kind),
            memory_html({}),
            owned._repr_html_(),
            world_html(world.ranks, EVIL, [EVIL]),
            result_html(world.finish()),
            result_html(zerosim.plan(config(steps=1))),
        ]
    for page in pages:
        checked = Checker(page)
        assert not checked.tags & {"script", "style", "link", "img", "iframe"}
        assert "http" not in page
        assert "url(" not in page
        assert "class=" not in page


def test_text_takes_the_pages_own_colour() -> None:
    """What has a colour of its own for text has one behind it too, and can be read on it."""
    with zerosim.debug(config()) as world:
        world.until("end_of_backward")
        owned = world.ownership()
        pages = [world.ranks[0].live()._repr_html_(), world_html(world.ranks, ""), owned._repr_html_()]
    for style in (style for page in pages for style in Checker(page).styles):
        color = re.search(r"(?:^|;)color:([^;]+)", style)
        if color and color[1] != "inherit":
            assert color[1] == "#fff"
            background = re.search(r"background:[^;]*(#[0-9a-f]{6})", style)
            assert background
            assert contrast("#ffffff", background[1]) >= 3


@pytest.mark.parametrize("tone", [*TONES.values(), *RANK_TONES])
def test_a_tone_is_seen_on_light_and_on_dark(tone: str) -> None:
    for page in ("#ffffff", "#111111"):
        assert contrast(tone, page) >= 3


def test_kinds_have_the_hues_of_the_plots_and_a_letter_each() -> None:
    assert set(TONES) == set(LETTERS) == set(KIND_PAINTS) == {kind.value for kind in Kind}
    assert list(TONES) == list(KIND_PAINTS)
    assert len(set(LETTERS.values())) == len(LETTERS)
    for kind, paint in KIND_PAINTS.items():
        (angle, strength), (drawn, _) = hue(TONES[kind]), hue(paint.light)
        assert strength < 10 if kind in ("temp", "comm") else abs((angle - drawn + 180) % 360 - 180) < 50


def test_tones_are_told_apart_by_all_eyes() -> None:
    """Beside each other on a bar; tones of ranks too."""
    ranks = {f"rank {rank}": tone for rank, tone in enumerate(RANK_TONES)}
    for tones in (TONES, ranks):
        for eyes, least in {"all cones": 18, "protanopia": 10, "deuteranopia": 10, "tritanopia": 10}.items():
            distance, one, other = closest(tones, eyes)
            assert distance >= least, (eyes, one, other)


def test_pages_hold_what_was_counted() -> None:
    with zerosim.debug(config()) as world:
        world.until("end_of_backward", rank=1)
        rank = world.ranks[1]
        live, memory = rank.live(), rank.memory()
        cells = Checker(live._repr_html_()).texts
        assert [text for text in cells if text in {row.name for row in live}]
        for row in live:
            assert f"{row.nbytes:,}" in cells
            assert f"{row.nbytes:,} B" in repr(live)
        for page in (memory_html(memory.by_kind), live._repr_html_(), repr(live), world_html(world.ranks, "world")):
            assert f"{memory.total_bytes:,}" in page
        assert rank.status in Checker(world_html(world.ranks, "world")).texts
        result = world.finish()
    page = result_html(result)
    for number, memory in enumerate(result.memory):
        assert f"{memory.peak.total_bytes:,}" in page
        assert f"{sum(memory.model_states().values()):,}" in page
        assert f"{result.sent_bytes(number, 1):,}" in page
    assert f"{result.mean_losses[-1]:.4f}" in page
    rows = result.traffic[0]
    for row in rows:
        assert f"{row.sent_bytes:,}" in Checker(traffic_html(rows)).texts


def test_shares_of_a_bar_are_the_bytes() -> None:
    shares = [int(n) for n in re.findall(r"flex:(\d+) 1 0", memory_html({"param": 300, "optim": 900, "temp": 0}))]
    assert shares == [300, 900, 300, 900]  # all in one bar, then each in its row


def test_ownership_shows_slices_and_padding() -> None:
    owned = Ownership(2, (OwnedSlice("u", 7, 0, 0, 4, 0), OwnedSlice("u", 7, 1, 4, 8, 1)))
    page = Checker(owned._repr_html_())
    assert page.titles == [
        "u, rank 0: elements 0 to 4",
        "u, rank 1: elements 4 to 8",
        "u, rank 1: elements 4 to 8, of which 1 are padding",
    ]
    assert [s for s in page.styles if "repeating-linear-gradient" in s]
    line = owned.lines(8 + 16)[1]
    assert line.split()[-1] == "0000111."
    assert "rank 1: 4 elements, 1 of them padding" in repr(owned)


@pytest.mark.parametrize("changes", [dict(stage=0), dict(stage=2, partition="owner"), dict(stage=1, ranks=1)])
def test_ownership_of_whole_units(changes: dict[str, Any]) -> None:
    with zerosim.debug(config(**changes)) as world:
        owned = world.ownership()
    Checker(owned._repr_html_())
    text = repr(owned)
    if changes["stage"] == 0:
        assert text.count("every rank, all of it") == len({row.unit for row in owned.rows})
        assert "every rank" in owned._repr_html_()
    for rank in range(owned.ranks):
        own = sum(row.stop - row.start for row in owned.rows if row.rank == rank)
        assert f"rank {rank}: {own:,} elements" in text


def test_very_many_ranks_stay_a_picture() -> None:
    rows = tuple(OwnedSlice("u", 4096, rank, 4 * rank, 4 * rank + 4, 0) for rank in range(1024))
    page = Ownership(1024, rows)._repr_html_()
    Checker(page)
    assert len(page) < 60_000
    assert "0-15" in page
