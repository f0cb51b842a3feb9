"""Sheets: a chart draws every line that it is given, and refuses what cannot be drawn."""

from __future__ import annotations

import pytest

from zerosim.errors import InputError
from zerosim.lessons.sheet import Line, chart
from zerosim.report.plots.draw import draw


def test_a_chart_draws_each_line_and_shows_itself() -> None:
    lines = {"one": Line([0, 1, 2], [0, 1, 4]), "two": Line([0, 2], [1, 1], "-"), "three $": Line([1], [3], "o")}
    figure = chart("title", "subtitle", lines, xlabel="x", ylabel="y", bounds=(0, 5))
    (axes,) = draw(figure).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 1, 4], [1, 1], [3]]
    assert axes.get_ylim() == (0, 5)
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match="no lines"):
        chart("title", "subtitle", {}, xlabel="x", ylabel="y")
    with pytest.raises(InputError, match="2 xs and 1 ys"):
        Line([0, 1], [0])
    with pytest.raises(InputError, match="style '--'"):
        Line([0], [0], "--")
