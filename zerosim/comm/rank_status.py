"""Every rank's position in words: the tables under a Deadlock or a LateRank.

Ranks at the same position share a line, so a world of 1,024 still fits on a screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.events import Scope

MAX_LINES = 32


def scope_text(where: Scope) -> str:
    """Return 'backward of h.1', or the phase alone outside any unit."""
    return f"{where.phase} of {where.unit}" if where.unit else where.phase


def numbers_text(ranks: Sequence[int]) -> str:
    """Return '0-3, 6' for 0, 1, 2, 3, 6 (in the given order)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return 'rank 3', 'ranks 0-3, 6', or nothing for no rank."""
    if not ranks:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_text(ranks)}"


def table(stands: Sequence[str]) -> str:
    """Return a table in which ranks with the same text share a line; `stands` has one text per rank."""
    alike: dict[str, list[int]] = {}
    for rank, text in enumerate(stands):
        alike.setdefault(text, []).append(rank)
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in alike.items()]
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"  and {len(lines) - MAX_LINES} more"]
    return "\n".join(lines)
