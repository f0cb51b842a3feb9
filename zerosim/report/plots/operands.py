"""The numbers that lose digits, become 0 or saturate in 8 bits, by scaling, for each operand of a run's products."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.config.parts.fp8 import SCALINGS
from zerosim.errors import InputError
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.gradients import FATES as LOST
from zerosim.report.plots.panel import Axis, Box, Panel
from zerosim.report.plots.style import LINE_PAINTS, Paint
from zerosim.report.plots.words import percent
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


def operands_figure(found: Operands, *, subtitle: str = "") -> Chart:
    """Return the picture. Raises: InputError for a run without products in its blocks."""
    if not all(found.num.values()):
        raise InputError("no linear map of a block ran: there is nothing to draw; train a gpt or a llama")
    total = f"{format_count(sum(found.num.values()))} numbers of {found.steps} steps"
    notes = (
        "Shares of the numbers that are not 0, in percent, on a logarithmic axis. A row without a bar loses none. "
        "Saturates: too large for the format after scaling.",
        "Delayed scaling takes the amax of the step before. Its first step has no amax and leaves numbers as they are.",
    )
    rows = tuple(tuple(_panel(found, operand, form) for operand in OPERANDS) for form in FORMATS)
    subtitle = f"{subtitle}: {total}" if subtitle else total
    return Chart("What 8 bits lose under each scaling", subtitle, rows, tuple(FATES.values()), notes, size=(9.0, 7.6))


def _panel(found: Operands, operand: str, form: str) -> Panel:
    """Return three bars for each scaling."""
    marks = []
    for row, scaling in enumerate(SCALINGS):
        share = found.share(operand, scaling, form)
        for number, (what, (_, paint)) in enumerate(FATES.items()):
            if share[what] > 0:
                low, end = row + (number - 1.5) * _HIGH, max(share[what], 1.3 * _LEAST)
                marks.append(
                    Box(what, (_LEAST, end), (low, low + _HIGH), paint, after=percent(share[what]), scale=0.68)
                )
    x = Axis(ends=(_LEAST, 30), words=lambda share: f"{100 * share:.6g}%" if share <= 1 else "", log=True)
    y = Axis.of_rows(SCALINGS, hidden=operand != OPERANDS[0])
    return Panel(tuple(marks), x, y, f"{CALLED[operand]} in {form}", "x")
