"""The lecture: its figures are the ledger's, its claims are checked, its pages need nothing and obey keys."""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser

from zerosim.cli import lecture as verb
from zerosim.cli.main import main
from zerosim.cli.page import config_of_words
from zerosim.comm.collectives import Comm
from zerosim.grading.catalogue import EXERCISES
from zerosim.lessons.course import course
from zerosim.lessons.lecture import counted
from zerosim.lessons.lecture.deck import deck, plain, slides
from zerosim.lessons.lecture.handouts import handouts, words
from zerosim.lessons.lecture.pieces import picture
from zerosim.lessons.lecture.slide import Show, Slide
from zerosim.lessons.lecture.stages import paper
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.playback.encode import EVENTS
from zerosim.playback.html import page
from zerosim.report.plots.style import contrast
from zerosim.tensor.flat import Flat
from zerosim.train.result import RunResult

ROOT = Path(__file__).parents[2]
PAGES = {"deck.html", "player.html", "calculator.html", "handouts.html"}
DATA = counted.played()


class Lying(counted.Plans):
    """Plans that show one run's result for another's words."""

    def __init__(self, lies: dict[str, str]) -> None:
        super().__init__(lambda one: config_of_words(one.split()))
        self.lies = lies

    def __call__(self, words: str) -> RunResult:
        return super().__call__(self.lies.get(words, words))


def show_of() -> Show:
    return Show(Lying({}), lambda words, theme: "<svg><desc>drawn</desc></svg>", counted.moments(DATA))


@pytest.fixture(scope="module")
def made() -> dict[str, Slide]:
    """The slides without their pictures, by their titles."""
    return {plain(one.title): one for one in slides(show_of())}


def shown(slide: Slide) -> list[int]:
    """The bytes that a slide's body shows, in order."""
    return [int(value) for value in re.findall(r'<data value="(\d+)">', slide.body)]


def planned(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, int], int, int]:
    """A plan's model states, what a rank sends of them, and Ψ, from the JSON that the slide's command writes."""
    assert main(["plan", *words.split(), "--json", "-", "--quiet"]) == 0
    values = json.loads(capsys.readouterr().out)
    rank = values["ranks"][0]
    held = {kind: rank["memory"]["end_of_backward"].get(kind, 0) for kind in ("param", "grad", "optim")}
    sent = sum(row["sent_bytes"] for row in rank["traffic"] if row["purpose"] == "states" and row["step"] == 0)
    return held, sent, values["num_parameters"]


def test_figures_are_those_of_the_commands_below_them(
    made: dict[str, Slide], capsys: pytest.CaptureFixture[str]
) -> None:
    found = [planned(paper(stage), capsys) for stage in range(4)]
    held, sent, psi = [sum(states.values()) for states, _, _ in found], [one for _, one, _ in found], found[0][2]
    size = 2 * psi  # fp16
    assert held == pytest.approx([16 * psi, 4 * psi + 12 * psi / 64, 2 * psi + 14 * psi / 64, 16 * psi / 64], rel=1e-7)
    assert sent == pytest.approx([trips * size * 63 / 64 for trips in (2, 2, 2, 3)], rel=1e-7)
    by_kind = found[0][0]
    assert shown(made["A parameter costs 16 bytes, 12 of them the optimizer's"]) == list(by_kind.values())
    assert shown(made["DDP: 63 of every 64 bytes are copies"]) == [held[0], 64 * held[0]]
    assert shown(made["ZeRO-1 costs nothing in traffic"]) == [held[0], sent[0], held[1], sent[1]]
    assert f"{sent[1] - sent[0]} B of padding" in " ".join(made["ZeRO-1 costs nothing in traffic"].notes)
    assert shown(made["ZeRO-3 leaves 1/64 of the states on each of 64 GPUs"]) == [*held, 32 * 10**9]
    assert shown(made["ZeRO-3 sends 3Ψ where DDP sends 2Ψ"]) == sent
    rings = [planned(paper(0, ranks), capsys)[1] for ranks in (4, 16, 64)]
    assert shown(made["An all-reduce sends less than 2Ψ, whatever N is"]) == [*rings, 2 * size]


def test_the_table_of_fits_is_the_plans_verdict(made: dict[str, Slide], capsys: pytest.CaptureFixture[str]) -> None:
    slide = made["Take the lowest ZeRO stage that fits"]
    cells = re.findall(r"([✓✗]) <data value=\"(\d+)\">", slide.body)
    for (mark, peak), command in list(zip(cells, slide.commands, strict=True))[4:8]:
        code = main(["plan", *command.split(), "--json", "-", "--quiet"])
        values = json.loads(capsys.readouterr().out)
        assert (mark == "✓") == values["fits"] == (code == 0)
        assert int(peak) == values["peak_bytes"]


