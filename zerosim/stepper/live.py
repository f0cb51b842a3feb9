"""What is live on a rank: every buffer with its name and shape, as a list and as a table."""

from __future__ import annotations

from typing import NamedTuple

from zerosim.device.device import Buffer
from zerosim.device.events import Save
from zerosim.report.html import MOST_ROWS, bytes_text, card, chip, table
from zerosim.stepper.session import Session
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
        names = max([4, *(len(row.name) for row in self)])
        lines = [
            f"  {row.name:{names}}  {row.kind:15} {row.dtype:5} {row.nbytes:>14,} B  event {row.born:<6} {row.shape}"
            for row in self
        ]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        """The first rows of very many."""
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
    """Every live buffer of a rank, oldest first."""
    held, names, rows = session.devices[rank].held, _names(session, rank), LiveTable()
    for id, alloc in session.ledgers[rank].memory.live.items():
        shape, dtype, born = held.get(id, ((), "", -1))
        unit, kind = alloc.scope.unit, alloc.kind
        name = names.get(id, f"{unit} {kind}".strip())
        rows.append(LiveBuffer(name, unit, kind, shape, dtype, alloc.nbytes, born, id))
    return rows


def _names(session: Session, rank: int) -> dict[int, str]:
    """What buffers are, by id: as the record says what saved them, and as the rank's flats hold them."""
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
        ("gradient of this micro-batch", flat.grad),
        ("master", flat.master),
        *flat.states.items(),
    ]
