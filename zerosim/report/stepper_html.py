"""A stepped world as HTML for a notebook's cell and as text for a repr: where ranks stand, and what is live on one.

Reads plain data, such as `stepper.RankView` and `stepper.LiveBuffer`. The pieces are `report/html.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zerosim.report.html import MOST_ROWS, bar, bytes_text, card, chip, escaped, legend, table


class BufferRow(Protocol):
    """One live buffer."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def born(self) -> int: ...


class RankLike(Protocol):
    """One rank at one moment."""

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> str: ...
    @property
    def stands(self) -> str: ...
    def memory(self) -> Any: ...


def shape_text(shape: Sequence[int]) -> str:
    """'(4, 16)', '()'."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def live_html(rows: Sequence[BufferRow], title: str = "Live buffers") -> str:
    """One row per live buffer, the oldest first."""
    total = sum(row.nbytes for row in rows)
    cells = [
        [
            row.name, row.unit, chip(row.kind), shape_text(row.shape), row.dtype, f"{row.nbytes:,}",
            str(row.born) if row.born >= 0 else "",
        ]
        for row in rows[:MOST_ROWS]
    ]  # fmt: skip
    head = ("name", "unit", "kind", "shape", "dtype", "bytes", "born at event")
    left_out = len(rows) - len(cells)
    note = f"and {left_out:,} more, {sum(row.nbytes for row in rows[MOST_ROWS:]):,} B." if left_out else ""
    return card(
        f"{title}: {len(rows):,}, {bytes_text(total)} in all", table(head, cells, raw=(2,), left=(0, 1, 2, 3, 4)), note
    )


def live_text(rows: Sequence[BufferRow], title: str = "Live buffers") -> str:
    """The same in text."""
    names = max([4, *(len(row.name) for row in rows)])
    lines = [
        f"  {row.name:{names}}  {row.kind:15} {row.dtype:5} {row.nbytes:>14,} B  event {row.born:<6} "
        f"{shape_text(row.shape)}"
        for row in rows
    ]
    total = sum(row.nbytes for row in rows)
    return "\n".join([f"{title}: {len(rows):,}, {bytes_text(total)} in all", *lines])


def _named(rank: RankLike) -> str:
    return f"{rank.rank} ({rank.place})" if rank.place else str(rank.rank)


def world_html(ranks: Sequence[RankLike], title: str, notes: Sequence[str] = ()) -> str:
    """Ranks at one moment: where each stands, its live bytes. `notes` are lines below, such as what comes."""
    memories = [(rank, dict(rank.memory().by_kind)) for rank in ranks[:MOST_ROWS]]
    most = max([sum(by_kind.values()) for _, by_kind in memories], default=0)
    rows = [
        [
            _named(rank),
            rank.stands,
            f"{sum(by_kind.values()):,}",
            bar(by_kind, most),
        ]
        for rank, by_kind in memories
    ]
    body = table(("rank", "stands", "live bytes", "by kind"), rows, raw=(3,), left=(1, 3), wide="45%")
    kinds = {kind for _, by_kind in memories for kind in by_kind}
    left_out = [f"and {len(ranks) - len(rows):,} ranks more"] if len(ranks) > len(rows) else []
    below = "".join(f"<div>{escaped(line)}</div>" for line in [*left_out, *notes])
    return card(title, body + legend(kinds) + below)
