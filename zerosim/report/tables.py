"""A run's result as rich renderables: for the command line, and for a notebook's cells.

`summary` is all of it. Each table shows what was counted, what the formula says, and a mark that is
computed from the two (`numbers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from zerosim.analysis.compare import is_owned, peak_rank
from zerosim.report import words
from zerosim.report.look import PROSE_WIDTH, Adaptive, Look, Stack, prose, titled
from zerosim.report.states import states_table
from zerosim.report.traffic import traffic_table
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

__all__ = ["kinds_table", "owners_table", "peak_table", "sample_text", "states_table", "summary", "traffic_table"]


def summary(result: RunResult) -> Stack:
    """What a run did, from its loss to its bytes."""
    return Stack(
        prose(words.headline(result.config), "bold"),
        prose(words.trained(result)),
        prose(words.learned(result), "bold green" if _has_learned(result) else "bold"),
        None if (text := words.scaled(result)) is None else prose(text),
        owners_table(result) if is_owned(result.config) else None,
        states_table(result),
        traffic_table(result),
        peak_table(result),
        sample_text(result) if result.sample is not None else None,
        prose(words.closing(result)),
    )


def _has_learned(result: RunResult) -> bool:
    return result.mean_losses[-1] < result.mean_losses[0]


def peak_table(result: RunResult) -> RenderableType:
    """The moment with the most live bytes, and what they were."""
    rank = peak_rank(result)
    peak = result.memory[rank].peak
    scope, total = peak.scope, peak.total_bytes
    same = len({memory.peak.total_bytes for memory in result.memory}) == 1
    where = "each rank" if same and len(result.memory) > 1 else f"rank {rank}"
    title = f"Peak: {format_bytes(total)} ({total:,} B) on {where}, {words.moment(*scope[:3])}"
    return titled(title, kinds_table(peak.by_kind))


def kinds_table(by_kind: Mapping[str, int]) -> Adaptive:
    """Bytes by kind, the most first, with what each kind is."""
    items = sorted(by_kind.items(), key=lambda item: -item[1])

    def build(look: Look, explained: bool) -> Table:
        table = look.table()
        table.add_column("kind")
        table.add_column("bytes", justify="right")
        table.add_column("share", justify="right")
        if explained:
            table.add_column("what it is", style="dim")
        total = sum(nbytes for _, nbytes in items)
        for kind, nbytes in items:
            meaning = [words.KINDS.get(kind, "")] if explained else []
            table.add_row(kind, f"{nbytes:,}", _percent(nbytes, total), *meaning)
        return table

    return Adaptive(lambda look: build(look, True), lambda look: build(look, False))


def sample_text(result: RunResult) -> RenderableType:
    """The prompt and what the model made of it. Control characters are shown as a dot."""
    prompt, answer = result.config.data.sample or "", (result.sample or b"").decode(errors="replace")
    body = Text(_printable(prompt), style="dim").append(_printable(answer), style="not dim")
    return titled("Sample", Constrain(body, PROSE_WIDTH))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)


def owners_table(result: RunResult) -> RenderableType:
    """Which rank owns which units."""

    def build(look: Look) -> Table:
        table = look.table()
        table.add_column("rank", justify="right")
        table.add_column("elements", justify="right")
        table.add_column("units", overflow="fold")
        owners = sorted({unit.owner for unit in result.units if unit.owner is not None})
        for rank in owners:
            own = [unit for unit in result.units if unit.owner == rank]
            table.add_row(str(rank), f"{sum(unit.numel for unit in own):,}", ", ".join(unit.name for unit in own))
        if idle := result.config.mesh.dp_shard - len(owners):
            table.add_row(f"{idle:,} more", "0", "nothing: there are fewer units than ranks")
        return table

    return titled(
        "Who owns what",
        Adaptive(build),
        "Units are dealt out by size: the largest first, each to the rank that has the least so far.",
    )


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else ""
