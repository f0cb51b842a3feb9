"""The table of model states per rank: what was counted, the paper's formula, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rich.console import RenderableType
from rich.table import Table

from zerosim.analysis.compare import StateCheck, check_states
from zerosim.report import words
from zerosim.report.look import Adaptive, Look, show, spread, stacked, titled
from zerosim.train.result import RunResult

EACH_RANK = 8
"""Up to so many ranks have a row each."""


def states_table(result: RunResult) -> RenderableType:
    """Model states per rank at the end of backward beside the paper's formula."""
    checks = check_states(result)
    body = Adaptive(lambda look: _states_by_rank(look, checks), lambda look: _states_by_kind(look, checks))
    return titled("Model states per rank when backward ends, in bytes", body, words.states_note(result))


def _states_by_rank(look: Look, checks: Sequence[StateCheck]) -> Table:
    """A row per rank (or the least, mean and most), a column per state; then formula and mark."""
    table = look.table()
    table.add_column("")
    for check in checks:
        table.add_column(check.kind, justify="right")
    has_padding = any(checks[-1].padding)
    if has_padding:
        table.add_column("padding", justify="right")
    rows = _by_rank(checks)
    for index, (name, values, padding) in enumerate(rows):
        extra = [show(padding)] if has_padding else []
        table.add_row(name, *map(show, values), *extra, end_section=index == len(rows) - 1)
    is_uneven = any(len(set(check.counted)) > 1 for check in checks)
    if has_padding or (is_uneven and all(name != "mean" for name, _, _ in rows)):
        table.add_row("mean, unpadded" if has_padding else "mean", *(show(check.mean) for check in checks))
    table.add_row("formula", *(look.text(check.text) for check in checks), style="cyan")
    table.add_row("in bytes", *(show(check.formula) for check in checks), style="cyan")
    table.add_row("agree", *(look.mark(check.agrees) for check in checks))
    return table


def _by_rank(checks: Sequence[StateCheck]) -> list[tuple[str, list[Fraction | int], Fraction | int]]:
    """(name, a value per check, padding) for each rank, or for the least, mean and most where they are many."""
    ranks = len(checks[0].counted)
    padding = checks[-1].padding
    if ranks <= EACH_RANK:
        return [(f"rank {rank}", [check.counted[rank] for check in checks], padding[rank]) for rank in range(ranks)]
    if all(len(set(check.counted)) == 1 for check in checks) and not any(padding):
        return [(f"each of {ranks} ranks", [check.counted[0] for check in checks], 0)]
    return [
        ("least of a rank", [min(check.counted) for check in checks], min(padding)),
        ("mean", [Fraction(sum(check.counted), ranks) for check in checks], Fraction(sum(padding), ranks)),
        ("most of a rank", [max(check.counted) for check in checks], max(padding)),
    ]


def _states_by_kind(look: Look, checks: Sequence[StateCheck]) -> Table:
    """The same where there is little room: a row per state."""
    table = look.table()
    table.add_column("")
    table.add_column("counted", justify="right", overflow="fold")
    if has_padding := any(checks[-1].padding):
        table.add_column("padding", justify="right")
    table.add_column("formula", justify="right", style="cyan")
    table.add_column("in bytes", justify="right", style="cyan", overflow="fold")
    table.add_column("")
    for check in checks:
        padding = [spread(check.padding, "\n")] if has_padding else []
        table.add_row(
            check.kind,
            spread(check.counted, "\n"),
            *padding,
            look.text(stacked(check.text)),
            show(check.formula),
            look.mark(check.agrees),
        )
    return table
