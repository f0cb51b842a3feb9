"""Paths of optimizers on surfaces of two weights: contours, paths, and beside them learning rates and last losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from warnings import catch_warnings

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerosim.analysis.descent import RATES, Path
from zerosim.analysis.surfaces import SURFACES, Surface
from zerosim.errors import InputError, wrong
from zerosim.report.plots.page import Page, dress, finish, frame, inches, open_page, plain
from zerosim.report.plots.style import LINE_PAINTS, mixed, stroke

MOST = len(LINE_PAINTS)
"""The most paths on a surface: as many as there are distinguishable colours."""
_NARROWEST = 1.2  # inches of a surface
_LEVELS = 14
_GRID = 200  # points along each side at which the loss is computed


def descent_figure(
    paths: Mapping[str, Mapping[str, Path]],
    *,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw the paths of `analysis.descent.best_paths`: by surface's name, then by name in the key.

    Raises: InputError for no paths, more than `MOST` on a surface, a sheet too small, or an unknown theme.
    """
    names = dict.fromkeys(name for by_name in paths.values() for name in by_name)
    if not names:
        raise InputError("no paths: there is nothing to draw; give at least one surface and one optimizer")
    if len(names) > MOST:
        raise InputError(f"{len(names)} paths are more than the {MOST} that one picture holds")
    columns = 1 if len(paths) == 1 else 2
    rows = math.ceil(len(paths) / columns)
    page = open_page(size, theme, (7.5, 4.8) if columns == 1 else (13.0, 0.9 + 3.9 * rows))
    steps = max(len(path.losses) - 1 for by_name in paths.values() for path in by_name.values())
    count = f"{len(names)} optimizers" if len(names) > 1 else next(iter(names))
    subtitle = f"{steps} steps of zerosim's own code on the exact gradient, from the same start"
    notes = [
        f"Each with the rate out of {RATES[0]:g}, {RATES[1]:g}, {RATES[2]:g}, ..., {RATES[-1]:g} that ends lowest "
        "without leaving the picture. Lines are of equal loss; a cross is a minimum.",
    ]
    if any(not path.stays for by_name in paths.values() for path in by_name.values()):
        notes.append("A path that leaves the picture ends there.")
    frame(page, f"How {count} descend{'' if len(names) > 1 else 's'}", subtitle, notes=notes)
    axes = page.figure.subplots(rows, columns, squeeze=False).flat
    for place, (surface, by_name) in zip(axes, paths.items(), strict=False):
        _panel(page, place, SURFACES[surface], by_name, list(names))
    for place in list(axes)[len(paths) :]:
        place.set_axis_off()
    with catch_warnings(action="ignore", category=UserWarning):  # a layout without room: refused below
        finish(page)
    _check_keys(page)
    return page.figure


def _check_keys(page: Page) -> None:
    """Check the keys' room. Raises: InputError for a sheet on which keys overlap, or leave paths no room."""
    for axes in page.figure.axes:
        key = axes.get_legend()
        low = axes.xaxis.label.get_window_extent(page.renderer).y0
        if key is not None and (key.get_window_extent(page.renderer).y0 < low or inches(page, axes)[0] < _NARROWEST):
            raise wrong("size", f" {page.size[0]:g}x{page.size[1]:g}: too small for these paths and their key")


def _panel(page: Page, axes: Axes, surface: Surface, paths: Mapping[str, Path], names: list[str]) -> None:
    """Draw one surface: contours, paths, and the key right of them, where it covers nothing."""
    dress(page, axes, grid="both", x=f"x      loss = {surface.formula}", y="y")
    axes.yaxis.label.set_rotation(0)
    axes.grid(visible=False)
    _contours(page, axes, surface)
    handles = [_line(page, axes, path, name, names.index(name)) for name, path in paths.items()]
    for point in surface.minima:
        axes.plot(
            *point, marker="x", color=page.theme.text, markersize=page.points * 0.8, markeredgewidth=1.6, zorder=2
        )
    axes.plot(*surface.start, marker="o", color=page.theme.text, markersize=page.points * 0.55, zorder=6)
    left = -page.points * 0.6, 0
    page.write(axes, "start", surface.start, left, ha="right", va="center", zorder=6, **page.font(scale=0.85))
    axes.set_xlim(surface.low[0], surface.high[0])
    axes.set_ylim(surface.low[1], surface.high[1])
    axes.set_title(surface.title, loc="left", color=page.theme.text, **page.font(bold=True))
    font = {"family": page.font()["fontfamily"], "size": page.points * 0.9}
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=3.2, prop=font,
        labelcolor=page.theme.text, labelspacing=0.7,
    )  # fmt: skip


def _contours(page: Page, axes: Axes, surface: Surface) -> None:
    """Draw lines of equal loss, and a ground that has the sheet's colour where the loss is low. Their losses follow
    from the areas below them, so that surfaces of any scale have as many."""
    xs, ys = (np.linspace(low, high, _GRID) for low, high in zip(surface.low, surface.high, strict=True))
    losses = surface.loss(*np.meshgrid(xs, ys))
    levels = np.unique(np.quantile(losses, np.linspace(0, 1, _LEVELS + 2) ** 1.5))
    ground = LinearSegmentedColormap.from_list("ground", [page.theme.background, page.theme.band])
    shades = [ground(at) for at in np.linspace(0, 1, len(levels) - 1)]
    axes.contourf(xs, ys, losses, levels=levels, colors=shades, zorder=0)
    axes.contour(
        xs, ys, losses, levels=levels[1:-1], colors=mixed(page.theme.grid, page.theme.muted), linewidths=0.5,
        linestyles="solid", zorder=1,
    )  # fmt: skip


def _line(page: Page, axes: Axes, path: Path, name: str, index: int) -> Line2D:
    """Draw a path, its mark at its end; its line in the key."""
    points = np.array(path.points)
    end = "" if path.stays else ", leaves"
    label = f"{plain(name)}\nlr {path.lr:g}, loss {path.losses[-1]:.2g}{end}"
    edge = {"markersize": page.points * 0.75, "markeredgecolor": page.theme.background, "markeredgewidth": 0.6}
    looks = stroke(index, page.theme) | edge | {"zorder": 3 + index / 100}
    (line,) = axes.plot(points[:, 0], points[:, 1], label=label, gid=f"path.{name}", **looks)
    return line
