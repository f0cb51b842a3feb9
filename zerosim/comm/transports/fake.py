"""A transport on which nobody meets: every round counts as done, no `move` runs.

For shape-only worlds, where there is nothing to move. A rank's own record is made before it joins
(`group.py`), so one rank alone leaves the record that it would leave among its peers; that all ranks
call the same things is checked where they do meet, in a world of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.transports.rounds import Call, Copied, Exchange, Key


class DoneRound:
    """A round with nothing left to wait for."""

    def wait(self, rank: int) -> None:
        return None

    def copies(self, rank: int) -> Sequence[Copied]:
        return ()


class FakeTransport:
    """Carries nothing. One thread can stand for any rank of a world of any size."""

    is_staged = False

    def __init__(self) -> None:
        self._done = DoneRound()

    def join(self, rank: int, key: Key, call: Call, exchange: Exchange) -> DoneRound:
        return self._done
