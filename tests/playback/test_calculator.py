"""The calculator's page: its own script computes what a plan counts, from the forms that Python exports."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser

from zerosim.analysis.checks import checks
from zerosim.analysis.expressions import RANKS, WAYS, activations_of, terms_of
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import group, ring, symbols
from zerosim.cli.main import main
from zerosim.cli.page import _plan_parser, calculator_page
from zerosim.cli.plan import planned_config
from zerosim.playback.html import read
from zerosim.report.plots.style import contrast
from zerosim.train.plan import plan

needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="not installed: node, which runs the page's script"
)
FAMILIES = ("gpt2", "llama3.2-1b", "bloom-560m", "qwen3-0.6b", "bert-base")
POINTS = 200
OPEN = "[...document.querySelectorAll('.row .value')].map((one) => one.title)"


def by_script(expression: str, **values: Any) -> Any:
    """The value of an expression in the page's own script."""
    consts = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    exact = "(key, one) => (typeof one === 'bigint' ? one.toString() : one)"
    script = f"{read('expressions.js')}{consts}console.log(JSON.stringify({expression}, {exact}));"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, encoding="utf-8", timeout=120, check=True)
    return json.loads(done.stdout)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


@needs_node
def test_every_kind_of_term_has_the_forms_value() -> None:
    x, y = symbols("x y")
    forms: list[Form] = [
        Form(),
        3 * x / y,
        ring(x) * y - x / 7,
        4 * group("least", x / y, x - y),
        x * x / group("sum", x + y),
    ]
    found = by_script(
        "terms.map((one) => evaluated(one, letters))", terms=[*map(terms_of, forms)], letters={"x": 12, "y": 5}
    )
    assert [Fraction(int(above), int(below)) for above, below in found] == [form.at(x=12, y=5) for form in forms]


def chosen(data: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Points of every family, ZeRO stage and tp that its model can have."""
    draw, points = random.Random(57), []
    while len(points) < count:
        model, stage, tp = (
            data["models"][len(points) % len(data["models"])],
            draw.choice(range(4)),
            draw.choice((1, 2, 8)),
        )
        if "refused" not in model["tp"][str(tp)]:
            ways = {name: draw.choice(values) for name, values in WAYS.items()} | {"stage": stage}
            sizes = {"micro_batch": draw.randint(1, 4), "seq": draw.choice((96, 256, 512)), "ranks": draw.choice(RANKS)}
            points.append(
                {"model": model["name"], "tp": tp, **ways, **sizes, "gpu": draw.choice(("h100-80", "v100-32"))}
            )
    return points


@needs_node
@pytest.mark.slow
def test_states_and_traffic_equal_the_plans() -> None:
    """And activations, where the page does not say that they are an estimate; an estimate is as near as it says."""
    data, seen = data_of(calculator_page(FAMILIES)), Counter[object]()
    points = chosen(data, POINTS)
    found = by_script(
        "points.map((one) => ({ ...calculated(data, one), command: commandOf(data, one) }))", data=data, points=points
    )
    for point, one in zip(points, found, strict=True):
        result = plan(planned_config(_plan_parser().parse(one["command"].split()[2:])))
        of = checks(result)[0]
        counted, shown = Counter[Any](), Counter[Any]()
        for check in (*of.states, of.buffers, *of.traffic):
            if check.name != "total":
                axis = check.axis if check.axis == "tp" or check.key.subject != "sent" else "states"
                counted[check.key.subject, check.name, axis] += Fraction(sum(check.counted), len(check.counted))
        for row in one["rows"]:
            shown[row["subject"], row["name"], row["axis"]] += Fraction(*map(int, row["value"]))
        kept, due = shown.pop(("kept", "activation", "")), activations_of(result.saved)
        assert +shown == +counted, one["command"]
        if one["exact"]:
            assert kept == due, one["command"]
        else:
            assert float(100 * (kept - due) / due) == pytest.approx(one["error"], abs=2.5), one["command"]
        seen.update((point["model"], ("stage", point["stage"]), ("tp", point["tp"]), one["exact"]))
    assert all(
        seen[each] >= 20 for each in (*FAMILIES, *(("stage", z) for z in range(4)), ("tp", 2), ("tp", 8), True, False)
    )


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="not installed: Chromium, in which the page is tried")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It asks for nothing, fits windows, can be read in both themes, and obeys keys."""
    (page := tmp_path / "page.html").write_text(calculator_page(("gpt2", "llama3.1-8b")), "utf-8")
    with Browser(tmp_path) as browser:
        for width, height in ((390, 844), (1280, 720), (1920, 1080)):
            for theme in ("light", "dark"):
                browser.size(width, height)
                browser.media(prefers_color_scheme=theme)
                browser.open(page, "model=llama3.1-8b&tp=8&recipe=usual&recompute=full")
                assert browser.eval("document.documentElement.scrollWidth") == width
                colours = browser.eval(
                    "[...document.querySelectorAll('h1, .muted, .form'), document.body]"
                    ".map((one, at, all) => getComputedStyle(one)[at < all.length - 1 ? 'color' : 'backgroundColor'])"
                )
                *texts, under = ("#" + "".join(f"{int(x):02x}" for x in re.findall(r"\d+", one)[:3]) for one in colours)
                assert min(contrast(text, under) for text in texts) >= 4.5
        assert all(url.startswith(page.as_uri()) for url in browser.requests)
        assert "not the peak and no verdict" in browser.eval("document.body.textContent")
        before = browser.eval(OPEN)
        browser.eval("document.getElementById('ranks').focus()")
        browser.call("Input.dispatchKeyEvent", type="rawKeyDown", key="ArrowRight", windowsVirtualKeyCode=39)
        assert browser.eval(OPEN) != before
        assert "--ranks 1024 --tp 8" in browser.eval("document.getElementById('command').textContent")
        assert browser.eval("document.querySelectorAll('.estimate').length") == 0  # full: the form is exact
        browser.open(page, "model=gpt2&tp=8")  # gpt2's heads are not divided by 8
        assert "--tp 1 " in browser.eval("document.getElementById('command').textContent")
        assert browser.eval("document.querySelectorAll('.estimate').length") == 2
        assert not browser.errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "expected a kind"),
        ("calculater -o x.html", "calculator"),
        ("calculator", "--out"),
        ("calculator -o missing/x.html --model gpt2", "missing does not exist"),
        ("calculator -o x.html --model flat", "--model flat has no sizes"),
        ("calculator -o x.html --model t5-small", "--model t5-small has two sequences"),
        ("calculator -o x.html --model gpt9", "is not known"),
        ("calculator -o x.html --model ,", "expected names"),
    ],
)
def test_bad_input_is_one_line(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["page", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err
    assert list(tmp_path.iterdir()) == []
