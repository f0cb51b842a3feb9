"""Who holds what: every rank's part of every flat buffer, for each state that the buffer has.

A value made of a mesh, the flat buffers and their rows. A row says of one state of a buffer by which rule it is cut,
over which axes, and how long it lives; `zero.py` has the rows of ZeRO's stages. A buffer has the states that its rows
name: one that is not trained has parameters alone.

What is not cut over an axis is held in copies along it. Nobody else decides who holds what: placing, the norm, worlds
of shapes, results, the stepper and the comparison with formulas ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zerosim.placement.mesh import STATES, Mesh, joined
from zerosim.placement.partition import Partition, Slice, Whole, WholeUnits
from zerosim.placement.spec import FlatSpec

Lives = Literal["always", "step", "use"]


@dataclass(frozen=True, slots=True)
class Row:
    """How one state is held: the rule that cuts it, the axes that it is cut over, and how long a rank holds its part.

    lives   'always': from start to end; 'step': from where it is made to the end of the step; 'use': it is made anew
            for each use
    """

    partition: Partition
    axes: tuple[str, ...] = STATES
    lives: Lives = "always"

    @property
    def is_whole(self) -> bool:
        return isinstance(self.partition, Whole)


Rows = Mapping[str, Row]
"""A buffer's row for each state that it has: 'param', 'grad', 'optim', and what an exchange adds to them. Memory is
taken in this order."""
RowsOf = Callable[[FlatSpec], Rows]


class _Together(NamedTuple):
    """The buffers that one row of a stage cuts: each one's number by name, and their elements."""

    which: Mapping[str, int]
    numels: tuple[int, ...]


class Layout:
    """A mesh, the flat buffers that lie on it, and the rows that say who holds what of them.

    `rows` are those of every buffer, or a function that gives each one's. In what is asked, `state` is one that the
    buffer's rows name, `name` that of a buffer, `rank` one of the mesh's.
    `stages` are the buffers of each pipeline stage by name, in its order; without it, every one is on all of them.
    """

    def __init__(
        self, mesh: Mesh, flats: Sequence[FlatSpec], rows: Rows | RowsOf, stages: Sequence[Sequence[str]] | None = None
    ) -> None:
        self.mesh = mesh
        self.flats = {flat.name: flat for flat in flats}
        self._rows = {flat.name: rows(flat) if callable(rows) else rows for flat in flats}
        self.stages = [tuple(names) for names in stages or [list(self.flats)] * mesh.pp]
        cut = {axis for rows in self._rows.values() if "optim" in rows for axis in rows["optim"].axes}
        self.trained_axes = joined(cut)
        """The axes that any trained buffer is cut over."""
        self._cut = [self._cut_together(names) for names in self.stages]

    def _cut_together(self, names: Sequence[str]) -> dict[tuple[str, Row], _Together]:
        """By state and row a stage's buffers that share it: owners are dealt out among them."""
        alike: dict[int, list[str]] = {}
        for name in names:
            alike.setdefault(id(self._rows[name]), []).append(name)
        found: dict[tuple[str, Row], list[str]] = {}
        for same in alike.values():
            for item in self._rows[same[0]].items():
                found.setdefault(item, []).extend(same)
        return {
            item: _Together({name: which for which, name in enumerate(cut)}, tuple(self.flats[n].numel for n in cut))
            for item, cut in found.items()
        }

    def rows(self, name: str) -> Rows:
        """A buffer's rows."""
        return self._rows[name]

    def is_trained(self, name: str) -> bool:
        """Whether a buffer has optimizer states."""
        return "optim" in self._rows[name]

    def part(self, rank: int, name: str, state: str) -> Slice:
        """What a rank holds of a state of a flat buffer of its stage."""
        row, stage = self._rows[name][state], self.mesh.index(rank, "pp")
        return self._part(stage, name, state, self.mesh.index(rank, *row.axes))

    def own(self, rank: int, name: str) -> Slice:
        """What a rank answers for: of a trained buffer what it updates, else what it holds of the parameters."""
        return self.part(rank, name, self._own_state(name))

    def padded(self, name: str) -> int:
        """Elements of a whole buffer whose parts those are, padding included."""
        row = self._rows[name][self._own_state(name)]
        return row.partition.padded(self.flats[name].numel, self.mesh.size(*row.axes))

    def owner(self, name: str) -> int | None:
        """Of a partition into whole units: where in its group the member stands that has this one."""
        state = self._own_state(name)
        row = self._rows[name][state]
        if not isinstance(row.partition, WholeUnits):
            return None
        stage = next(stage for stage, names in enumerate(self.stages) if name in names)
        which, numels = self._cut[stage][state, row]
        return row.partition.owner(numels, which[name], self.mesh.size(*row.axes))

    def _own_state(self, name: str) -> str:
        return "optim" if self.is_trained(name) else "param"

    def cuts(self, stage: int) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Each row of a pipeline stage, and the elements of the buffers that it cuts."""
        for (_, row), cut in self._cut[stage].items():
            yield row, cut.numels

    def parts(self, stage: int, name: str, state: str = "optim") -> list[Slice]:
        """What each member of the group that a buffer's state is cut over holds of it."""
        return [self._part(stage, name, state, at) for at in range(self.mesh.size(*self._rows[name][state].axes))]

    def _part(self, stage: int, name: str, state: str, index: int) -> Slice:
        row = self._rows[name][state]
        which, numels = self._cut[stage][state, row]
        return row.partition.part(numels, which[name], index, self.mesh.size(*row.axes))

    def holders(self, name: str) -> list[int]:
        """The ranks on whose pipeline stage a flat buffer lies."""
        ranks, index = range(self.mesh.world_size), self.mesh.index
        return [rank for rank in ranks if name in self.stages[index(rank, "pp")]]

    def is_tied(self, name: str) -> bool:
        """Whether several pipeline stages hold a flat buffer: a table that is tied to the head."""
        return sum(name in names for names in self.stages) > 1

    def is_counted(self, stage: int, name: str) -> bool:
        """Whether this stage counts a flat buffer: of a tied table on two stages the first one does."""
        return all(name not in names for names in self.stages[:stage])
