"""`zerosim run --backend cuda --verify-memory`: the ledger beside CuPy's memory pool, and what lies between them."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from zerosim.errors import InputError
from zerosim.pools import PoolRow
from zerosim.report.look import Adaptive, Look, titled
from zerosim.result import RunResult
from zerosim.units import format_bytes


def pools_agree(result: RunResult) -> bool:
    """Whether every mark of every rank is explained to the byte."""
    return all(row.unexplained_bytes == 0 for memory in result.memory for row in memory.pool)


def pools_table(result: RunResult) -> RenderableType:
    """The marks of the last step by rank, then how many marks there were and whether all are explained.

    Raises: InputError for a run on a backend whose memory is not a pool's.
    """
    rows = [(rank, row) for rank, memory in enumerate(result.memory) for row in memory.pool]
    if not rows:
        raise InputError("verify_memory: NumPy's memory is the host's, there is no pool to ask; pass --backend cuda")
    last = max(row.step for _, row in rows)
    shown = [(rank, row) for rank, row in rows if row.step in (-1, last)]
    wrong = [(rank, row) for rank, row in rows if row.unexplained_bytes]
    body = Adaptive(lambda look: _table(look, [*shown, *_first(wrong, shown)]))
    return titled("The ledger and CuPy's memory pool, in bytes", body, _note(result, rows, wrong))


def _first(wrong: list[tuple[int, PoolRow]], shown: list[tuple[int, PoolRow]]) -> list[tuple[int, PoolRow]]:
    """The first mark that is not explained, where it is of an earlier step than those shown."""
    return [pair for pair in wrong[:1] if pair not in shown]


def _table(look: Look, rows: list[tuple[int, PoolRow]]) -> Table:
    table = look.table()
    for name in ("rank", "mark"):
        table.add_column(name)
    for name in ("ledger", "rounding", "pool", "unexplained", "held"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("agree")
    for rank, row in rows:
        table.add_row(
            str(rank),
            row.mark if row.step < 0 else f"{row.mark}, step {row.step}",
            f"{row.live_bytes:,}",
            f"{row.rounding_bytes:,}",
            f"{row.used_bytes:,}",
            f"{row.unexplained_bytes:,}",
            f"{row.held_bytes:,}",
            look.mark(row.unexplained_bytes == 0),
        )
    return table


def _note(result: RunResult, rows: list[tuple[int, PoolRow]], wrong: list[tuple[int, PoolRow]]) -> str:
    lines = [
        f"{len(rows):,} marks of {len(result.memory)} rank(s): "
        + ("all explained to the byte." if not wrong else f"{len(wrong):,} are NOT explained."),
        "rounding: each allocation takes whole blocks of 512 bytes. held: what the pool keeps, in use or not.",
    ]
    for gpu in result.gpus:
        lines.append(
            f"GPU {gpu.index} ({gpu.name}): {format_bytes(gpu.used_bytes)} in use in all, "
            f"{format_bytes(gpu.outside_bytes)} of it outside these pools: CUDA's context, compiled kernels, cuBLAS's "
            "workspaces, other programs."
        )
    return "\n".join(lines)
