"""The errors of transports if the ranks' collectives do not match. The tables below them: `rank_status.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerosim.comm import rank_status
from zerosim.device.events import Scope
from zerosim.errors import Deadlock, LateRank, Mismatch

if TYPE_CHECKING:
    from zerosim.comm.transports.rounds import Call


class Caller(NamedTuple):
    """The rank and the call that it made, and the place in its program."""

    rank: int
    call: Call
    where: Scope

    def describe(self, group: Sequence[int]) -> str:
        called = self.call.describe(self.rank == group[0])
        return f"rank {self.rank} called {called} in {rank_status.scope_text(self.where)}"


def mismatch(second: Caller, first: Caller, group: Sequence[int], sequence: int) -> Mismatch:
    """Return the error of two members of a group that joined with different calls."""
    return Mismatch(
        f"{second.describe(group)} but {first.describe(group)}: "
        f"they meet in number {sequence} of group {rank_status.numbers_text(group)}, "
        f"where all must call the same operation with the same shapes and dtype",
        rank=second.rank,
    )


def deadlock(num_waiting: int, table: str) -> Deadlock:
    """Return the error of a world in which no rank can run."""
    waiting = "1 rank waits" if num_waiting == 1 else f"{num_waiting} ranks wait"
    return Deadlock(
        f"deadlock: {waiting} in a collective and no rank is left to join it; "
        f"every rank of a group must call the same collectives in the same order\n{table}"
    )


def unanswered(caller: Caller, group: Sequence[int], sequence: int, missing: Sequence[int]) -> Deadlock:
    """Return the error of a call that reaches another process whose ranks `missing` have ended without it."""
    return Deadlock(
        f"deadlock: {caller.describe(group)}, number {sequence} of group {rank_status.numbers_text(group)}, and "
        f"{rank_status.ranks_text(missing)} ended without joining it; every rank of a group must call the same "
        "collectives in the same order"
    )


def late(ranks: Sequence[int], timeout_s: float, table: str, rank: int | None = None) -> LateRank:
    """Return the error of ranks that others wait for. It blames `rank`, or the first of them."""
    blamed = ranks[0] if rank is None and ranks else rank
    return LateRank(
        f"{rank_status.ranks_text(ranks)} did not arrive while others wait, and no rank did anything "
        f"for {timeout_s:g} s: the table shows each rank's place; fix the late rank, or raise timeout_s\n{table}",
        rank=blamed,
    )
