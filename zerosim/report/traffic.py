"""The table of what a rank sends in one step: counted, the paper's volume, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from zerosim.analysis.compare import TrafficCheck, check_traffic, control_bytes, last_whole_step
from zerosim.report import words
from zerosim.report.look import Adaptive, Look, prose, show, spread, stacked, titled
from zerosim.train.result import RunResult


def traffic_table(result: RunResult) -> RenderableType:
    """What a rank sends in one step beside the paper's volume, control traffic below."""
    step = last_whole_step(result)
    if step is None:
        return prose(words.traffic_title(result), "bold")
    checks, control = check_traffic(result, step), control_bytes(result, step)
    body = Adaptive(lambda look: _wide(look, checks), lambda look: _narrow(look, checks))
    if result.is_modelled:
        body = Adaptive(lambda look: _unseen(look, checks))
    notes = [words.volume_note(result), _control(result, control)]
    if staged := _staged(result, step):
        notes.append(f"Messages staged through the host's memory: {spread(staged)} B copied per rank.")
    if result.is_modelled:
        notes.append("Native collectives do not tell what they send: payload is counted, a ring's bytes are modelled.")
    return titled(words.traffic_title(result), body, "\n".join(notes))


def _staged(result: RunResult, step: int) -> list[int]:
    """Bytes that each rank copied between its device and the host for messages, in one step; none where none did."""
    rows = [[row for row in rank if row.step == step and row.purpose == "staging"] for rank in result.traffic]
    return [sum(row.payload_bytes for row in rank) for rank in rows] if any(rows) else []


def _control(result: RunResult, sent: Sequence[int]) -> str:
    if any(sent):
        return f"Control traffic (norm and overflow flags): {spread(sent)} B per rank."
    why = "there is one rank" if result.config.mesh.ranks == 1 else "every rank has all gradients"
    return f"Control traffic: none, for {why}."


def _wide(look: Look, checks: Sequence[TrafficCheck]) -> Table:
    table = look.table()
    table.add_column("operation")
    if has_axes := len({check.axis for check in checks[:-1]}) > 1:
        table.add_column("axis")
    table.add_column("dtype")
    table.add_column("calls", justify="right")
    table.add_column("sent", justify="right")
    if has_padding := any(check.padding for check in checks):
        table.add_column("padding", justify="right")
    table.add_column("volume", justify="right", style="cyan")
    table.add_column(look.text("sent of it, bytes" if has_axes else "×(N-1)/N, bytes"), justify="right", style="cyan")
    table.add_column("agree")
    for index, check in enumerate(checks):
        table.add_row(
            check.op,
            *([check.axis] if has_axes else []),
            " ".join(check.dtypes),
            f"{check.calls:,}",
            _sent(check),
            *([show(check.padding)] if has_padding else []),
            look.text(check.text),
            show(check.formula),
            look.mark(check.agrees),
            end_section=index == len(checks) - 2,
        )
    return table


def _narrow(look: Look, checks: Sequence[TrafficCheck]) -> Table:
    table = look.table()
    table.add_column("operation")
    table.add_column("sent", justify="right", overflow="fold")
    table.add_column("volume", justify="right", style="cyan")
    table.add_column("in bytes", justify="right", style="cyan", overflow="fold")
    table.add_column("")
    has_axes = len({check.axis for check in checks[:-1]}) > 1
    for index, check in enumerate(checks):
        padding = f"\n{show(check.padding)} padding" if check.padding else ""
        table.add_row(
            f"{check.op}\n{check.axis}" if has_axes and check.axis else check.op,
            _sent(check) + padding,
            look.text(stacked(check.text)),
            show(check.formula),
            look.mark(check.agrees),
            end_section=index == len(checks) - 2,
        )
    return table


def _unseen(look: Look, checks: Sequence[TrafficCheck]) -> Table:
    """Native collectives: what they were given is counted, what they sent is not; so nothing agrees with a formula."""
    table = look.table()
    table.add_column("operation")
    table.add_column("dtype")
    for name in ("calls", "payload", "a ring's"):
        table.add_column(name, justify="right", overflow="fold")
    for index, check in enumerate(checks):
        figures = (f"{check.calls:,}", show(check.payload), _sent(check))
        table.add_row(check.op, " ".join(check.dtypes), *figures, end_section=index == len(checks) - 2)
    return table


def _sent(check: TrafficCheck) -> str:
    """What a rank sent; where ranks differ, the mean, and the least and most."""
    if len(set(check.sent)) == 1:
        return show(check.sent[0])
    return f"{show(check.mean)}\n{spread(check.sent)}"
