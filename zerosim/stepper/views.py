"""Views of a world that stands still: a rank's bytes and buffers, its position, collectives in flight.

Looking changes nothing: values are copies, and a view holds no memory of any rank. Only `RankView.strategy` and
`RankView.model` are the rank's own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.comm import rank_status
from zerosim.comm.scheduler import State
from zerosim.device.device import Buffer
from zerosim.device.events import Event, Save
from zerosim.errors import InputError
from zerosim.ledger.memory import MemoryLedger, Snapshot
from zerosim.placement.axes import place_of
from zerosim.placement.memories import DEVICE, MEMORIES
from zerosim.report.notebook import MOST_ROWS, bar, bytes_text, card, chip, escaped, legend, table
from zerosim.stepper.match import Moment, describe, numbered
from zerosim.stepper.parameters import Parameters
from zerosim.stepper.session import Parts, Session
from zerosim.tensor.flat import Flat


class RankView:
    """One rank at this moment."""

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self.rank = rank

    @property
    def place(self) -> str:
        """Its place in the mesh, 'dp_replicate 0, dp_shard 1'; '' in a mesh of one axis."""
        return place_of(self._session.experiment.layout.mesh, self.rank)

    @property
    def events(self) -> list[Event]:
        """Its record so far."""
        return list(self._session.recorders[self.rank].history)

    @property
    def next_event(self) -> Moment | None:
        """Its next event; None if it waits for others or has finished."""
        event = self._session.pending[self.rank]
        if event is None:
            return None
        history = self._session.recorders[self.rank].history
        text = describe(event, self._session.ledgers[self.rank].memory.live, history)
        return Moment(self.rank, len(history), event, text)

    @property
    def status(self) -> str:
        """Its current action, in words."""
        upcoming = self.next_event
        if upcoming is not None:
            return f"before {upcoming.text}"
        if self._session.scheduler.states[self.rank] is State.FINISHED:
            return "finished"
        return self._session.transport.stand(self.rank)

    def memory(self, name: str = DEVICE) -> Snapshot:
        """Return the live bytes by kind and unit in one of the rank's memories: 'device', 'host' or 'nvme'."""
        history = self._session.recorders[self.rank].history
        own = self._session.ledgers[self.rank].memory
        ledger = own if name == DEVICE else own.others.get(name, MemoryLedger())
        return ledger.now(history[-1].scope) if history else ledger.now()

    @property
    def memories(self) -> list[str]:
        """The rank's memories that have held anything so far, the device's first."""
        return [DEVICE, *(name for name in MEMORIES if name in self._session.ledgers[self.rank].memory.others)]

    def live(self) -> LiveTable:
        """Return every live buffer, oldest first."""
        return live_buffers(self._session, self.rank)

    @property
    def parameters(self) -> Parameters:
        """The model's parameters by name, as this rank holds them."""
        return Parameters(self.rank, self._parts())

    @property
    def strategy(self) -> Any:
        """The rank's strategy itself, for a closer look. Its buffers stay live while you hold it: drop it before the
        world goes on."""
        return self._parts().strategy

    @property
    def model(self) -> Any:
        """The rank's model itself, for a closer look. Its buffers stay live while you hold it: drop it before the world
        goes on."""
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
    """Return HTML of ranks at one moment: each one's position and live bytes. `notes` are lines below, such as the next
    event."""
    held = [(rank, name, rank.memory(name).by_kind) for rank in ranks[:MOST_ROWS] for name in rank.memories]
    memories = [by_kind for _, _, by_kind in held]
    most = max([sum(by_kind.values()) for by_kind in memories], default=0)
    rows = [
        [
            f"{rank.rank} ({rank.place})" if rank.place else str(rank.rank),
            rank.status if name == DEVICE else f"in its {name} memory",
            f"{sum(by_kind.values()):,}",
            bar(by_kind, most),
        ]
        for rank, name, by_kind in held
    ]
    body = table(("rank", "stands", "live bytes", "by kind"), rows, raw=(3,), left=(1, 3), wide="45%")
    left_out = [f"and {len(ranks) - MOST_ROWS:,} ranks more"] if len(ranks) > MOST_ROWS else []
    below = "".join(f"<div>{escaped(line)}</div>" for line in [*left_out, *notes])
    return card(title, body + legend({kind for by_kind in memories for kind in by_kind}) + below)


# -- live buffers -----------------------------------------------------------------------------------
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
    """A rank's live buffers, oldest first: a list, shown as a table."""

    def __repr__(self) -> str:
        names = max([4, *(len(row.name) for row in self)])
        lines = [
            f"  {row.name:{names}}  {row.kind:15} {row.dtype:5} {row.nbytes:>14,} B  event {row.born:<6} {row.shape}"
            for row in self
        ]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        """Return HTML of the first rows of a long table."""
        cells = [
            [
                row.name, row.unit, chip(row.kind), str(row.shape), row.dtype, f"{row.nbytes:,}",
                str(row.born) if row.born >= 0 else "",
            ]
            for row in self[:MOST_ROWS]
        ]  # fmt: skip
        head = ("name", "unit", "kind", "shape", "dtype", "bytes", "born at event")
        left_out = self[MOST_ROWS:]
        note = f"and {len(left_out):,} more, {sum(row.nbytes for row in left_out):,} B." if left_out else ""
        return card(self._title(), table(head, cells, raw=(2,), left=(0, 1, 2, 3, 4)), note)

    def _title(self) -> str:
        return f"Live buffers: {len(self):,}, {bytes_text(sum(row.nbytes for row in self))} in all"


def live_buffers(session: Session, rank: int) -> LiveTable:
    """Return every live buffer of a rank, oldest first."""
    held, names, rows = session.devices[rank].held, _names(session, rank), LiveTable()
    for id, alloc in session.ledgers[rank].memory.live.items():
        shape, dtype, born = held.get(id, ((), "", -1))
        unit, kind = alloc.scope.unit, alloc.kind
        name = names.get(id, f"{unit} {kind}".strip())
        rows.append(LiveBuffer(name, unit, kind, shape, dtype, alloc.nbytes, born, id))
    return rows


def _names(session: Session, rank: int) -> dict[int, str]:
    """Return the names of buffers, by id: as the record says what saved them, and as the rank's flats hold them."""
    names: dict[int, str] = {}
    live, parts = session.ledgers[rank].memory.live, session.parts[rank]
    for event in session.recorders[rank].history:
        if isinstance(event, Save) and event.id in live:
            names.setdefault(event.id, f"{event.scope.unit} {event.op}: {event.what}")
    for flat in parts.model.flats if parts is not None else ():
        for what, buffer in _held(flat):
            if buffer is not None:
                names[buffer.storage.id] = f"{flat.name} {what}"
    return names


def _held(flat: Flat) -> list[tuple[str, Buffer | None]]:
    return [
        ("parameters, own slice", flat.param_shard),
        ("parameters", flat.param),
        ("gradient, own slice", flat.grad_shard),
        ("gradient", flat.grad_whole),
        ("gradient of this microbatch", flat.collector.grad),
        ("master", flat.master),
        *flat.states.items(),
    ]


# -- collectives ------------------------------------------------------------------------------------
class PendingCollective(NamedTuple):
    """A round that waits for ranks: those that have joined with their bytes, and those that are missing.

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
    for round in session.transport.in_flight():
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
