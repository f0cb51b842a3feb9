"""Pictures that move: what they say was counted, nothing comes from outside, and they stand still where asked to."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.config import plan_config
from zerosim.lessons.rings import record, ring_film, walk_the_ring
from zerosim.report.moving import Moving, moving_staircase
from zerosim.report.moving.film import Film
from zerosim.report.moving.staircase import read_climb
from zerosim.report.plots.style import THEMES
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

ROOT = Path(__file__).parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"


@cache
def planned() -> RunResult:
    return plan(plan_config(stage=3, ranks=4, steps=1), keep_events=True)


@cache
def pictures() -> dict[str, Moving]:
    walk = record(walk_the_ring, 4)
    found = {f"staircase {theme}": moving_staircase(planned(), theme=theme) for theme in THEMES}
    return found | {f"ring {theme}": ring_film(walk, theme=theme) for theme in THEMES}


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_each_is_one_small_file_without_script_or_address() -> None:
    for name, picture in pictures().items():
        root = ET.fromstring(picture.svg)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            *("svg", "title", "desc", "style", "g", "rect", "text", "line", "path"),
        }
        assert not re.findall(r"https?://(?!www.w3.org/2000/svg)|url\(|@import|href", picture.svg)
        assert len(picture.svg) < 40_000, name
        assert root.get("aria-label") == picture.alt
        html = picture._repr_html_()
        assert html.startswith('<img alt="')
        assert "data:image/svg+xml;base64," in html


def test_without_motion_the_still_picture_is_left() -> None:
    """All rules that move stand where motion is welcome; each name of one is used, and each that is used is there."""
    for picture in pictures().values():
        style = re.search(r"<style>(.*)</style>", picture.svg)[1]  # type: ignore[index]
        before, moving = style.split("@media screen and (prefers-reduced-motion:no-preference)")
        assert "animation" not in before
        rules = set(re.findall(r"@keyframes (k\d+)", moving))
        used = {name for names in re.findall(r'<g class="([^"]*)"', picture.svg) for name in names.split()} - {"o"}
        assert rules == used
        percents = [float(at) for at in re.findall(r"([\d.]+)%", moving)]
        assert 0 <= min(percents) <= max(percents) <= 100


def test_a_rule_has_its_first_and_its_last_moment() -> None:
    """What is seen from the beginning is seen in the first frame, and what stays to the end in the last one."""
    film = Film((10, 10), 10.0, "", "", "light")
    for spans in ([(0.0, 4.0)], [(4.0, 10.0)], [(2.0, 3.0)], []):
        film.put("", film.seen(spans))
    rules = re.findall(r"@keyframes k\d+\{((?:[^{}]*\{[^{}]*\})*)\}", film.picture().svg)
    opacities = [[float(value) for value in re.findall(r"opacity:([\d.]+)", rule)] for rule in rules]
    assert [(own[0], own[-1]) for own in opacities] == [(1, 0), (0, 1), (0, 0), (0, 0)]
    assert [max(own) for own in opacities] == [1, 1, 1, 0]


def test_the_staircase_is_the_ledgers() -> None:
    result, climb = planned(), read_climb(planned().events[0])
    picture = pictures()["staircase light"]
    gathers = [stay for stay in climb.stays if stay.kind == "unsharded_param"]
    launched = [event for event in result.events[0] if getattr(event, "op", "") == "all_gather"]
    assert [stay.nbytes for stay in gathers] == [event.payload_bytes for event in launched]  # type: ignore[union-attr]
    half = len(gathers) // 2
    assert [stay.unit for stay in gathers[:half]] == [stay.unit for stay in reversed(gathers[half:])]
    whole = sum(memory.marks["after_init"].by_kind["param"] for memory in result.memory)
    said = f"At most {format_bytes(max(climb.param_bytes))} of {format_bytes(whole)} of parameters"
    assert said in picture.alt
    captions = [text for text in texts(picture.svg) if text.startswith(("forward: ", "backward: "))]
    assert len(captions) == len(gathers)
    for caption, stay in zip(captions, gathers, strict=True):
        assert f"gather {stay.unit}" in caption
        assert f"({format_bytes(stay.nbytes)})" in caption


def test_the_ring_is_what_ranks_held_and_sent() -> None:
    walk = record(walk_the_ring, 4)
    assert all((held[-1] == 1111).all() for held in walk.results)
    shown = texts(pictures()["ring light"].svg)
    for held in walk.results:
        assert {str(round(value)) for value in held.ravel()} <= set(shown)
    assert f"each GPU sent {walk.sent_bytes[0]} B for 16 B:" in shown
    assert "1.5 times its data" in shown


@pytest.mark.parametrize("theme", THEMES)
def test_the_readmes_staircase_is_that_of_its_command(theme: str, tmp_path: Path) -> None:
    name = "staircase.svg" if theme == "light" else "staircase-dark.svg"
    assert main(["plot", "staircase", "--theme", theme, "-o", str(tmp_path / name), "--quiet"]) == 0
    assert (tmp_path / name).read_text("utf-8") == (ROOT / "scenarios" / name).read_text("utf-8")
