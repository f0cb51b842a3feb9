"""A rank's groups along the axes of a mesh: the same on every rank, and made without communication."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.comm.collectives import Comm
from zerosim.placement.axes import without
from zerosim.placement.mesh import DATA, FINEST, SHARES, Mesh


class Groups:
    """`groups("dp_shard")`: the Comm of the ranks that differ from this one along those axes only."""

    def __init__(self, mesh: Mesh, world: Comm) -> None:
        self.mesh = mesh
        self._world, self._rank = world, world.device.rank
        self._made: dict[tuple[str, ...], Comm] = {}
        self._parts: dict[tuple[str, int], Comm] = {}
        self._replicas: dict[tuple[str, ...], Comm | None] = {}

    def __call__(self, *axes: str) -> Comm:
        """Return the group along these axes, the same Comm for equal ones. A group of one member sends nothing."""
        if axes not in self._made:
            mesh, world = self.mesh, self._world
            ranks, name = mesh.group(self._rank, *axes), mesh.name(*axes)
            is_world = (ranks, name) == (world.ranks, world.axis)
            self._made[axes] = world if is_world else world.subgroup(ranks, name, mesh.number(*axes))
        return self._made[axes]

    def replicas(self, *axes: str) -> Comm | None:
        """Return the ranks that hold this one's part of a buffer cut over these axes; None if no other rank does."""
        if axes not in self._replicas:
            rest = without((*DATA, *SHARES), axes)
            self._replicas[axes] = self(*rest) if self.mesh.size(*rest) > 1 else None
        return self._replicas[axes]

    def ends(self, axis: str) -> Comm | None:
        """Return the group of the first and the last rank along an axis; None for the ranks between them."""
        ranks = self.mesh.ends(self._rank, axis)
        return self._some(axis, ranks, 1) if self._rank in ranks else None

    def neighbours(self, axis: str, count: int) -> Comm:
        """Return the group of `count` neighbours along one axis, this rank among them."""
        return self._some(axis, self.mesh.neighbours(self._rank, axis, count), count)

    def across(self, axis: str, count: int) -> Comm:
        """Return the group of every `count`-th rank along one axis, this rank among them."""
        ranks = self.mesh.group(self._rank, axis)[self.mesh.index(self._rank, axis) % count :: count]
        return self._some(axis, ranks, self.mesh.world_size + count)

    def _some(self, axis: str, ranks: Sequence[int], number: int) -> Comm:
        """Return the group of some ranks along an axis, or of all of them; `number`: which of its parts."""
        if len(ranks) == self.mesh.size(axis):
            return self(axis)
        if (axis, number) not in self._parts:
            self._parts[axis, number] = self._world.subgroup(
                ranks, axis, (number << len(FINEST)) + self.mesh.number(axis)
            )
        return self._parts[axis, number]
