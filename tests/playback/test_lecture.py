"""The player in a room: pieces travel, copies vanish, the lecture view is read from the last row."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser

import zerosim
from zerosim.config import RunConfig
from zerosim.playback import Recorded, encode, page, record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="not installed: Chromium, in which the player is tried"),
]

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, micro_batch=1, steps=1, collective="ring")
WORDS = "document.querySelector('.words').textContent"
WORLD = "document.querySelector('.world').innerHTML"
SMALLEST = """(() => {
  const sizes = [];
  for (const one of document.querySelectorAll('main *')) {
    if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    if (!one.getClientRects().length || one.tagName === 'title') continue;
    const scale = one.ownerSVGElement ? one.ownerSVGElement.getScreenCTM().a : 1;
    sizes.push(parseFloat(getComputedStyle(one).fontSize) * scale);
  }
  return Math.min(...sizes);
})()"""
"""The size of the smallest text that is seen, in pixels."""
HEADS_MEET = """[...document.querySelectorAll('.world [data-pick^=r]')].filter((one) => {
  const [name, size] = [...one.querySelectorAll('text')].map((text) => text.getBoundingClientRect());
  return name.right > size.left || size.right > one.parentElement.querySelector('rect').getBoundingClientRect().right;
}).length"""
"""How many ranks' names and bytes meet each other, or end outside of their card."""
COVERED = """(() => {
  const box = (one) => one.getBoundingClientRect();
  const pill = box(document.querySelector('[data-pick^=c] rect'));
  const meets = (b) => b.left < pill.right && b.right > pill.left && b.top + 2 < pill.bottom && b.bottom - 2 > pill.top;
  return [...document.querySelectorAll('.world [data-pick^=r] text')].filter((one) => meets(box(one))).length;
})()"""
"""How many names and bytes of ranks the pill of a collective covers."""

APART = """(() => {
  const lines = (one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    return [...range.getClientRects()];
  };
  const [where] = lines(document.querySelector('#where'));
  const above = lines(document.querySelector("#now")).filter((line) => line.top < where.bottom);
  return Math.min(...above.map((line) => where.left - line.right));
})()"""
"""How far the sentence's first line ends before the event's number, in pixels."""


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    runs = [record(RunConfig(stage=stage, ranks=4, **SMALL)) for stage in (0, 3)]
    return encode(*(Recorded(one.result, one.lines, limit=100_000) for one in runs))


@pytest.fixture(scope="module")
def file(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lecture") / "page.html"
    path.write_text(page(data), "utf-8")
    return path


def at_of(browser: Browser, words: str) -> int:
    """Step on until the sentence matches; return the moment."""
    for _ in range(200):
        browser.key("n")
        if re.match(words, browser.eval(WORDS)):
            return int(browser.eval("Number(document.querySelector('#slider').value)"))
    raise AssertionError(words)


def test_shards_hop_round_the_ring_and_copies_vanish(browser: Browser, data: dict[str, Any], file: Path) -> None:
    run = data["runs"][1]
    flat = next(at for at, one in enumerate(run["flats"]) if one["name"] == "h.0")
    browser.open(file, "run=1")
    gather = at_of(browser, "All-gather #2 of h.0 has ended")
    browser.key("n")
    still = browser.eval(WORLD)  # the moment after: freed, without any motion
    assert browser.eval("document.getAnimations().filter((one) => !(one instanceof CSSAnimation)).length") == 0
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    browser.key("ArrowLeft")
    browser.key("ArrowLeft")
    browser.key("n")
    hops = browser.eval("[...document.querySelectorAll('.flight')].map((one) => one.dataset.hop)")
    found = {tuple(map(int, hop.split())) for hop in hops}
    assert found == {(step, at, (at + 1) % 4, flat, (at - step) % 4) for step in range(3) for at in range(4)}
    browser.key("n")
    assert browser.eval("document.querySelectorAll('.ghost').length") == 4
    deadline = time.monotonic() + 20
    while browser.eval("document.querySelectorAll('.flights').length"):
        assert time.monotonic() < deadline
    assert browser.eval(WORLD) == still
    said = browser.eval(WORDS)
    nbytes = 2 * run["flats"][flat]["numel"]
    assert said == f"Each rank frees {nbytes:,} B of h.0's gathered parameters and keeps its quarter."
    assert "self.gathered.reshard_after_forward(unit)" in browser.eval("document.querySelector('.source').textContent")
    assert "parallel/zero3.py" in browser.eval("document.querySelector('.source').textContent")
    assert gather < int(browser.eval("Number(document.querySelector('#slider').value)"))


def test_gradients_add_up_on_their_way(browser: Browser, file: Path) -> None:
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    browser.open(file, "run=1&lecture")
    at_of(browser, r"Reduce-scatter #\d+ of h.1 has ended: each rank keeps the average of its own shard\.")
    labels = browser.eval("[...document.querySelectorAll('.flight text')].map((one) => one.textContent)")
    assert sorted(labels) == ["+"] * 4 + ["Σ2"] * 4 + ["Σ3"] * 4


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1920, 1080), (640, 360), (1024, 768)])
def test_the_last_row_reads_the_lecture_view(browser: Browser, file: Path, width: int, height: int) -> None:
    """At each moment no text is smaller than 2.5 % of the window's height; 640 x 360 is 1280 x 720 at 200 % zoom."""
    browser.size(width, height)
    browser.open(file, "lecture&run=1&at=600")
    for look in range(12):
        assert browser.eval(SMALLEST) >= 0.025 * height, look
        assert browser.eval(APART) >= 0.02 * height, look
        assert browser.eval(HEADS_MEET) == 0, look
        assert browser.eval("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [
            width,
            height,
        ]
        shown = "getComputedStyle(document.querySelector('.{}')).display"
        assert [browser.eval(shown.format(part)) for part in ("below", "panel")] == ["none", "none"]
        browser.key("n")
    assert browser.eval("document.querySelectorAll('.world [data-pick^=r]').length") == 4
    before = browser.eval("location.hash")
    assert before.startswith("#lecture&run=1&at=")
    browser.key("f")
    assert browser.eval("location.hash") == before.replace("#lecture&", "#")


