"""`zerosim run --backend cuda --verify-memory`: the ledger beside CuPy's memory pool, and the difference between
them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Column

from zerosim.comm.rank_status import numbers_text
from zerosim.errors import InputError
from zerosim.ledger.memory import MARKS
from zerosim.ledger.pools import PoolRow
from zerosim.report.look import Adaptive, Grid, right, titled
from zerosim.report.names import counted
from zerosim.state.saver import AFTER_SAVE
from zerosim.train.result import RunResult
from zerosim.units import format_bytes


def pools_agree(result: RunResult) -> bool:
    """Return whether every mark of every rank is explained to the byte."""
    return all(row.unexplained_bytes == 0 for memory in result.memory for row in memory.pool)


def pools_table(result: RunResult) -> RenderableType:
    """Return the marks of the last step, equal ranks in one line; then whether all marks of all steps are explained.

    Raises: InputError for a run on a backend whose memory is not a pool's.
    """
    rows = [(rank, row) for rank, memory in enumerate(result.memory) for row in memory.pool]
    if not rows:
        text = "verify_memory: NumPy's memory is the host's, there is no pool to ask; pass --backend cuda"
        raise InputError(text, field="verify_memory")
    last = max(row.step for _, row in rows)
    wrong = [(rank, row) for rank, row in rows if row.unexplained_bytes]
    shown = [(rank, row) for rank, row in rows if row.step in (-1, last) or (rank, row) in wrong[:1]]
    alike: dict[PoolRow, list[int]] = {}
    order = (*MARKS, AFTER_SAVE)
    for rank, row in sorted(shown, key=lambda pair: (pair[1].step, order.index(pair[1].mark))):
        alike.setdefault(row, []).append(rank)
    grid = _grid(alike)
    body = Adaptive(grid, grid.without("held"), grid.without("rounding", "unexplained", "held"))
    return titled("The ledger beside CuPy's memory pool, in bytes", body, _note(result, rows, wrong))


def _grid(alike: Mapping[PoolRow, list[int]]) -> Grid:
    names = (Column(name, no_wrap=True) for name in ("ranks", "step", "mark"))
    figures = ("ledger", "rounding", "pool", "unexplained", "held")
    grid = Grid(*names, *(right(name, no_wrap=True) for name in figures), "agree")
    for row, ranks in alike.items():
        when = (None if row.step < 0 else str(row.step), row.mark.replace("end_of_", "").replace("_", " "))
        counts = (row.live_bytes, row.rounding_bytes, row.used_bytes, row.unexplained_bytes, row.held_bytes)
        grid.add(numbers_text(ranks), *when, *counts, row.unexplained_bytes == 0)
    return grid


def _note(result: RunResult, rows: list[tuple[int, PoolRow]], wrong: list[tuple[int, PoolRow]]) -> str:
    lines = [
        f"{len(rows):,} marks of {counted(len(result.memory), 'rank')}: "
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
