"""TFLOP/s of a GPU against the model's size or the number of GPUs, a line for each ZeRO stage. Modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerosim.errors import InputError
from zerosim.report.plots.axes import ticks
from zerosim.report.plots.lines import BAND, Band, draw_band, draw_line, finish_lines, log_axes, number_ticks
from zerosim.report.plots.page import frame, open_page, settle, stage_name
from zerosim.units import format_count

AXES = {"parameters": "parameters", "ranks": "GPUs"}


class Point(NamedTuple):
    """One step: its place along the bottom, TFLOP/s of the model on a GPU, whether it fits on the device, and the
    TFLOP/s of eight of ten measured steps like it."""

    x: int
    tflops: float
    fits: bool
    band: Band | None = None


def throughput_figure(
    lines: Mapping[str, Sequence[Point]],
    along: str,
    *,
    subtitle: str = "",
    trust: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `lines` of points by stage's name; `along` is 'parameters' or 'ranks'; `trust` says how certain they are.
    Points that do not fit are hollow.

    Raises: InputError for no points, or an unknown theme.
    """
    lines = {name: sorted(line) for name, line in lines.items() if line}
    if not lines:
        raise InputError("no points: there is nothing to draw; give at least one size or number of ranks")
    page = open_page(size, theme)
    every = [point for line in lines.values() for point in line]
    notes = [BAND] * any(point.band for point in every) + [trust or "Modelled, not measured."]
    if not all(point.fits for point in every):
        notes.insert(0, "Hollow, OOM: does not fit. The speed is hypothetical.")
    what = {"parameters": "model size", "ranks": "number of GPUs"}[along]
    frame(page, f"Model TFLOP/s per GPU, by {what}", subtitle, notes=notes)
    xs = sorted({point.x for point in every})
    axes = log_axes(page, AXES[along], xs)
    labels, most = [], max(max((point.tflops, *(point.band or ()))) for point in every)
    hollow: dict[tuple[int, float], Any] = {}
    for index, (name, line) in enumerate(lines.items()):
        marks = [(point.x, point.tflops, point.fits) for point in line]
        draw_band(page, axes, index, name, [point.x for point in line], [point.band for point in line])
        labels.append(draw_line(page, axes, index, name, marks, f"{stage_name(name)}  {line[-1].tflops:.1f}"))
        for point in line:
            if not point.fits:
                near = next((at for at in hollow if at[0] == point.x and abs(at[1] - point.tflops) < most / 12), None)
                if near is None:  # stages of equal speed share a word
                    hollow[point.x, point.tflops] = labels[-1].get_color()
    for where, color in hollow.items():
        below = 0, -page.points * 0.75
        page.write(axes, "OOM", where, below, va="top", color=color, **page.font(scale=0.75))
    axes.set_ylim(0, most * 1.1 or 1)
    ticks(axes.yaxis, MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    settle(page)
    number_ticks(page, axes, xs, format_count if along == "parameters" else "{:,}".format)
    return finish_lines(page, axes, labels)
