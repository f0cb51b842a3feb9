"""The same model trained by several optimizers: loss by step, and beside it the counted bytes of each per parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.errors import InputError
from zerosim.report.names import STAGES
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Box, Line, Note, Panel
from zerosim.report.plots.style import LINE_PAINTS, sheet_paint
from zerosim.report.plots.words import check_results, run_words
from zerosim.train.result import RunResult

MOST = len(LINE_PAINTS)
"""The most optimizers in a picture: as many as there are distinguishable colours."""
_LONGEST = 48  # letters of the states' names below a bar


def optimizers_figure(results: Mapping[str, RunResult], *, notes: Sequence[str] = ()) -> Chart:
    """Return losses and bytes of `results`, runs on the same batches, by the optimizers' names.

    Raises: InputError for no results, and more than `MOST`.
    """
    check_results(results)
    if len(results) > MOST:
        raise InputError(f"{len(results)} optimizers are more than the {MOST} that one picture holds")
    stages = "/".join(dict.fromkeys(STAGES[result.config.parallel.zero_stage] for result in results.values()))
    own = (
        "Each run has its own learning rate. K: bytes of optimizer states per parameter when backward ends, as counted."
    )
    subtitle = f"{run_words(results).rpartition(' with ')[0]}, {stages}; the same batches"
    title = "Loss by step, and the bytes that each optimizer stores"
    size = 11.5, max(4.5, 1.9 + 0.5 * len(results))
    return Chart(title, subtitle, ((_losses(results), _bars(results)),), notes=(own, *notes), size=size, widths=(5, 4))


def _losses(results: Mapping[str, RunResult]) -> Panel:
    """Return a line an optimizer, its name and last loss beside it. A diverging one leaves the others their room."""
    losses = {name: result.mean_losses for name, result in results.items()}
    starts, every = max(line[0] for line in losses.values()), [loss for line in losses.values() for loss in line]
    low, high = min(every), min(max(every), 1.5 * starts)
    pad = 0.04 * (high - low) or 0.1
    lines = [
        Line(name, list(enumerate(line, 1)), index, f"{name}  {line[-1]:.3f}")
        for index, (name, line) in enumerate(losses.items())
    ]
    steps = max(map(len, losses.values()))
    return Panel(tuple(lines), Axis("step", (0.95, max(steps, 1.5)), whole=True), Axis("loss", (low - pad, high + pad)))


def _bars(results: Mapping[str, RunResult]) -> Panel:
    """Return a bar an optimizer, cut where one state ends, its length at its end, the states' names below it."""
    marks: list[Box | Note] = []
    most = 1.0
    for row, (name, result) in enumerate(results.items()):
        states = sum((Counter(memory.states) for memory in result.memory), Counter[str]())
        kept, start, paint = float(bytes_per_parameter(result)["optim"]), 0.0, LINE_PAINTS[row]
        most = max(most, kept)
        for state, nbytes in states.items():
            stop = start + kept * nbytes / states.total()
            marks.append(Box(f"{name}.{state}", (start, stop), (row - 0.36, row + 0.04), paint))
            start = stop
        marks.append(Box(name, (kept, kept), (row - 0.36, row + 0.04), paint, after=f"{kept:.4g}"))
        words = " + ".join(states) or "none"
        words = words if len(words) <= _LONGEST else f"{len(states)} states"
        marks.append(Note(words, (0, row + 0.21), "left center", (0.3, 0), 0.75, paint=sheet_paint("muted")))
    rows = [f"{name}\nlr {result.config.optim.lr:g}" for name, result in results.items()]
    y = Axis(ends=(max(len(rows), 3) - 0.5, -0.5), rows=tuple(rows))
    return Panel(tuple(marks), Axis("K, bytes per parameter", (0, most), whole=True), y, grid="x")
