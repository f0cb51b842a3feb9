"""A transport without peers: every round counts as done, and no `move` runs.

For shape-only worlds, in which no data moves. A rank records its calls before it joins (`group.py`), so one rank alone
leaves the same record as among its peers. Worlds of threads check that all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.transports.rounds import Call, Copied, Exchange, Key


class DoneRound:
    """A round that is already done."""

    def wait(self, rank: int) -> None:
        return None

    def copies(self, rank: int) -> Sequence[Copied]:
        return ()


class FakeTransport:
    """A transport that carries nothing. One thread can act as any rank of a world of any size."""

    is_staged = False

    def __init__(self) -> None:
        self._done = DoneRound()

    def join(self, rank: int, key: Key, call: Call, exchange: Exchange) -> DoneRound:
        return self._done
