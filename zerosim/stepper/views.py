"""What can be looked at while a world stands still: a rank's bytes and where it is, and collectives under way.

Values are copies: a view holds no memory of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.comm import rank_status
from zerosim.comm.scheduler import State
from zerosim.device.events import Event
from zerosim.errors import InputError
from zerosim.ledger.memory import Snapshot
from zerosim.report.html import MOST_ROWS, bar, card, escaped, legend, table
from zerosim.stepper.live import LiveTable, live_buffers
from zerosim.stepper.match import Moment, describe, numbered
from zerosim.stepper.parameters import Parameters
from zerosim.stepper.session import Parts, Session


class RankView:
    """One rank at this moment."""

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self.rank = rank

    @property
    def place(self) -> str:
        """Where it stands in the mesh, 'dp_replicate 0, dp_shard 1'; '' in a mesh of one axis."""
        return self._session.experiment.layout.mesh.place(self.rank)

    @property
    def events(self) -> list[Event]:
        """Its record so far."""
        return list(self._session.recorders[self.rank].history)

    @property
    def next_event(self) -> Moment | None:
        """The event that it stands before; None where it waits for others or has finished."""
        event = self._session.pending[self.rank]
        if event is None:
            return None
        history = self._session.recorders[self.rank].history
        text = describe(event, self._session.ledgers[self.rank].memory.live, history)
        return Moment(self.rank, len(history), event, text)

    @property
    def status(self) -> str:
        """What it is doing, in words."""
        upcoming = self.next_event
        if upcoming is not None:
            return f"before {upcoming.text}"
        if self._session.scheduler.states[self.rank] is State.FINISHED:
            return "finished"
        return self._session.transport.stand(self.rank)

    def memory(self) -> Snapshot:
        """Live bytes by kind and unit."""
        history = self._session.recorders[self.rank].history
        ledger = self._session.ledgers[self.rank].memory
        return ledger.now(history[-1].scope) if history else ledger.now()

    def live(self) -> LiveTable:
        """Every live buffer, oldest first."""
        return live_buffers(self._session, self.rank)

    @property
    def parameters(self) -> Parameters:
        """The model's parameters by name, as this rank holds them."""
        return Parameters(self.rank, self._parts())

    @property
    def strategy(self) -> Any:
        """The rank's strategy itself, for those who want to look further."""
        return self._parts().strategy

    @property
    def model(self) -> Any:
        """The rank's model itself, for those who want to look further."""
        return self._parts().model

    def _parts(self) -> Parts:
        parts = self._session.parts[self.rank]
        if parts is None:
            raise InputError(f"rank {self.rank} holds no model: its program has ended; world.back() goes back to it")
        return parts

    def __repr__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"RankView(rank {self.rank}{where}, {self.memory().total_bytes:,} B live, {self.status})"

    def _repr_html_(self) -> str:
        return world_html([self], f"Rank {self.rank}")


def world_html(ranks: Sequence[RankView], title: str, notes: Sequence[str] = ()) -> str:
    """Ranks at one moment: where each stands, its live bytes. `notes` are lines below, such as what comes."""
    memories = [rank.memory().by_kind for rank in ranks[:MOST_ROWS]]
    most = max([sum(by_kind.values()) for by_kind in memories], default=0)
    rows = [
        [
            f"{rank.rank} ({rank.place})" if rank.place else str(rank.rank),
            rank.status,
            f"{sum(by_kind.values()):,}",
            bar(by_kind, most),
        ]
        for rank, by_kind in zip(ranks, memories, strict=False)
    ]
    body = table(("rank", "stands", "live bytes", "by kind"), rows, raw=(3,), left=(1, 3), wide="45%")
    left_out = [f"and {len(ranks) - len(rows):,} ranks more"] if len(ranks) > len(rows) else []
    below = "".join(f"<div>{escaped(line)}</div>" for line in [*left_out, *notes])
    return card(title, body + legend({kind for by_kind in memories for kind in by_kind}) + below)


class PendingCollective(NamedTuple):
    """A round that waits for ranks: who has joined with how many bytes, and who is missing.

    `sequence` counts the group's collectives, from 0: it is the same on all ranks, as in `Launch`.
    """

    op: str
    dtype: str
    group: tuple[int, ...]
    sequence: int
    joined: tuple[tuple[int, int], ...]
    missing: tuple[int, ...]

    def __repr__(self) -> str:
        here = ", ".join(f"rank {rank} ({nbytes:,} B)" for rank, nbytes in self.joined)
        missing = rank_status.ranks_text(list(self.missing))
        return f"{numbered(self.op, self.sequence)}: {here} joined; waits for {missing}"


def pending_collectives(session: Session) -> list[PendingCollective]:
    found = []
    for round in session.transport.under_way():
        joined = [
            (rank, sum(int(array.nbytes) for array in exchange.posted))
            for rank, exchange in zip(round.group, round.exchanges, strict=True)
            if exchange is not None
        ]
        call = round.call
        found.append(
            PendingCollective(call.op, call.dtype, round.group, round.sequence, tuple(joined), tuple(round.missing()))
        )
    return found
