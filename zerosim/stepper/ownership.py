"""Which rank updates which slice of each unit's flat buffer (ZeRO paper, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.report.ownership import ownership_html, ownership_text
from zerosim.stepper.session import Parts, Session
from zerosim.tensor.flat import Flat


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

    def __repr__(self) -> str:
        return ownership_text(self.rows, self.ranks)

    def _repr_html_(self) -> str:
        return ownership_html(self.rows, self.ranks)

    def of(self, unit: str) -> tuple[OwnedSlice, ...]:
        """A unit's slices, by rank. Raises: InputError for an unknown unit."""
        found = tuple(row for row in self.rows if row.unit == unit)
        if not found:
            raise InputError(
                f"no unit {unit!r}: expected one of {', '.join(dict.fromkeys(row.unit for row in self.rows))}"
            )
        return found


def ownership(session: Session) -> Ownership:
    """As the ranks have placed it; before that, as the layout says."""
    layout, rows = session.experiment.layout, []
    for flat in layout.flats.values():
        for rank, parts in enumerate(session.parts):
            placed = _placed(parts, flat.name)
            own = layout.part(rank, flat.name, "optim") if placed is None else placed.own
            rows.append(OwnedSlice(flat.name, flat.numel, rank, own.start, own.stop, own.padding))
    return Ownership(layout.mesh.world_size, tuple(rows))


def _placed(parts: Parts | None, name: str) -> Flat | None:
    """A rank's flat of that name, once it has memory."""
    for flat in parts.model.flats if parts is not None else ():
        if flat.name == name and (flat.param_shard is not None or flat.master is not None):
            return flat
    return None
