"""Bytes that a rank sends in one step, by stage and operation, beside what the closed forms say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from zerosim.analysis import formulas
from zerosim.analysis.compare import itemsizes, last_whole_step
from zerosim.errors import InputError
from zerosim.ledger.traffic import TrafficRow
from zerosim.report.plots.bars import Bar, Reference, draw_bars, key_of, too_thin, which_rank
from zerosim.report.plots.page import frame, open_page
from zerosim.report.plots.style import OP_PAINTS
from zerosim.report.plots.words import check_results, run_words
from zerosim.train.result import RunResult
from zerosim.units import format_bytes


def traffic_bars(results: Mapping[str, RunResult]) -> list[Bar]:
    """Bytes sent for model states by operation, in the last step that was not skipped, by the rank that sends most.

    Raises: InputError when every step of a run was skipped.
    """
    check_results(results)
    bars = []
    for label, result in results.items():
        step = last_whole_step(result)
        if step is None:
            raise InputError(f"{label}: every step was skipped, so there is no whole one to draw; run more steps")
        bars.append(Bar.of(label, [_sent(rows, step) for rows in result.traffic]))
    return bars


def traffic_formulas(results: Mapping[str, RunResult]) -> list[Reference]:
    """2Ψ and 3Ψ times (N-1)/N in bytes, for one micro-batch and no tied table; none where runs differ in Ψ, N
    or dtype, and none with replicas.

    Source: ZeRO paper, section 7, through `formulas.volume`.
    """
    sizes = {
        (result.num_parameters, result.config.mesh.ranks, *itemsizes(result.config)) for result in results.values()
    }
    if len(sizes) != 1 or any(result.config.mesh.dp_replicate > 1 for result in results.values()):
        return []
    (size,) = sizes
    if size[1] == 1:
        return []
    volumes = [formulas.volume(0), formulas.volume(3)]
    return [Reference(f"formula: {volume.text()}", volume.sent_bytes(*size)) for volume in volumes]


def traffic_figure(
    results: Mapping[str, RunResult], *, theme: str = "light", size: tuple[float, float] | None = None
) -> Figure:
    """One bar per result, named by its key; `size` is in inches, width first.

    Raises: InputError for no results, an unknown theme, and a run in which every step was skipped.
    """
    bars = traffic_bars(results)
    references = traffic_formulas(results)
    page = open_page(size, theme)
    notes = [which_rank(bars, "sends")]
    if references:
        notes.append("Dashed: the formulas times bytes per element and (N-1)/N, for one micro-batch and no tied table.")
    elif not any(bar.total_bytes for bar in bars):
        notes = ["One rank has nobody to send to."]
    notes += too_thin(bars)
    if any(result.is_modelled for result in results.values()):
        notes.append("Native collectives do not tell what they send: their bars are what a ring would, modelled.")
    control = max(_control(result) for result in results.values())
    if control:
        notes.append(f"Norms and overflow flags, at most {format_bytes(control)} per rank, are not drawn.")
    frame(page, "Bytes sent per rank in one step", run_words(results), key_of(page, bars, OP_PAINTS), notes)
    draw_bars(page, bars, OP_PAINTS, references)
    return page.figure


def _sent(rows: Iterable[TrafficRow], step: int) -> dict[str, int]:
    """Sent bytes of model states by operation."""
    sent: dict[str, int] = {}
    for row in rows:
        if row.step == step and row.purpose == "states":
            sent[row.op] = sent.get(row.op, 0) + row.wire_bytes
    return sent


def _control(result: RunResult) -> int:
    step = last_whole_step(result)
    return 0 if step is None else max(result.sent_bytes(rank, step, "control") for rank in range(len(result.traffic)))