def test_type_grows_with_the_window(browser: Browser, file: Path) -> None:
    found = []
    for width, height in ((1280, 720), (1920, 1080)):
        browser.size(width, height)
        browser.open(file, "run=1&at=200")
        found.append(browser.eval(SMALLEST))
    assert found[0] >= 10.5
    assert found[1] == pytest.approx(1.5 * found[0], rel=0.02)


def test_an_address_says_what_there_is_not(browser: Browser, data: dict[str, Any], file: Path) -> None:
    last = len(data["runs"][1]["events"])
    browser.open(file, "run=1&at=999999")
    assert browser.eval(WORDS).startswith(f"The address names no moment 999999: there are moments 0 to {last:,}. ")
    browser.open(file, "lecture&run=7")
    assert browser.eval(WORDS).startswith("The address names no run 7: there are runs 0 to 1. ")
    browser.open(file, "rank=9")
    assert "no rank 9: there are ranks 0, 1, 2 and 3" in browser.eval(WORDS)
    browser.open(file, "run=1")
    assert browser.eval(WORDS) == "On every rank initialization has ended."
    start = int(browser.eval("Number(document.querySelector('#slider').value)"))
    browser.open(file, f"run=1&at={start - 1}")
    assert browser.eval(WORDS) == "On rank 2 initialization has ended."
    browser.open(file, "rank=9")
    browser.key("n")
    assert not browser.eval(WORDS).startswith("The address")


def test_two_curves_share_an_axis_with_the_devices_limit(browser: Browser, data: dict[str, Any], file: Path) -> None:
    browser.open(file, "run=0&beside=1")
    words = browser.eval("document.querySelector('.track').textContent")
    for run in data["runs"]:
        peak = run["ranks"][0]["peak"]
        assert f"{run['name']}: peak {peak / 1000:#.3g}".rstrip(".") in words
    assert "the device has 100 KB" in words
    assert "DDP and ZeRO-3, at the same unit of the step" in words
    browser.open(file, "run=0")
    assert "at the same unit" not in browser.eval("document.querySelector('.track').textContent")


def test_a_step_shows_its_own_bytes(browser: Browser, tmp_path: Path) -> None:
    result = zerosim.run(RunConfig(**{**SMALL, "stage": 3, "ranks": 2, "steps": 2}), keep_events=True)
    path = tmp_path / "steps.html"
    path.write_text(zerosim.player(result).html, "utf-8")
    browser.open(path)
    browser.key("End")
    nbytes = encode(Recorded(result))["runs"][0]["ranks"][0]["volume"]["bytes"]
    label = browser.eval("document.querySelector('.gauge').getAttribute('aria-label')")
    assert label == f"rank 0 has sent {nbytes:,} B of {nbytes:,} B"


def test_a_posted_receive_is_no_traffic(browser: Browser, tmp_path: Path) -> None:
    config = RunConfig(**{**SMALL, "stage": 1, "ranks": 2, "pp": 2, "accumulate": 2})
    data = encode(record(config))
    path = tmp_path / "pipeline.html"
    path.write_text(page(data), "utf-8")
    (run,) = data["runs"]
    joined: dict[int, int] = {}
    for at, event in enumerate(run["events"]):
        if event[0] == 4 and run["calls"][event[4]][0] == "send":
            joined.setdefault(event[4], at)
    posted = [at for call, at in joined.items() if run["events"][at][1] == run["calls"][call][3][1]]
    assert posted  # a receive that comes before its send
    browser.open(path, f"at={posted[0] + 1}&by=events")
    call = run["events"][posted[0]][4]
    assert browser.eval(f"document.querySelectorAll('.world [data-pick=c{call}]').length") == 0
    assert "Nothing travels before the sender sends." in browser.eval(WORDS)


def test_a_pill_covers_no_name_and_a_tied_head_says_whose(browser: Browser, file: Path) -> None:
    browser.open(file, "run=1")
    browser.key("n")
    assert "uses wte’s" in browser.eval("document.querySelector('.world').textContent")
    covered = browser.eval(COVERED)
    assert covered == 0
    assert browser.eval("document.querySelectorAll('.world [data-pick^=c]').length") == 1
    assert "6 units over 5 flat buffers" in browser.eval("document.querySelector('#sub').textContent")