@pytest.mark.parametrize(
    ("lies", "claim"),
    [
        ({paper(1): paper(3)}, "ZeRO-1 costs nothing in traffic"),
        ({paper(3): paper(2)}, "64 GPUs hold 64 copies"),
        ({paper(0, 1024): f"{paper(0, 4)} --micro-batch 2 --accumulate 2 --stage 3"}, "whatever N is"),
    ],
)
def test_a_claim_that_plans_do_not_bear_out_stops_the_deck(lies: dict[str, str], claim: str) -> None:
    with pytest.raises(AssertionError, match=claim):
        slides(show_of()._replace(plans=Lying(lies)))


def events(run: dict[str, Any], kind: str, upto: int) -> Iterator[list[Any]]:
    return (event for event in run["events"][:upto] if EVENTS[event[0]] == kind)


def test_links_lead_to_the_moments_that_they_name() -> None:
    at = {name: address for name, (_, address) in counted.moments(DATA).items()}
    for name, (run, verb_, phase) in {
        "all_reduce": (0, "all_reduce", "backward"),
        "publish": (1, "all_gather", "optimizer"),
        "gather": (3, "all_gather", "forward"),
        "reduce": (3, "reduce_scatter", "backward"),
    }.items():
        found = re.fullmatch(rf"lecture&run={run}&at=(\d+)", at[name])
        assert found is not None
        data, moment = DATA["runs"][run], int(found[1])
        *_, last = events(data, "launch", moment)
        assert data["calls"][last[4]][0] == verb_
        assert data["scopes"][last[2]][1] == phase
        works = {(event[1], event[3]) for event in events(data, "launch", moment) if event[4] == last[4]}
        assert len(works) == 4  # every rank is in it, and none is out
        sent = [event for event in events(data, "message", len(data["events"])) if (event[1], event[3]) in works]
        assert data["events"][moment - 1] == sent[-1]  # as the player stops there
        assert not works & {(event[1], event[3]) for event in events(data, "wait", moment)}

    def gathered(moment: int) -> int:
        """How many whole copies of parameters are live."""
        run = DATA["runs"][3]
        born = [(e[1], e[3]) for e in events(run, "alloc", moment) if run["words"][e[5]] == "unsharded_param"]
        freed = {(event[1], event[3]) for event in events(run, "free", moment)}
        return sum(one not in freed for one in born)

    used, freed = (int(at[name].rpartition("=")[2]) for name in ("use", "free"))
    assert gathered(used) == 4
    assert (gathered(freed - 1), gathered(freed)) == (1, 0)


def test_a_moving_picture_prints_at_rest() -> None:
    """What moves is not printed as its first moment, in which nothing has happened."""
    shown = picture(verb.svg_of, "staircase")
    svgs = [base64.b64decode(data).decode() for data in re.findall(r'class="paper".*?base64,([^"]*)"', shown)]
    assert ["@keyframes" in svg for svg in svgs] == [False]
    assert "@keyframes" in base64.b64decode(re.findall(r'class="light".*?base64,([^"]*)"', shown)[0]).decode()


def test_pages_name_nothing_outside_their_folder(made: dict[str, Slide]) -> None:
    text = deck(show_of(), list(made.values()))
    for one in (text, handouts()):
        assert "default-src 'none'" in one
        assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", one)
        links = set(re.findall(r'href="([^"#]*)', one))
        assert links <= PAGES
    assert len(made) == text.count('<section class="slide ')
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [one["title"] for one in data["slides"]] == list(made)


def test_a_lessons_page_has_the_words_that_its_answers_use() -> None:
    """By the published solutions: every word of a strategy, a flat, a unit and the collectives."""
    api = {name for kind in (Strategy, Flat, Unit, Comm) for name in dir(kind) if not name.startswith("_")}
    text, pages = handouts(), 0
    for lesson in course().lessons:
        told = " ".join(words(lesson)) + " ".join(
            one.skeleton + one.question for one in EXERCISES if one.name in lesson.exercises
        )
        for name in lesson.exercises:
            tree = ast.parse((ROOT / f"notebooks/solutions/{name}.py").read_text("utf-8"))
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & api
            missing = {one for one in used - {"flats", "device", "shape"} if not re.search(rf"\b{one}\b", told)}
            assert not missing, f"{name}: {missing}"
        pages += bool(lesson.exercises)
    assert text.count('<section class="handout">') == pages
    assert words(course().lesson("24")) == {}


