"""A row places one state of a flat buffer; `Held` is what one rank has of the buffer by its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from zerosim.placement.dimension_zero import RowSlices
from zerosim.placement.memories import DEVICE
from zerosim.placement.mesh import STATES
from zerosim.placement.partition import Partition, Slice, Whole

Lives = Literal["always", "step", "use"]


@dataclass(frozen=True, slots=True)
class Row:
    """The placement of one state: the rule that cuts it, the axes of the cut, and the lifetime of a rank's slice.

    lives    'always': from start to end; 'step': from its creation to the end of the step; 'use': created
             for each use
    memory   the rank's memory that holds it
    """

    partition: Partition
    axes: tuple[str, ...] = STATES
    lives: Lives = "always"
    memory: str = DEVICE

    @property
    def is_whole(self) -> bool:
        return isinstance(self.partition, Whole)


Rows = Mapping[str, Row]
"""A buffer's row for each of its states: 'param', 'grad', 'optim', and those that an exchange adds. Memory is
allocated in this order."""


def cut_over(rows: Rows, axes: tuple[str, ...]) -> Rows:
    """Return these rows with `axes` in place of the axes that cut other buffers' states."""
    if axes == STATES:
        return rows
    return {state: replace(row, axes=axes) if row.axes == STATES else row for state, row in rows.items()}


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's place in the layout of a flat buffer.

    own            the slice that this rank updates or, of a frozen buffer, holds
    padded_numel   the elements of the whole buffer, padding included
    rows           its row for each of its states
    owner          of a buffer that belongs to one member of its group: that member
    """

    own: Slice
    padded_numel: int
    rows: Rows = field(default_factory=dict)
    owner: int = 0

    def memory(self, state: str) -> str:
        """Return the memory of the local shard of a state; the device's if the buffer has none."""
        return self.rows[state].memory if state in self.rows else DEVICE

    @property
    def is_idle(self) -> bool:
        """Whether this rank's slice is nothing but padding, of a tensor with fewer rows than ranks: nothing is
        updated."""
        optim = self.rows.get("optim")
        return optim is not None and isinstance(optim.partition, RowSlices) and self.own.padding == self.own.size

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that local shards are cut over."""
        return self.rows["optim" if "optim" in self.rows else "param"].axes
