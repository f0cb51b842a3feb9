"""A mesh's tables: bytes and traffic of each pipeline stage, whose ranks are alike, beside the closed forms.

Stages that hold and send the same share a row. Where there is no pipeline, all ranks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.compare import StateCheck, check_states
from zerosim.analysis.exchanges import check_exchanges
from zerosim.analysis.shares import alike_stages, share_of, shares_of
from zerosim.analysis.traffic import TrafficCheck, check_traffic
from zerosim.report import mesh_words
from zerosim.report.look import Adaptive, Grid, right, spread, stacked, titled
from zerosim.report.mesh_words import stage_name
from zerosim.report.names import local, show
from zerosim.train.result import RunResult

_ACTIVATIONS = ("activation", "activation_grad", "kept")
_STATES = ("param", "grad", "optim")


def states_table(result: RunResult, note: str) -> RenderableType:
    """Model states of a rank at the end of backward, by pipeline stage, beside the paper's formula."""
    pp = result.layout.mesh.pp
    checks = [check_states(result, stage) for stage in range(pp)]
    keys = [[(set(check.counted), check.formula, set(check.padding)) for check in own] for own in checks]
    names = [check.kind for check in checks[0]]
    grid = Grid("", right("Ψ_r"), *map(right, names), right("padding"), "agree")
    runs = alike_stages(keys)
    for run in runs:
        own = checks[run[0]]
        psi, has_padding = share_of(result, run[0]).num_parameters, any(own[-1].padding)
        padding = Fraction(sum(own[-1].padding), len(own[-1].padding))
        grid.add(stage_name(run, pp), psi, *(spread(check.counted, "\n") for check in own), padding)
        if has_padding or any(len(set(check.counted)) > 1 for check in own):
            grid.add("  mean, unpadded" if has_padding else "  mean", None, *(check.mean for check in own))
        agrees = all(check.agrees for check in own)
        grid.add("  formula, bytes", None, *(check.formula for check in own), None, agrees, style="cyan")
    grid.rule()
    grid.add("formula", None, *(local(check.text) for check in checks[0]), style="cyan")
    if not any(any(own[-1].padding) for own in checks):
        grid = grid.without("padding")
    body = Adaptive(grid, grid.without("Ψ_r"), _states_by_kind(checks, runs, pp))
    return titled("Model states per rank when backward ends, in bytes", body, note)


def _states_by_kind(checks: Sequence[Sequence[StateCheck]], runs: Sequence[range], pp: int) -> Grid:
    """The same where there is little room: a row per state."""
    grid = Grid(
        "", right("counted", overflow="fold"), right("formula", style="cyan"), right("in bytes", style="cyan"), ""
    )
    for run in runs:
        for check in checks[run[0]]:
            name = f"{stage_name(run, pp)}\n{check.kind}"
            grid.add(name, show(check.mean), stacked(local(check.text)), check.formula, check.agrees)
        grid.rule()
    return grid


def traffic_rows(result: RunResult, step: int, stage: int) -> list[TrafficCheck]:
    """What a rank of a stage sent on each axis; operations without a message are left out where none is expected."""
    checks = [*check_exchanges(result, step, stage), *check_traffic(result, step, stage)[:-1]]
    return [check for check in checks if any(check.sent) or check.with_padding]


def traffic_table(result: RunResult, step: int, title: str, notes: Sequence[str]) -> RenderableType:
    """What a rank sends in one step, axis by axis, beside the closed forms; by pipeline stage."""
    pp = result.layout.mesh.pp
    rows = [traffic_rows(result, step, stage) for stage in range(pp)]
    keys = [[(c.op, c.axis, c.calls, set(c.sent), c.formula, c.text, c.agrees) for c in own] for own in rows]
    numbers = (right("calls"), right("sent"), right("padding"))
    grid = Grid(
        "", "axis", "operation", *numbers, right("volume", style="cyan"), right("in bytes", style="cyan"), "agree"
    )
    short = Grid("", right("sent"), right("volume", style="cyan"), right("in bytes", style="cyan"), "")
    for run in alike_stages(keys):
        own, name = rows[run[0]], stage_name(run, pp)
        for at, check in enumerate(own):
            seen = None if check.modelled else check.agrees
            where, text, padding = name if not at else "", local(check.text), check.padding or None
            grid.add(where, check.axis, check.op, check.calls, _sent(check), padding, text, check.formula, seen)
            lines = f"{name}\n{check.op}\n{check.axis}" if not at else f"{check.op}\n{check.axis}"
            short.add(lines, _sent(check), stacked(text), check.formula, seen)
        total = sum((check.mean for check in own), Fraction(0))
        formula = sum((check.formula for check in own), Fraction(0))
        grid.add("" if own else name, "", "total", None, total, None, None, formula, style="bold")
        grid.rule()
        short.add("total", show(total), None, formula, style="bold")
        short.rule()
    if not any(check.padding for own in rows for check in own):
        grid = grid.without("padding")
    body = Adaptive(grid, grid.without("calls"), short)
    return titled(title, body, "\n".join([mesh_words.traffic_note(result), *notes]))


def _sent(check: TrafficCheck) -> str:
    """What a rank sent; where ranks differ, the mean, and the least and most."""
    return show(check.mean) if len(set(check.sent)) == 1 else f"{show(check.mean)}\n{spread(check.sent)}"


def peaks_table(result: RunResult) -> RenderableType | None:
    """The peak of each pipeline stage, and what it was made of; None without a pipeline."""
    pp = result.layout.mesh.pp
    if pp == 1:
        return None
    grid = Grid(
        "",
        right("layers"),
        *(right(name) for name in ("model states", "activations", "the rest", "peak")),
        Column("in"),
    )
    peaks = []
    for share in shares_of(result):
        peak = max((result.memory[rank].peak for rank in share.ranks), key=lambda one: one.total_bytes)
        states = sum(peak.by_kind.get(kind, 0) for kind in _STATES)
        activations = sum(peak.by_kind.get(kind, 0) for kind in _ACTIVATIONS)
        total = peak.total_bytes
        peaks.append((share.layers, states, activations, total - states - activations, total, peak.scope.phase))
    for run in alike_stages(peaks):
        grid.add(stage_name(run, pp), *peaks[run[0]])
    note = "Of the rank with the highest peak on each stage; activations with their gradients and inputs that are kept."
    return titled("Peak by pipeline stage, in bytes", Adaptive(grid, grid.short()), note)


def mean_sent(result: RunResult, step: int) -> tuple[Fraction, Fraction, bool]:
    """The mean over all ranks of what was sent for model states and for activations; whether all agrees."""
    stages = range(result.layout.mesh.pp)
    states = [check_traffic(result, step, stage) for stage in stages]
    exchanges = [check_exchanges(result, step, stage) for stage in stages]
    agrees = all(check.agrees for check in chain(*states, *exchanges))
    moved = sum((check.mean for own in exchanges for check in own), Fraction(0))
    return sum((own[-1].mean for own in states), Fraction(0)) / len(stages), moved / len(stages), agrees
