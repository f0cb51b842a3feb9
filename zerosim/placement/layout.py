"""The layout: every rank's slice of every flat buffer, for each of the buffer's states.

It is a value made of a mesh, the flat buffers and their rows. A row gives for one state of a buffer the rule of its
cut, the axes, and the lifetime; `zero.py` has the rows of ZeRO's stages. A buffer has the states that its rows
name: a frozen buffer has parameters alone.

A state that is not cut over an axis has copies along it. No other module decides who holds what: placing, the norm,
plans, results, the stepper and the comparison with formulas ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zerosim.placement.axes import joined
from zerosim.placement.mesh import EXPERT_STATES, STATES, Mesh
from zerosim.placement.partition import Slice, WholeUnits
from zerosim.placement.rows import Held, Row, Rows
from zerosim.placement.spec import FlatSpec

RowsOf = Callable[[FlatSpec], Rows]


class _Together(NamedTuple):
    """The buffers that one row of a pipeline stage cuts: their numbers by name, and their elements."""

    which: Mapping[str, int]
    numels: tuple[int, ...]


class Layout:
    """A mesh, its flat buffers, and the rows that say who holds what.

    `rows` are the rows of every buffer, or a function that returns each buffer's. In the methods `state` is one that
    the buffer's rows name, `name` a buffer's name, and `rank` one of the mesh's.
    `stages` are the buffers of each pipeline stage by name, in order; without it, every buffer is on all of them.
    """

    def __init__(
        self, mesh: Mesh, flats: Sequence[FlatSpec], rows: Rows | RowsOf, stages: Sequence[Sequence[str]] | None = None
    ) -> None:
        self.mesh = mesh
        self.flats = {flat.name: flat for flat in flats}
        self._rows = {flat.name: rows(flat) if callable(rows) else rows for flat in flats}
        self.stages = [tuple(names) for names in stages or [list(self.flats)] * mesh.pp]
        cut = {axis for rows in self._rows.values() if "optim" in rows for axis in rows["optim"].axes}
        self.trained_axes = joined(cut if cut.isdisjoint(EXPERT_STATES) else STATES)
        """The axes over which any trained buffer is cut; those of experts are along these and CUTS."""
        self._cut = [self._cut_together(names) for names in self.stages]

    def _cut_together(self, names: Sequence[str]) -> dict[tuple[str, Row, bool], _Together]:
        """Return a pipeline stage's buffers by state and shared row, and whether they are trained: owners are assigned
        among them. So all states of a buffer have one owner."""
        alike: dict[int, list[str]] = {}
        for name in names:
            alike.setdefault(id(self._rows[name]), []).append(name)
        found: dict[tuple[str, Row, bool], list[str]] = {}
        for same in alike.values():
            for state, row in self._rows[same[0]].items():
                found.setdefault((state, row, self.is_trained(same[0])), []).extend(same)
        return {
            item: _Together({name: which for which, name in enumerate(cut)}, tuple(self.flats[n].numel for n in cut))
            for item, cut in found.items()
        }

    def rows(self, name: str) -> Rows:
        """Return a buffer's rows."""
        return self._rows[name]

    def is_trained(self, name: str) -> bool:
        """Return whether a buffer has optimizer states."""
        return "optim" in self._rows[name]

    def part(self, rank: int, name: str, state: str) -> Slice:
        """Return a rank's slice of a state of a flat buffer on its pipeline stage."""
        row, stage = self._rows[name][state], self.mesh.index(rank, "pp")
        return self._part(stage, name, state, self.mesh.index(rank, *row.axes))

    def own(self, rank: int, name: str) -> Slice:
        """Return a rank's own slice: the updated slice of a trained buffer, else its slice of the parameters."""
        return self.part(rank, name, self._own_state(name))

    def padded(self, name: str) -> int:
        """Return the elements of the whole buffer of these slices, padding included."""
        row = self._rows[name][self._own_state(name)]
        return row.partition.padded(self.flats[name].numel, self.mesh.size(*row.axes))

    def owner(self, name: str) -> int | None:
        """Return, for a partition into whole units, the index in its group of the member with this unit."""
        state = self._own_state(name)
        row = self._rows[name][state]
        if not isinstance(row.partition, WholeUnits):
            return None
        stage = next(stage for stage, names in enumerate(self.stages) if name in names)
        which, numels = self._cut[stage][state, row, self.is_trained(name)]
        return row.partition.owner(numels, which[name], self.mesh.size(*row.axes))

    def held(self, name: str, own: Slice, padded: int) -> Held:
        """Return the place of a rank that holds the slice `own` of a buffer with `padded` elements."""
        return Held(own, padded, self._rows[name], self.owner(name) or 0)

    def _own_state(self, name: str) -> str:
        return "optim" if self.is_trained(name) else "param"

    def cuts(self, stage: int) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Yield each row of a pipeline stage, and the elements of the buffers that it cuts."""
        for (_, row, _), cut in self._cut[stage].items():
            yield row, cut.numels

    def parts(self, stage: int, name: str, state: str = "optim") -> list[Slice]:
        """Return each group member's slice of a buffer's state."""
        return [self._part(stage, name, state, at) for at in range(self.mesh.size(*self._rows[name][state].axes))]

    def _part(self, stage: int, name: str, state: str, index: int) -> Slice:
        row = self._rows[name][state]
        which, numels = self._cut[stage][state, row, self.is_trained(name)]
        return row.partition.part(numels, which[name], index, self.mesh.size(*row.axes))

    def holders(self, name: str) -> list[int]:
        """Return the ranks of the pipeline stages that hold a flat buffer."""
        ranks, index = range(self.mesh.world_size), self.mesh.index
        return [rank for rank in ranks if name in self.stages[index(rank, "pp")]]

    def is_tied(self, name: str) -> bool:
        """Return whether several pipeline stages hold a flat buffer: a table tied to the head."""
        return sum(name in names for names in self.stages) > 1

    def is_counted(self, stage: int, name: str) -> bool:
        """Return whether this pipeline stage counts a flat buffer: the first of two stages counts a tied table."""
        return all(name not in names for names in self.stages[:stage])
