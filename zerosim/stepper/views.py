"""What can be looked at while a world stands still: a rank's bytes and parameters, ownership, what is under way.

Reads a session; changes nothing of it. Values are copies: a view holds no memory of any rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerosim.comm import standing
from zerosim.comm.scheduler import State
from zerosim.errors import InputError
from zerosim.ledger import Snapshot
from zerosim.record import Alloc, Event, Save
from zerosim.result import unit_infos
from zerosim.sharding import Flat, slice_of
from zerosim.stepper.match import Moment, describe
from zerosim.stepper.session import Parts, Session


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


class RankView:
    """One rank at this moment."""

    def __init__(self, session: Session, rank: int) -> None:
        self._session = session
        self.rank = rank

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
        index = len(self._session.recorders[self.rank].history)
        return Moment(self.rank, index, event, describe(event, self._session.books.memory[self.rank].live))

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

    def live(self) -> list[LiveBuffer]:
        """Every live buffer, oldest first."""
        ledger, held = self._session.books.memory[self.rank], self._session.devices[self.rank].held
        names = _names(self._session, self.rank)
        rows = []
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
        return f"RankView(rank {self.rank}, {self.memory().total_bytes:,} B live, {self.stands})"


@dataclass(frozen=True, slots=True)
class ParameterView:
    """One parameter as one rank holds it.

    state   'whole': kept for good; 'gathered': all of it, for the time of use; 'sharded': a part, which
            is elements [start, stop) of it; 'freed': nothing, its values lie with other ranks; 'unplaced'
    """

    name: str
    unit: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    state: str
    start: int
    stop: int
    _flat: Flat
    _index: int

    def values(self) -> Any:
        """A copy, as a NumPy array: in its shape where all of it is there, flat where a part is.

        Raises: InputError where nothing is.
        """
        flat, spec = self._flat, self._flat.specs[self._index]
        to_host = flat.device.backend.to_host
        if self.state in ("whole", "gathered") and flat.param is not None:
            return to_host(flat.window(flat.param, self._index).array)
        source = flat.param_shard if flat.param_shard is not None else flat.master
        if self.state != "sharded" or source is None:
            raise InputError(f"rank {self.rank} holds nothing of {self.name} now ({self.state})")
        first = spec.offset + self.start - flat.own.start
        return to_host(source[first : first + self.stop - self.start].array)

    def __repr__(self) -> str:
        part = f" [{self.start}:{self.stop}]" if self.state == "sharded" else ""
        return f"{self.name} {self.shape} {self.dtype} on rank {self.rank}: {self.state}{part}"


class Parameters(Mapping[str, ParameterView]):
    """Views of all parameters of a rank's model, by name."""

    def __init__(self, rank: int, parts: Parts) -> None:
        self._rank = rank
        self._keeps = parts.strategy.keeps_params
        self._places = {spec.name: (flat, index) for flat in parts.model.flats for index, spec in enumerate(flat.specs)}

    def __getitem__(self, name: str) -> ParameterView:
        if name not in self._places:
            near = difflib.get_close_matches(name, self._places, 3)
            raise InputError(
                f"no parameter {name!r}: " + (f"did you mean {' or '.join(near)}?" if near else "see list(parameters)")
            )
        flat, index = self._places[name]
        spec = flat.specs[index]
        start, stop = max(flat.own.start, spec.offset), min(flat.own.stop, spec.offset + spec.numel)
        part = (start - spec.offset, stop - spec.offset) if start < stop else (0, 0)
        placed = any(held is not None for held in (flat.param, flat.param_shard, flat.master))
        if flat.param is not None:
            state, part = "whole" if self._keeps else "gathered", (0, spec.numel)
        elif not placed:
            state = "unplaced"
        else:
            state = "sharded" if part[0] < part[1] else "freed"
        return ParameterView(name, flat.name, self._rank, spec.shape, flat.dtype.name, state, *part, flat, index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class OwnedSlice(NamedTuple):
    """Elements [start, stop) of a unit's flat buffer that a rank updates; `padding` of them belong to no parameter."""

    unit: str
    numel: int
    rank: int
    start: int
    stop: int
    padding: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who updates what: one row per unit and rank, units in order."""

    ranks: int
    rows: tuple[OwnedSlice, ...]

    def of(self, unit: str) -> tuple[OwnedSlice, ...]:
        """A unit's slices, by rank. Raises: InputError for an unknown unit."""
        found = tuple(row for row in self.rows if row.unit == unit)
        if not found:
            raise InputError(
                f"no unit {unit!r}: expected one of {', '.join(dict.fromkeys(row.unit for row in self.rows))}"
            )
        return found


def ownership(session: Session) -> Ownership:
    """As placed; before that, as the configuration's partition will have it."""
    config, layout = session.experiment.config, session.experiment.layout
    rows = []
    infos = unit_infos(config, layout)
    for flat, info in zip(layout.flats, infos, strict=True):
        for rank, parts in enumerate(session.parts):
            own = slice_of(flat.numel, rank, config.ranks)
            start, stop, padding = own.start, own.stop, own.padding
            if config.stage == 0 or info.owner == rank:
                start, stop, padding = 0, flat.numel, 0
            elif info.owner is not None:
                start = stop = padding = 0
            placed = _placed(parts, flat.name)
            if placed is not None:
                start, stop, padding = placed.own.start, placed.own.stop, placed.own.padding
            rows.append(OwnedSlice(flat.name, flat.numel, rank, start, stop, padding))
    return Ownership(config.ranks, tuple(rows))


def _placed(parts: Parts | None, name: str) -> Flat | None:
    """A rank's flat of that name, once its memory is there."""
    for flat in parts.model.flats if parts is not None else ():
        if flat.name == name and (flat.param_shard is not None or flat.master is not None):
            return flat
    return None


class UnderWay(NamedTuple):
    """A round that waits for ranks: who has joined with how many bytes, and who is missing."""

    op: str
    dtype: str
    group: tuple[int, ...]
    sequence: int
    joined: tuple[tuple[int, int], ...]
    missing: tuple[int, ...]

    def __repr__(self) -> str:
        here = ", ".join(f"rank {rank} ({nbytes:,} B)" for rank, nbytes in self.joined)
        return f"{self.op} number {self.sequence}: {here} joined; waits for {standing.ranks_text(list(self.missing))}"


def under_way(session: Session) -> list[UnderWay]:
    found = []
    for round in session.transport.under_way():
        joined = [
            (rank, sum(int(array.nbytes) for array in posted))
            for rank, posted in zip(round.group, round.inbox, strict=True)
            if posted is not None
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
            names.setdefault(event.id, f"{event.op}: {event.what}")
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
