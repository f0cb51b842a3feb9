"""Pictures of optimizers: paths are those of the recursions, surfaces' gradients those of their losses."""

from __future__ import annotations

import json
from pathlib import Path as File

import numpy as np
import pytest
from matplotlib.figure import Figure

from zerosim.analysis.descent import RATES, best_path, best_paths, check_shows, descend
from zerosim.analysis.surfaces import SURFACES
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError
from zerosim.report.plots import descent_figure
from zerosim.report.plots.descent import MOST
from zerosim.report.plots.draw import draw

CURVATURE = np.array([1.0, 30.0])  # of the bowl along its axes
SMALL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--ranks", "2", "--steps", "2"]


@pytest.mark.parametrize("name", SURFACES)
def test_gradients_are_those_of_the_losses(name: str) -> None:
    surface, h = SURFACES[name], 1e-5
    for x, y in [surface.start, surface.low, surface.high, (0.3, -0.7)]:
        dx = (surface.loss(x + h, y) - surface.loss(x - h, y)) / (2 * h)
        dy = (surface.loss(x, y + h) - surface.loss(x, y - h)) / (2 * h)
        assert surface.gradient(x, y) == pytest.approx((dx, dy), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("name", SURFACES)
def test_nothing_that_is_drawn_lies_below_the_minima(name: str) -> None:
    surface = SURFACES[name]
    xs, ys = (np.linspace(low, high, 101) for low, high in zip(surface.low, surface.high, strict=True))
    lowest = surface.loss(*np.meshgrid(xs, ys)).min()
    for point in surface.minima:
        assert surface.holds(point)
        assert surface.gradient(*point) == (0.0, 0.0)
        assert surface.loss(*point) <= lowest
    assert surface.holds(surface.start)


def test_sgd_on_the_bowl_is_its_closed_form() -> None:
    path = descend(SURFACES["bowl"], RunConfig(optimizer="sgd", lr=0.05), steps=40)
    powers = np.arange(41)[:, None]
    expected = np.array(SURFACES["bowl"].start) * (1 - 0.05 * CURVATURE) ** powers
    np.testing.assert_allclose(path.points, expected, rtol=1e-5, atol=1e-9)
    assert path.losses[-1] == SURFACES["bowl"].loss(*path.points[-1])


def test_adam_on_the_bowl_is_its_recursion() -> None:
    path = descend(SURFACES["bowl"], RunConfig(optimizer="adam", lr=0.1), steps=40)
    w, m, v = np.array(SURFACES["bowl"].start), np.zeros(2), np.zeros(2)
    for t, point in enumerate(path.points[1:], 1):
        g = CURVATURE * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(point, w, atol=2e-5)  # of fp32 at 4, over 40 steps


def test_the_best_rate_is_the_best_of_the_list() -> None:
    surface, config = SURFACES["beale"], RunConfig(optimizer="sgd")
    best = best_path(surface, config, steps=20)
    tried = [descend(surface, config.replace(lr=lr), steps=20) for lr in RATES]
    assert best.stays
    assert best.losses[-1] == min(path.losses[-1] for path in tried if path.stays)
    assert best in tried


def legends(figure: Figure) -> list[list[str]]:
    found = [axes.get_legend() for axes in figure.axes]
    return [[text.get_text() for text in legend.get_texts()] for legend in found if legend is not None]


@pytest.mark.slow
def test_the_key_has_the_rates_and_covers_no_path() -> None:
    paths = best_paths(["saddle", "bowl", "beale"], ["sgd", "lion"], steps=5)
    crowd = {f"{title} {copy}": path for title, path in paths["saddle"].items() for copy in range(MOST // 2)}
    for drawn, size in ((paths, None), ({"saddle": crowd}, None)):
        figure = draw(descent_figure(drawn), size=size)
        sheet = figure.bbox
        for axes, by_name, words in zip(figure.axes, drawn.values(), legends(figure), strict=False):
            for path, text in zip(by_name.values(), words, strict=True):
                assert f"lr {path.lr:g}" in text
            legend = axes.get_legend()
            assert legend is not None
            box = legend.get_window_extent()
            assert box.x0 >= axes.get_window_extent().x1
            assert box.x1 <= sheet.x1 + 1
            assert box.y0 >= sheet.y0
    with pytest.raises(InputError, match="more than the 8"):
        descent_figure({"bowl": dict.fromkeys("abcdefghi", next(iter(crowd.values())))})
    with pytest.raises(InputError, match="size 5x3: too small for these lines and their list"):
        draw(descent_figure({"saddle": crowd, "bowl": crowd, "beale": crowd}), size=(5.0, 3.0))
    with pytest.raises(InputError, match="no paths"):
        descent_figure({"bowl": {}})


def test_only_what_treats_weights_by_themselves_is_shown() -> None:
    shown = [name for name, preset in OPTIMIZERS.items() if preset.cut == "elements" and name != "adam-sage"]
    for name in OPTIMIZERS:
        if name in shown:
            check_shows(name)
        else:
            with pytest.raises(InputError, match=f"{name}: .*choose among adam"):
                check_shows(name)


# -- the command ------------------------------------------------------------------------------------
def test_descent_writes_the_paths_that_it_draws(tmp_path: File, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "d.svg", tmp_path / "d.json"
    words = ["plot", "descent", "--optimizers", "sgd,adam", "--surface", "bowl", "--steps", "5"]
    assert main([*words, "-o", str(out), "--json", str(figures)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    paths = json.loads(figures.read_text("utf-8"))["paths"]["bowl"]
    assert list(paths) == ["SGD", "Adam"]
    best = best_path(SURFACES["bowl"], RunConfig(optimizer="sgd"), 5)
    assert paths["SGD"] == json.loads(json.dumps(best.to_dict()))
    text = out.read_text("utf-8")
    assert f"lr {best.lr:g}" in text
    assert text.count('id="line.') == 2


def test_optimizers_draws_each_ones_loss_and_bytes(tmp_path: File, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = tmp_path / "o.svg", tmp_path / "o.json"
    words = ["plot", "optimizers", "--optimizers", "adam,sgd", "--stage", "2", "-q", *SMALL]
    assert main([*words, "-o", str(out), "--json", str(figures)]) == 0
    runs = json.loads(figures.read_text("utf-8"))["runs"]
    assert [run["figures"]["states"]["optim per parameter"] for run in runs.values()] == [12, 4]
    text = out.read_text("utf-8")
    assert ">12</text>" in text
    assert "exp_avg + exp_avg_sq + master" in text
    for title, run in zip(("Adam", "SGD"), runs.values(), strict=True):
        assert f"{title}  {run['losses'][-1]:.3f}" in text
    assert capsys.readouterr().out == ""
