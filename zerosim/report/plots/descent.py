"""Paths of optimizers on surfaces of two weights: contours, paths, and beside them learning rates and last losses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from zerosim.analysis.descent import RATES, Path
from zerosim.analysis.surfaces import SURFACES, Surface
from zerosim.errors import InputError
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Field, Line, Note, Panel
from zerosim.report.plots.style import LINE_PAINTS

MOST = len(LINE_PAINTS)
"""The most paths on a surface: as many as there are distinguishable colours."""
_GRID = 200  # points along each side at which the loss is computed


def descent_figure(paths: Mapping[str, Mapping[str, Path]]) -> Chart:
    """Return the paths of `analysis.descent.best_paths`: by surface's name, then by name in the list.

    Raises: InputError for no paths, and more than `MOST` on a surface.
    """
    every = [path for by_name in paths.values() for path in by_name.values()]
    names = list(dict.fromkeys(name for by_name in paths.values() for name in by_name))
    if not names:
        raise InputError("no paths: there is nothing to draw; give at least one surface and one optimizer")
    if len(names) > MOST:
        raise InputError(f"{len(names)} paths are more than the {MOST} that one picture holds")
    columns = 1 if len(paths) == 1 else 2
    panels = [_panel(SURFACES[surface], by_name, names) for surface, by_name in paths.items()]
    panels += [Panel((), bare=True)] * (-len(panels) % columns)
    rows = tuple(tuple(panels[at : at + columns]) for at in range(0, len(panels), columns))
    count = f"{len(names)} optimizers" if len(names) > 1 else names[0]
    steps = max(len(path.losses) for path in every) - 1
    subtitle = f"{steps} steps of zerosim's own code on the exact gradient, from the same start"
    notes = [
        f"Each with the rate out of {RATES[0]:g}, {RATES[1]:g}, {RATES[2]:g}, ..., {RATES[-1]:g} that ends lowest "
        "without leaving the picture. Lines are of equal loss; a cross is a minimum.",
    ]
    if not all(path.stays for path in every):
        notes.append("A path that leaves the picture ends there.")
    size = (7.5, 4.8) if columns == 1 else (13.0, 0.9 + 3.9 * math.ceil(len(paths) / 2))
    title = f"How {count} descend{'' if len(names) > 1 else 's'}"
    return Chart(title, subtitle, rows, notes=tuple(notes), size=size)


def _panel(surface: Surface, paths: Mapping[str, Path], names: list[str]) -> Panel:
    """Return one surface: lines of equal loss, paths, its minima and the start."""
    xs, ys = (np.linspace(low, high, _GRID) for low, high in zip(surface.low, surface.high, strict=True))
    field = Field(xs, ys, surface.loss(*np.meshgrid(xs, ys)))
    lines = []
    for name, path in paths.items():
        words = f"{name}\nlr {path.lr:g}, loss {path.losses[-1]:.2g}{'' if path.stays else ', leaves'}"
        lines.append(Line(name, path.points, names.index(name), words))
    minima = [Note("×", point, "center center", scale=1.4, bold=True) for point in surface.minima]
    start = Note("start", surface.start, "right center", (-0.6, 0), 0.85), Note("●", surface.start, "center center")
    x = Axis(f"x      loss = {surface.formula}", (surface.low[0], surface.high[0]))
    y = Axis("y", (surface.low[1], surface.high[1]))
    return Panel((field, *lines, *minima, *start), x, y, surface.title, lists=True)
