"""Owners of whole units: which units each member has, and other ways to assign them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerosim.placement.layout import Layout
from zerosim.placement.partition import WholeUnits
from zerosim.placement.rows import Row


@dataclass(frozen=True, slots=True)
class EveryNth(WholeUnits):
    """Assigns every `n`th unit (0: none) to one member, and the others to its neighbour."""

    member: int
    n: int

    def owner(self, numels: Sequence[int], which: int, size: int) -> int:
        return self.member if self.n and which % self.n == 0 else (self.member + 1) % size


def dealt(layout: Layout, rule: WholeUnits) -> Layout:
    """Return the same layout with whole units assigned by another rule."""

    def cut(row: Row) -> Row:
        return replace(row, partition=rule) if isinstance(row.partition, WholeUnits) else row

    rows = {name: {state: cut(row) for state, row in layout.rows(name).items()} for name in layout.flats}
    return Layout(layout.mesh, list(layout.flats.values()), lambda flat: rows[flat.name], layout.stages)


def by_owner(layout: Layout, stage: int) -> Mapping[int | None, set[str]]:
    """Return a pipeline stage's flats by their owners (None: those that no single member holds)."""
    found = defaultdict[int | None, set[str]](set)
    for name in layout.stages[stage]:
        found[layout.owner(name)].add(name)
    return found
