"""TFLOP/s of a GPU against the model's size or the number of GPUs, a line for each stage. Modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerosim.errors import InputError
from zerosim.report.plots.page import dress, finish, frame, open_page, settle, stage_name
from zerosim.report.plots.scaling import beside, number_ticks, spread_labels
from zerosim.report.plots.style import DASHES, LINE_PAINTS, MARKERS
from zerosim.units import format_count

AXES = {"parameters": "parameters", "ranks": "GPUs"}


class Point(NamedTuple):
    """One step: its place along the bottom, TFLOP/s of the model on a GPU, and whether it fits on the device."""

    x: int
    tflops: float
    fits: bool


def throughput_figure(
    lines: Mapping[str, Sequence[Point]],
    along: str,
    *,
    subtitle: str = "",
    known_error: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """`lines` are points by stage's name; `along` is 'parameters' or 'ranks'. What does not fit is hollow.

    Raises: InputError for no points, or an unknown theme.
    """
    lines = {name: sorted(line) for name, line in lines.items() if line}
    if not lines:
        raise InputError("no points: there is nothing to draw; give at least one size or number of ranks")
    page = open_page(size, theme)
    every = [point for line in lines.values() for point in line]
    notes = [f"Modelled, not measured; known error: {known_error}."]
    if not all(point.fits for point in every):
        notes.insert(0, "Hollow, OOM: it does not fit. The speed is what it would have.")
    what = {"parameters": "model size", "ranks": "number of GPUs"}[along]
    frame(page, f"Model TFLOP/s per GPU, by {what}", subtitle, notes=notes)
    axes = page.figure.add_subplot()
    dress(page, axes, grid="both")
    axes.set_xscale("log")
    labels, most = [], max(point.tflops for point in every)
    hollow: dict[tuple[int, float], str] = {}
    for index, (name, line) in enumerate(lines.items()):
        color = page.theme.color(LINE_PAINTS[index % len(LINE_PAINTS)])
        marker, dashes = MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)]
        width = page.points * max(0.9 - 0.12 * index, 0.5)  # lines that meet: the later marks lie inside the earlier
        xs, ys = [point.x for point in line], [point.tflops for point in line]
        axes.plot(xs, ys, color=color, linestyle=dashes, linewidth=1.6, gid=f"line.{name}")
        fill = [color if point.fits else page.theme.background for point in line]
        axes.scatter(
            xs, ys, s=width**2, marker=marker, c=fill, edgecolors=color, linewidths=1.3, zorder=3, clip_on=False
        )
        for point in line:
            if not point.fits:
                near = next((at for at in hollow if at[0] == point.x and abs(at[1] - point.tflops) < most / 12), None)
                if near is None:  # stages that are as fast share a word
                    hollow[point.x, point.tflops] = color
        labels.append(beside(page, axes, line[-1][:2], f"{stage_name(name)}  {line[-1].tflops:.1f}", color))
    for where, color in hollow.items():
        axes.annotate(
            "OOM", where, xytext=(0, -page.points * 0.75), textcoords="offset points", ha="center", va="top",
            color=color, annotation_clip=False, **page.font(scale=0.75),
        )  # fmt: skip
    xs = sorted({point.x for point in every})
    axes.set_xlim(xs[0] / 1.15, xs[-1] * 1.15)
    axes.set_ylim(0, most * 1.1 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(AXES[along], color=page.theme.muted, **page.font(scale=0.9))
    settle(page)
    number_ticks(page, axes, xs, format_count if along == "parameters" else "{:,}".format)
    finish(page)
    spread_labels(page, axes, labels)
    return page.figure
