"""Bytes per rank by stage, stacked by kind: Figure 1 of the ZeRO paper, drawn from what was counted."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from zerosim.errors import InputError
from zerosim.ledger.memory import MARKS
from zerosim.report.plots.bars import Bar, Reference, draw_bars, key_of, too_thin, which_rank
from zerosim.report.plots.page import frame, open_page
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.report.plots.words import check_results, limit_words, run_words
from zerosim.train.result import RunResult

MOMENTS = {
    "after_init": "after the start, before any step",
    "end_of_forward": "when forward ends",
    "end_of_backward": "when backward ends",
    "after_step": "after the step",
    "peak": "at the peak",
}


def memory_bars(results: Mapping[str, RunResult], mark: str = "end_of_backward") -> list[Bar]:
    """Live bytes by kind at a mark, on the rank that has the most of them there. One bar per result.

    Raises: InputError for a mark that is not one of `MOMENTS`.
    """
    check_results(results)
    if mark not in MOMENTS:
        raise InputError(f"mark {mark!r}: expected one of {', '.join((*MARKS, 'peak'))}")
    return [
        Bar.of(label, [(memory.peak if mark == "peak" else memory.marks[mark]).by_kind for memory in result.memory])
        for label, result in results.items()
    ]


def memory_figure(
    results: Mapping[str, RunResult],
    *,
    limit: tuple[str, int] | None = None,
    mark: str = "end_of_backward",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """One bar per result, named by its key, such as 'ZeRO-1 (P_os)'; padding is counted.

    `limit` is a device's name and memory in bytes; `size` is in inches, width first.
    Raises: InputError for no results, and for an unknown mark or theme.
    """
    bars = memory_bars(results, mark)
    page = open_page(size, theme)
    notes = [which_rank(bars, "holds"), *too_thin(bars)]
    frame(page, f"Bytes per rank {MOMENTS[mark]}", run_words(results), key_of(page, bars, KIND_PAINTS), notes)
    references = [] if limit is None else [Reference(limit_words(limit), limit[1])]
    draw_bars(page, bars, KIND_PAINTS, references)
    return page.figure
