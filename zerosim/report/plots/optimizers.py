"""The same model trained by several optimizers: loss by step, and beside it the counted bytes of each per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator

from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.errors import InputError
from zerosim.report.names import STAGES
from zerosim.report.plots.axes import ticks
from zerosim.report.plots.lines import beside, finish_lines
from zerosim.report.plots.page import Page, dress, frame, ground, inches, open_page, plain, settle
from zerosim.report.plots.style import LINE_PAINTS, stroke
from zerosim.report.plots.words import check_results, run_words
from zerosim.train.result import RunResult

MOST = len(LINE_PAINTS)
"""The most optimizers in a picture: as many as there are distinguishable colours."""


def optimizers_figure(
    results: Mapping[str, RunResult],
    *,
    notes: Sequence[str] = (),
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `results`, runs on the same batches, by the optimizers' names.

    Raises: InputError for no results, more than `MOST`, or an unknown theme.
    """
    check_results(results)
    if len(results) > MOST:
        raise InputError(f"{len(results)} optimizers are more than the {MOST} that one picture holds")
    page = open_page(size, theme, (11.5, max(4.5, 1.9 + 0.5 * len(results))))
    stages = "/".join(dict.fromkeys(STAGES[result.config.parallel.zero_stage] for result in results.values()))
    own = (
        "Each run has its own learning rate. K: bytes of optimizer states per parameter when backward ends, as counted."
    )
    subtitle = f"{run_words(results).rpartition(' with ')[0]}, {stages}; the same batches"
    frame(page, "Loss by step, and the bytes that each optimizer stores", subtitle, notes=[own, *notes])
    left, right = page.figure.subplots(1, 2, width_ratios=(5, 4))
    labels = _losses(page, left, results)
    _bars(page, right, results)
    return finish_lines(page, left, labels)


def _losses(page: Page, axes: Axes, results: Mapping[str, RunResult]) -> list[Annotation]:
    """Draw a line an optimizer, its name and last loss right of the axes."""
    dress(page, axes, grid="both", x="step", y="loss")
    labels = []
    for index, (name, result) in enumerate(results.items()):
        losses, looks = result.mean_losses, stroke(index, page.theme) | {"markersize": page.points * 0.6}
        axes.plot(range(1, len(losses) + 1), losses, clip_on=False, gid=f"loss.{name}", **looks)
        end, words = (len(losses), losses[-1]), f"{plain(name)}  {losses[-1]:.3f}"
        labels.append(beside(page, axes, end, words, looks["color"]))
    starts = max(result.mean_losses[0] for result in results.values())
    lowest = min(min(result.mean_losses) for result in results.values())
    highest = max(max(result.mean_losses) for result in results.values())
    pad = 0.04 * (min(highest, 1.5 * starts) - lowest) or 0.1
    axes.set_ylim(lowest - pad, min(highest, 1.5 * starts) + pad)  # a diverging one leaves the others their room
    ticks(axes.xaxis, MaxNLocator(6, integer=True))
    return labels


def _bars(page: Page, axes: Axes, results: Mapping[str, RunResult]) -> None:
    """Draw a bar an optimizer, cut where one state ends; its length at its end, the states' names below it."""
    dress(page, axes, grid="x", x="K, bytes per parameter")
    kept = {name: float(bytes_per_parameter(result)["optim"]) for name, result in results.items()}
    most = max(kept.values()) or 1
    names = []
    for row, (name, result) in enumerate(results.items()):
        states: dict[str, int] = {}
        for memory in result.memory:
            for state, nbytes in memory.states.items():
                states[state] = states.get(state, 0) + nbytes
        start, color = 0.0, page.theme.color(LINE_PAINTS[row])
        for nbytes in states.values():
            width = kept[name] * nbytes / sum(states.values())
            axes.barh(row - 0.16, width, 0.4, start, color=color, edgecolor=page.theme.background, linewidth=1.2)
            start += width
        end = kept[name] + most * 0.015, row - 0.16
        page.write(axes, f"{kept[name]:.4g}", end, va="center", ha="left", **page.font(scale=0.95))
        names.append((row, list(states)))
    axes.set_ylim(max(len(results), 3) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.15)
    rates = [f"{plain(name)}\nlr {result.config.optim.lr:g}" for name, result in results.items()]
    axes.set_yticks(range(len(results)), rates)
    axes.tick_params(axis="y", length=0)
    ticks(axes.xaxis, MaxNLocator(6, steps=[1, 2, 4, 10], integer=True))
    settle(page)
    box = ground(page.theme.background)
    small, room = page.font(scale=0.75), inches(page, axes)[0]
    for row, known in names:
        words = " + ".join(known) or "none"
        words = words if page.width(words, **small) < room else f"{len(known)} states"
        where = most * 0.01, row + 0.21
        page.write(axes, words, where, va="center", ha="left", color=page.theme.muted, bbox=box, **small)
