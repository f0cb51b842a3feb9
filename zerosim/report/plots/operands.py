"""The numbers that lose digits, become 0 or saturate in 8 bits, by scaling, for each operand of a run's products."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from zerosim.config.parts.fp8 import SCALINGS
from zerosim.errors import InputError
from zerosim.report.plots.axes import ticks
from zerosim.report.plots.gradients import FATES as LOST
from zerosim.report.plots.page import Page, dress, finish, frame, ground, open_page
from zerosim.report.plots.style import LINE_PAINTS, Paint
from zerosim.train.operands import FORMATS, OPERANDS, Operands
from zerosim.units import format_count

FATES: Mapping[str, tuple[str, Paint]] = MappingProxyType(
    {
        "fewer_digits": ("loses digits", LINE_PAINTS[3]),
        "to_zero": LOST["to_zero"],
        "overflowed": ("saturates", LOST["overflowed"][1]),
    }
)
_LEAST, _HIGH = 1e-6, 0.26  # the smallest share that has a bar; a bar's height
CALLED = {"inputs": "inputs", "weights": "weights", "gradients": "output gradients"}


def operands_figure(
    found: Operands, *, subtitle: str = "", theme: str = "light", size: tuple[float, float] | None = None
) -> Figure:
    """Draw the picture. `size` is in inches, width first.

    Raises: InputError for an unknown theme, an impossible size, and a run without products in its blocks.
    """
    if not all(found.num.values()):
        raise InputError("no linear map of a block ran: there is nothing to draw; train a gpt or a llama")
    page = open_page(size, theme, (9.0, 7.6))
    total = f"{format_count(sum(found.num.values()))} numbers of {found.steps} steps"
    notes = [
        "Shares of the numbers that are not 0, in percent, on a logarithmic axis. A row without a bar loses none. "
        "Saturates: too large for the format after scaling.",
        "Delayed scaling takes the amax of the step before. Its first step has no amax and leaves numbers as they are.",
    ]
    key = [(words, page.paint(name, {name: paint})) for name, (words, paint) in FATES.items()]
    frame(page, "What 8 bits lose under each scaling", f"{subtitle}: {total}" if subtitle else total, key, notes)
    grid = page.figure.add_gridspec(len(FORMATS), len(OPERANDS))
    first: Axes | None = None
    for row, form in enumerate(FORMATS):
        for column, operand in enumerate(OPERANDS):
            axes = page.figure.add_subplot(grid[row, column], sharex=first, sharey=first)
            _draw(page, axes, found, operand, form)
            axes.set_title(f"{CALLED[operand]} in {form}", color=page.theme.text, **page.font(bold=True))
            axes.tick_params(axis="y", labelleft=column == 0, length=0)
            first = first or axes
    return finish(page)


def _draw(page: Page, axes: Axes, found: Operands, operand: str, form: str) -> None:
    """Draw three bars for each scaling."""
    dress(page, axes, grid="x")
    for row, scaling in enumerate(SCALINGS):
        share = found.share(operand, scaling, form)
        for number, (what, (_, paint)) in enumerate(FATES.items()):
            if share[what] > 0:
                at, end = row + (number - 1) * _HIGH, max(share[what], 1.3 * _LEAST)
                axes.barh(at, end - _LEAST, _HIGH, left=_LEAST, **page.paint(what, {what: paint}))
                font, box = page.font(scale=0.68), ground(page.theme.background, 0.05)
                page.write(axes, percent(share[what]), (end, at), (3, 0), ha="left", bbox=box, **font)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST, 30)
    ticks(axes.xaxis, LogLocator(100, numticks=6), lambda share: f"{100 * share:.6g}%" if share <= 1 else "")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(SCALINGS) - 0.5, -0.5)
    axes.set_yticks(range(len(SCALINGS)), SCALINGS)


def percent(share: float) -> str:
    """Return '84', '0.9', '0.003', '0': percent, with few digits."""
    value = 100 * share
    return "0" if value == 0 else "<0.001" if value < 0.001 else f"{value:.0f}" if value >= 9.95 else f"{value:.1g}"