def test_the_verb_writes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "calculator_page", lambda models: "bars\n")
    monkeypatch.setattr(verb, "lecture_pages", lambda: dict.fromkeys(sorted(PAGES), "page\n"))
    assert main(["lecture", "week3/"]) == 0
    assert {path.name for path in Path("week3").iterdir()} == PAGES
    assert "Open deck.html" in capsys.readouterr().out
    monkeypatch.setattr(verb, "lecture_pages", lambda: {"deck.html": "page\n", "no/such.html": ""})
    assert main(["lecture", "half"]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["week3"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("there", "there: exists and is not empty; choose another folder"),
        ("there/notes.txt", "is a file; choose another name for the folder"),
        ("missing/week3", "missing does not exist; create it first"),
        ("", "DIR"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_counted(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/notes.txt").write_text("mine", "utf-8")
    monkeypatch.setattr(verb, "lecture_pages", lambda: pytest.fail("it was counted"))
    assert main(["lecture", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "notes.txt"]


SMALLEST = """(() => { const here = document.querySelector('.here'), walk = document.createTreeWalker(here, 4);
  let least = 1e9;
  for (let text; (text = walk.nextNode());) if (text.data.trim() && text.parentElement.checkVisibility())
    least = Math.min(least, parseFloat(getComputedStyle(text.parentElement).fontSize));
  for (const one of here.querySelectorAll('img')) if (one.checkVisibility()) {
    const svg = atob(one.src.split(',')[1]), box = one.getBoundingClientRect();
    const [, , width, height] = /viewBox="([^"]*)"/.exec(svg)[1].split(' ').map(Number);
    const type = Math.min(...[...svg.matchAll(/font-size: ?([0-9.]+)px/g)].map((each) => Number(each[1])));
    least = Math.min(least, type * Math.min(box.width / width, box.height / height)); }
  return least / innerHeight; })()"""
OUTSIDE = """[...document.querySelectorAll('.here .sheet *')].filter((one) => { const box = one.getBoundingClientRect();
  const out = box.right > innerWidth + 1 || box.bottom > innerHeight + 1 || box.top < 0;
  return one.checkVisibility() && out; }).length"""


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="not installed: Chromium, in which the pages are tried")
def test_the_deck_in_a_browser(tmp_path: Path) -> None:
    """The last row can read it, keys alone move it, it asks the network for nothing and prints one slide a page."""
    show = verb.show_of(DATA)
    all_slides = slides(show)
    (file := tmp_path / "deck.html").write_text(deck(show, all_slides), "utf-8")
    (tmp_path / "player.html").write_text(page(DATA), "utf-8")
    with Browser(tmp_path) as browser:

        def slide() -> int:
            return int(browser.eval("location.hash.slice(1)"))

        def seen(selector: str) -> bool:
            return bool(browser.eval(f"!!document.querySelector('.here {selector}')?.checkVisibility()"))

        for (width, height), theme in zip(((1280, 720), (1920, 1080)), ("dark", "light"), strict=True):
            browser.size(width, height)
            browser.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            browser.open(file)
            for number in range(1, len(all_slides) + 1):
                assert slide() == number
                assert browser.eval(SMALLEST) >= 0.025, number
                assert browser.eval(OUTSIDE) == 0, number
                if seen("input") or seen(".options"):
                    assert not seen(".answer")
                    browser.key(" ")
                    assert seen(".answer")
                browser.key("ArrowRight")
            colours = browser.eval(
                "[getComputedStyle(document.querySelector('.bar > span')).color, "
                "getComputedStyle(document.querySelector('nav')).color, "
                "getComputedStyle(document.body).backgroundColor]"
            )
            *texts, under = ("#" + "".join(f"{int(x):02x}" for x in re.findall(r"\d+", one)[:3]) for one in colours)
            assert min(contrast(text, under) for text in texts) >= 4.5
        browser.open(file, "2")
        for key in ("6", "0", "Enter"):
            browser.key(key)
        assert "too low, by a factor of 2.0" in browser.eval("document.querySelector('.here .said').textContent")
        for key in ("ArrowRight", "7", "Enter"):
            browser.key(key)
        assert slide() == 7
        browser.key("2")
        assert browser.eval("document.querySelectorAll('.here .chosen').length") == 1
        browser.key("s")
        assert seen("aside")
        browser.key("Escape")
        browser.key("t")
        assert not seen("aside")
        assert browser.eval("document.documentElement.dataset.theme") == "dark"
        browser.size(390, 844)
        browser.open(file, "8")
        assert browser.eval("document.documentElement.scrollWidth") == 390
        assert all(url.startswith((file.as_uri(), "data:image/svg")) for url in browser.requests)
        pdf = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
        assert len(re.findall(rb"/MediaBox", pdf)) == len(all_slides)
        assert len(pdf) < 1_000_000
        (tmp_path / "handouts.html").write_text(handouts(), "utf-8")
        browser.call("Page.navigate", url=(tmp_path / "handouts.html").as_uri())
        browser.eval(
            "new Promise((done) => (document.readyState === 'complete' ? done() : addEventListener('load', done)))"
        )
        pdf = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
        assert len(re.findall(rb"/MediaBox", pdf)) == sum(bool(one.exercises) for one in course().lessons)
        browser.open(tmp_path / "player.html", show.moments["gather"][1])
        assert browser.eval("document.querySelector('#now').textContent").startswith(
            "All 4 ranks join all-gather #2 of h.0"
        )
        assert not browser.errors
