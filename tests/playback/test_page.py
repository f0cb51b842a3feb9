"""The player's page in a headless Chromium: what it draws and says, its keys, its sizes; and that it asks for nothing.

Needs Chromium (Debian's package of that name). No other package: `browser.py`.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser

from zerosim.config import RunConfig
from zerosim.playback import encode, page, record
from zerosim.report.plots.style import contrast

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="not installed: Chromium, in which the player is tried"),
]

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, micro_batch=1, steps=1)
PAGES: dict[str, list[dict[str, Any]]] = {
    "stages": [dict(stage=stage, ranks=4) for stage in (0, 1, 2, 3)],
    "mesh": [dict(stage=3, ranks=4, tp=2)],
    "pipeline": [dict(stage=1, ranks=4, pp=2, accumulate=2)],
    "host": [dict(stage=3, ranks=2, recompute="full", cpu_checkpointing=True)],
    "offload": [dict(stage=2, ranks=2, offload="optimizer=host")],
    "delayed": [dict(stage=2, ranks=2, layers=1, steps=2, offload="optimizer=host", delayed_update=1)],
    "experts": [dict(stage=3, ranks=4, experts=4, top_k=2, ep=2)],
    "many": [dict(stage=3, ranks=16, layers=1)],
}
SIZES = ((390, 844), (1280, 720), (1920, 1080))
WORDS = "document.querySelector('.words').textContent"
AT = "Number(document.querySelector('input[type=range]').value)"
TEXTS = """(() => {
  const two = (c) => Number(c).toString(16).padStart(2, '0');
  const hex = (color) => '#' + color.match(/\\d+/g).slice(0, 3).map(two).join('');
  const under = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color !== 'rgba(0, 0, 0, 0)') return hex(color);
    }
    return hex(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  for (const one of document.querySelectorAll('main *')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.getClientRects().length) continue;
    if (one.tagName === 'text') {
      const pill = one.parentElement.dataset.pick?.startsWith('c') && one.parentElement.querySelector(':scope > rect');
      const fill = one.getAttribute('stroke') || (pill && pill.getAttribute('fill'));
      found.push([one.textContent, one.getAttribute('fill'), fill || under(one)]);
    } else if (one instanceof HTMLElement) found.push([one.textContent, hex(getComputedStyle(one).color), under(one)]);
  }
  return found;
})()"""
"""Every text that is seen, with its colour and that of what is under it."""
MARKUP = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, runs in PAGES.items():
        found[name] = folder / f"{name}.html"
        data = encode(*(record(RunConfig(**{**SMALL, **run})) for run in runs))
        found[name].write_text(page(data), "utf-8")
    return found


def test_every_page_agrees_with_the_ledgers_and_asks_for_nothing(browser: Browser, files: dict[str, Path]) -> None:
    for path in files.values():
        browser.open(path)
        assert browser.eval("document.documentElement.dataset.agrees") == "true"
        assert browser.requests == [path.as_uri()]


def test_the_first_paint_takes_less_than_a_second(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    """Of the page's own thread: others may keep the machine busy."""
    browser.call("Performance.enable", timeDomain="threadTicks")

    def spent() -> float:
        metrics = browser.call("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    for name in ("stages", "many"):
        browser.open(files[name])
        browser.screenshot(tmp_path / "first.png")
        assert browser.eval("performance.getEntriesByName('first-contentful-paint').length") == 1
        assert 0 < spent() < 1
    browser.call("Performance.disable")


def test_it_runs_nothing_but_its_own_script(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    text = files["mesh"].read_text("utf-8").replace("<main", "<script>document.title = 'changed'</script><main")
    strange = tmp_path / "strange.html"
    strange.write_text(text, "utf-8")
    browser.open(strange)
    assert browser.eval("document.title") != "changed"
    assert len(browser.errors) == 1
    assert "Content Security Policy" in browser.errors.pop()


def test_names_with_markup_stay_text(browser: Browser, tmp_path: Path) -> None:
    data = encode(record(RunConfig(stage=3, ranks=2, **SMALL)))
    text = json.dumps(data).replace("wte", json.dumps(MARKUP)[1:-1])
    data = json.loads(text)
    data["runs"][0] |= {"model": MARKUP, "about": MARKUP}
    path = tmp_path / "markup.html"
    path.write_text(page(data), "utf-8")
    browser.open(path)
    seen = ""
    for key in ("e", *["ArrowRight"] * 3, "c", *["ArrowRight"] * 6):
        browser.key(key)
        seen += browser.eval("document.querySelector('.now').textContent")
    assert browser.eval("document.images.length") == 0
    assert browser.eval("document.querySelector('h1').textContent") == MARKUP
    assert f"forward · {MARKUP}" in seen
    assert f"all-gather #0 of {MARKUP}" in seen


@pytest.mark.parametrize("name", PAGES)
def test_forward_then_backward_leaves_the_same_page(browser: Browser, files: dict[str, Path], name: str) -> None:
    browser.open(files[name])
    browser.eval("window.looks = []; window.look = () => document.querySelector('main').innerHTML; 0")
    for mode in "ce":
        browser.key(mode)
        browser.eval("looks = [look()]; 0")
        for _ in range(8):
            browser.key("ArrowRight")
            browser.eval("looks.push(look()); 0")
        assert browser.eval("new Set(looks).size") == 9
        for at in range(7, -1, -1):
            browser.key("ArrowLeft")
            assert browser.eval(f"look() === looks[{at}]")
    browser.key("End")
    assert browser.eval(AT) == browser.eval("Number(document.querySelector('input[type=range]').max)")
    browser.key("Home")
    assert browser.eval("look() === looks[0]")


def test_keys(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"])
    browser.key("3")
    assert browser.eval("document.querySelector('h1').textContent") == "ZeRO-3 on 4 ranks"
    before = browser.eval(AT)
    browser.key("ArrowRight", shift=True)
    assert browser.eval(AT) == before + 1
    browser.key("b")
    assert browser.eval("document.querySelectorAll('.world > svg').length") == 2
    browser.key("b")
    assert browser.eval("document.querySelectorAll('.world > svg').length") == 1
    browser.key("r")
    assert browser.eval("document.querySelector('.live select').value") == "1"
    browser.key("t")
    assert browser.eval("document.documentElement.dataset.theme") == "dark"
    browser.key(" ")
    assert browser.eval("document.querySelector('.play').getAttribute('aria-label')") == "Pause"
    browser.key(" ")
    browser.key("?")
    assert browser.eval("document.querySelector('dialog').open")
    browser.eval("document.querySelector('dialog').close()")


def test_the_keyboard_goes_from_shard_to_shard(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"], "run=3")
    browser.eval("document.querySelector('.world').focus()")
    for key in ("Enter", "ArrowDown", "ArrowRight", "Enter"):
        browser.key(key)
    owner = browser.eval("document.querySelector('.detail dd').textContent")
    assert owner.startswith("rank ")
    assert "elements" in browser.eval("document.querySelector('.detail').textContent")
    assert browser.eval("document.activeElement.dataset.pick").startswith(
        "s0."
    )  # it is drawn anew, and keeps the focus
    browser.key("Escape")
    assert browser.eval("document.querySelector('.detail')") is None


def test_what_is_chosen_is_explained(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"], "run=3")
    browser.key("ArrowRight")
    assert browser.eval(WORDS).startswith("All 4 ranks join all-gather #0 of wte: each rank sends ")
    browser.eval("document.querySelector('[data-pick^=c]').dispatchEvent(new Event('click'))")
    assert "rank 3has joined and waits" in browser.eval("document.querySelector('.detail').textContent")
    browser.eval("document.querySelector('.live li button').click()")
    said = browser.eval("document.querySelector('.detail').textContent")
    assert "born" in said
    assert "died" in said


def test_tokens_travel_to_their_experts_as_rows(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["experts"])
    while not browser.eval(WORDS).startswith("2 groups along ep join all-to-all #1 "):
        browser.key("ArrowRight")
    world = browser.eval("document.querySelector('.world > svg').textContent")
    assert re.search(r"ep 0ep 1edp 0edp 1rank 0edp 0, ep 0", world)
    assert len(re.findall(r"↑ \d+ rows? ↓ \d+ rows?", world)) == 4
    assert "h.0.experts · exp_avg" in browser.eval("document.querySelector('.live').textContent")


def test_guess_first_hides_the_next_collective_until_one_is_chosen(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"], "run=3")
    browser.key("g")
    browser.key("ArrowRight")
    assert browser.eval(WORDS) == "All ranks come to a collective."
    assert browser.eval("document.querySelectorAll('.world [data-pick^=c]').length") == 0
    browser.key("ArrowRight")
    assert browser.eval("document.querySelectorAll('.question button').length") >= 3
    browser.eval(
        "[...document.querySelectorAll('.question button')].find((b) => b.textContent === 'all-gather of wte').click()"
    )
    assert browser.eval(WORDS).startswith("Right: all-gather of wte. All 4 ranks join all-gather #0 of wte")


def test_the_hash_keeps_the_moment(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"], "run=3")
    for _ in range(5):
        browser.key("ArrowRight")
    hash, look = browser.eval("location.hash"), browser.eval("document.querySelector('main').innerHTML")
    browser.open(files["stages"], hash.lstrip("#"))
    assert browser.eval("document.querySelector('main').innerHTML") == look
    browser.open(files["stages"], "run=99&at=-5&rank=x&by=all")  # what means nothing is let be
    assert browser.eval("document.querySelector('h1').textContent") == "DDP on 4 ranks"


@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_at_any_size(browser: Browser, files: dict[str, Path], name: str) -> None:
    for width, height in SIZES:
        browser.size(width, height)
        browser.open(files[name], "beside=1" if name == "stages" else "")
        for _ in range(3):
            browser.key("ArrowRight")
        assert browser.eval("document.documentElement.scrollWidth") <= width
        if width >= 900:
            assert browser.eval("document.documentElement.scrollHeight") <= height
        out = browser.eval(
            "[...document.querySelectorAll('button, select, p, h1, h2, .world > svg')].filter((one) => "
            "one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
        )
        assert out == []


def test_other_memories_have_bars_and_copies_are_arrows(browser: Browser, files: dict[str, Path]) -> None:
    run = encode(record(RunConfig(**{**SMALL, **PAGES["offload"][0]})))["runs"][0]
    at = next(at for at, event in enumerate(run["events"]) if event[0] == 8)
    rank, nbytes = run["events"][at][1], run["events"][at][5]
    seen = "[...document.querySelectorAll('.world text')].map((one) => one.textContent)"
    browser.open(files["offload"], f"at={at}")
    before = browser.eval(seen)
    assert sum(words.startswith("host ") for words in before) == 2  # a bar for each rank
    assert "H" in before
    browser.open(files["offload"], f"at={at + 1}")
    assert len(browser.eval(seen)) == len(before) + 1  # the bytes beside the arrow
    assert browser.eval(WORDS).startswith(f"Rank {rank} starts to copy {nbytes:,} B from device to host.")
    assert "in host memory" in browser.eval("document.querySelector('.live').textContent")
    held = "[...document.querySelectorAll('[data-pick]')].map((one) => one.getAttribute('aria-label')).join()"
    assert "held here in host memory" in browser.eval(held)


def test_a_wait_for_the_cpus_delayed_update_is_said(browser: Browser, files: dict[str, Path]) -> None:
    run = encode(record(RunConfig(**{**SMALL, **PAGES["delayed"][0]})))["runs"][0]
    known = {(one[1], one[3] if one[0] == 4 else one[-1]) for one in run["events"] if one[0] in (4, 8)}  # calls, copies
    at = next(at for at, one in enumerate(run["events"]) if one[0] == 5 and (one[1], one[3]) not in known)
    browser.open(files["delayed"], f"at={at + 1}")
    browser.key("e")
    assert browser.eval(WORDS) == f"Rank {run['events'][at][1]} has the result of its CPU and goes on."
    assert browser.errors == []


@pytest.mark.parametrize("view", ["", "lecture&"])
@pytest.mark.parametrize("look", ["light", "dark"])
def test_texts_have_a_contrast_of_aa(browser: Browser, files: dict[str, Path], look: str, view: str) -> None:
    browser.media(prefers_color_scheme=look, prefers_reduced_motion="reduce")
    browser.open(files["stages"], f"{view}run=3")
    browser.key("ArrowRight")
    pairs = browser.eval(TEXTS)
    assert len(pairs) > (40 if view else 100)
    for words, ink, ground in pairs:
        assert contrast(ink, ground) >= 4.5, (words, ink, ground)


def test_a_frame_is_saved_as_svg(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["mesh"])
    browser.eval(
        "HTMLAnchorElement.prototype.click = () => {}; window.saved = new Promise((done) => {"
        "URL.createObjectURL = (blob) => { done(blob.text()); return '#'; }; }); 0"
    )
    browser.key("s")
    text = browser.eval("saved")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "rank 3" in text
    assert "http" not in text.replace("http://www.w3.org/", "")


def test_still_where_motion_is_reduced_and_whole_in_print(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["stages"], "run=3")
    browser.key("ArrowRight")
    moving = "[...document.querySelectorAll('.flow')].map((one) => getComputedStyle(one).animationName)"
    assert set(browser.eval(moving)) == {"none"}
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    assert set(browser.eval(moving)) == {"flow"}
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000


def test_a_page_of_another_version_says_so(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    text = files["mesh"].read_text("utf-8").replace('"version":3', '"version":4')
    path = tmp_path / "later.html"
    path.write_text(text, "utf-8")
    browser.call("Page.navigate", url=path.as_uri())
    for _ in range(100):
        said = browser.eval("document.querySelector('main')?.textContent ?? ''")
        if "version 4" in said:
            break
    assert "its player reads version 3" in said


def test_it_opens_at_the_moment_that_its_data_name(browser: Browser, tmp_path: Path) -> None:
    one = record(RunConfig(stage=3, ranks=2, **SMALL))
    number = len(one.result.events[1]) // 2
    data = encode(one, opens=(1, number))
    path = tmp_path / "opens.html"
    path.write_text(page(data), "utf-8")
    browser.open(path)
    found = browser.eval("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
    assert f"run=0&at={found['at']}&rank=1&by=events" == data["opens"]
    browser.open(path, "at=3")
    assert browser.eval("new URLSearchParams(location.hash.slice(1)).get('at')") == "3"
