"""TFLOP/s of a GPU against the model's size or the number of GPUs, a line for each ZeRO stage. Modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Line, Note, Panel
from zerosim.report.plots.style import LINE_PAINTS
from zerosim.report.plots.words import whole_words
from zerosim.units import format_count

AXES = {"parameters": "parameters", "ranks": "GPUs"}
BAND = "Band: the range of 8 of 10 measured steps of this kind. Lines whose bands overlap are not ranked."


class Point(NamedTuple):
    """One step: its place along the bottom, TFLOP/s of the model on a GPU, whether it fits on the device, and the
    TFLOP/s of eight of ten measured steps like it."""

    x: int
    tflops: float
    fits: bool
    band: tuple[float, float] | None = None


def throughput_figure(
    lines: Mapping[str, Sequence[Point]], along: str, *, subtitle: str = "", trust: str = ""
) -> Chart:
    """Return `lines` of points by stage's name; `along` is 'parameters' or 'ranks'; `trust` says how certain they are.
    Points that do not fit are hollow.

    Raises: InputError for no points.
    """
    lines = {name: sorted(line) for name, line in lines.items() if line}
    if not lines:
        raise InputError("no points: there is nothing to draw; give at least one size or number of ranks")
    every = [point for line in lines.values() for point in line]
    most = max(max((point.tflops, *(point.band or ()))) for point in every)
    marks, hollow = list[Line](), list[Note]()
    for index, (name, line) in enumerate(lines.items()):
        places, fits = [(point.x, point.tflops) for point in line], [point.fits for point in line]
        band = [(point.x, *point.band) for point in line if point.band]
        marks.append(Line(name, places, index, f"{name}  {line[-1].tflops:.1f}", fits, band))
        for point in line:
            near = any(note.where[0] == point.x and abs(note.where[1] - point.tflops) < most / 12 for note in hollow)
            if not point.fits and not near:  # stages of equal speed share a word
                paint = LINE_PAINTS[index % len(LINE_PAINTS)]
                hollow.append(Note("OOM", (point.x, point.tflops), "center top", (0, -0.75), 0.75, paint=paint))
    notes = [BAND] * any(point.band for point in every) + [trust or "Modelled, not measured."]
    if hollow:
        notes.insert(0, "Hollow, OOM: does not fit. The speed is hypothetical.")
    xs = tuple(sorted({point.x for point in every}))
    words = whole_words if along == "ranks" else lambda count: format_count(int(count))
    x = Axis(AXES[along], (xs[0] / 1.15, xs[-1] * 1.15), words, among=xs, log=True)
    panel = Panel((*marks, *hollow), x, Axis(ends=(0, most * 1.1 or 1)))
    what = {"parameters": "model size", "ranks": "number of GPUs"}[along]
    return Chart(f"Model TFLOP/s per GPU, by {what}", subtitle, ((panel,),), notes=tuple(notes))
