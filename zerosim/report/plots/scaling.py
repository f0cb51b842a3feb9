"""Bytes per rank against the number of ranks, one line per ZeRO stage, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerosim.errors import InputError
from zerosim.report.plots.by_stage import MOMENTS
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Line, Panel, Rule
from zerosim.report.plots.words import limit_words, tick_bytes, whole_words
from zerosim.units import format_bytes

Points = Sequence[tuple[int, int]]
_FARTHEST = 300  # a limit beyond this many times the data is named, not drawn to scale


def scaling_figure(
    points: Mapping[str, Points],
    *,
    limit: tuple[str, int] | None = None,
    mark: str = "end_of_backward",
    subtitle: str = "",
) -> Chart:
    """Return lines of `points`, (ranks, bytes per rank) by stage's name; `mark` is the moment at which they were
    counted.

    With a limit, points that fit are filled and the others are hollow. Raises: InputError for no points, and points
    that a logarithmic axis does not have.
    """
    lines = {name: sorted(line) for name, line in points.items() if line}
    if not lines:
        raise InputError("no points: there is nothing to draw; give at least one number of ranks")
    for name, line in lines.items():
        for ranks, nbytes in line:
            if ranks < 1 or nbytes < 1:
                raise InputError(f"{name}: {nbytes} bytes on {ranks} ranks: expected both to be at least 1")
    whose = "the peak" if mark == "peak" else f"what is held {MOMENTS[mark]}"
    notes = [f"Filled: {whose} is within the limit. Hollow: it is not."] if limit else []
    if limit and mark != "peak":
        notes.append("The peak decides whether a run fits: --mark peak.")
    marks = [
        Line(name, line, index, f"{name}  {format_bytes(line[-1][1])}", [not limit or n <= limit[1] for _, n in line])
        for index, (name, line) in enumerate(lines.items())
    ]
    rules = [] if limit is None else [Rule(limit_words(limit), y=limit[1])]
    sizes = tuple(sorted({ranks for line in lines.values() for ranks, _ in line}))
    values = [nbytes for line in lines.values() for _, nbytes in line]
    if limit is not None and min(values) / _FARTHEST <= limit[1] <= max(values) * _FARTHEST:
        values.append(limit[1])
    x = Axis("data-parallel ranks N", (sizes[0] / 1.15, sizes[-1] * 1.15), whole_words, among=sizes, log=True)
    y = Axis(ends=(min(values) / 1.6, max(values) * 1.6), words=tick_bytes, log=True)
    title = f"Bytes per rank {MOMENTS[mark]}, by number of ranks"
    return Chart(title, subtitle, ((Panel((*marks, *rules), x, y),),), notes=tuple(notes))
