"""What can be looked at while a world stands still: a rank's bytes and where it is, and what is under way.

Reads a session; changes nothing of it. Values are copies: a view holds no memory of any rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerosim.comm import rank_status
from zerosim.comm.scheduler import State
from zerosim.device.events import Alloc, Event, Save
from zerosim.errors import InputError
from zerosim.ledger.memory import Snapshot
from zerosim.report import stepper_html
from zerosim.stepper.match import Moment, describe, numbered
from zerosim.stepper.parameters import Parameters
from zerosim.stepper.session import Parts, Session
from zerosim.tensor.flat import Flat


class LiveBuffer(NamedTuple):
    """One buffer that is live on a rank. `born` is the number of its alloc in the rank's record."""

    name: str
    unit: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    born: int
    id: int


class LiveTable(list[LiveBuffer]):
    """What is live on a rank, oldest first: a list, shown as a table."""

    def __repr__(self) -> str:
        return stepper_html.live_text(self)

    def _repr_html_(self) -> str:
        return stepper_html.live_html(self)


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
    def coming(self) -> Moment | None:
        """The event that it stands before; None where it waits for others or has finished."""
        event = self._session.pending[self.rank]
        if event is None:
            return None
        history = self._session.recorders[self.rank].history
        text = describe(event, self._session.books.memory[self.rank].live, history)
        return Moment(self.rank, len(history), event, text)

    @property
    def stands(self) -> str:
        """What it is doing, in words."""
        coming = self.coming
        if coming is not None:
            return f"before {coming.text}"
        if self._session.scheduler.states[self.rank] is State.FINISHED:
            return "finished"
        return self._session.transport.stand(self.rank)

    def memory(self) -> Snapshot:
        """Live bytes by kind and unit."""
        history = self._session.recorders[self.rank].history
        ledger = self._session.books.memory[self.rank]
        return ledger.now(history[-1].scope) if history else ledger.now()

    def live(self) -> LiveTable:
        """Every live buffer, oldest first."""
        ledger, held = self._session.books.memory[self.rank], self._session.devices[self.rank].held
        names = _names(self._session, self.rank)
        rows = LiveTable()
        for id, alloc in ledger.live.items():
            shape, dtype, born = held.get(id, ((), "", -1))
            name = names.get(id, f"{alloc.scope.unit} {alloc.kind}".strip())
            rows.append(LiveBuffer(name, alloc.scope.unit, alloc.kind, shape, dtype, alloc.nbytes, born, id))
        return rows

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
        return f"RankView(rank {self.rank}{where}, {self.memory().total_bytes:,} B live, {self.stands})"

    def _repr_html_(self) -> str:
        return stepper_html.world_html([self], f"Rank {self.rank}")


class UnderWay(NamedTuple):
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


def under_way(session: Session) -> list[UnderWay]:
    found = []
    for round in session.transport.under_way():
        joined = [
            (rank, sum(int(array.nbytes) for array in exchange.posted))
            for rank, exchange in zip(round.group, round.exchanges, strict=True)
            if exchange is not None
        ]
        call = round.call
        found.append(UnderWay(call.op, call.dtype, round.group, round.sequence, tuple(joined), tuple(round.missing())))
    return found


def _names(session: Session, rank: int) -> dict[int, str]:
    """What buffers are, by id: as the record says what saved them, and as the rank's flats hold them."""
    names: dict[int, str] = {}
    history = session.recorders[rank].history
    live: Mapping[int, Alloc] = session.books.memory[rank].live
    for event in history:
        if isinstance(event, Save) and event.id in live:
            names.setdefault(event.id, f"{event.scope.unit} {event.op}: {event.what}")
    parts = session.parts[rank]
    for flat in parts.model.flats if parts is not None else ():
        for what, buffer in _held(flat):
            if buffer is not None:
                names[buffer.storage.id] = f"{flat.name} {what}"
    return names


def _held(flat: Flat) -> list[tuple[str, Any]]:
    moments = [(f"moment {i + 1}", moment) for i, moment in enumerate(flat.moments)]
    return [
        ("parameters, own slice", flat.param_shard),
        ("parameters", flat.param),
        ("gradient, own slice", flat.grad_shard),
        ("gradient", flat.grad_whole),
        ("gradient of this micro-batch", flat.grad),
        ("master", flat.master),
        *moments,
    ]
