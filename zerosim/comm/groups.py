"""A rank's groups along the axes of a mesh: the same on every rank, and made without communication."""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.placement.mesh import DATA, Mesh, without


class Groups:
    """`groups("dp_shard")`: the Comm of the ranks that differ from this one along those axes only."""

    def __init__(self, mesh: Mesh, world: Comm) -> None:
        self.mesh = mesh
        self._world = world
        self._made: dict[tuple[str, ...], Comm] = {}
        self._neighbours: dict[tuple[str, int], Comm] = {}

    def __call__(self, *axes: str) -> Comm:
        """Return the group along these axes; equal axes give one Comm. If no other rank differs along them, it has one
        member and sends nothing."""
        if axes not in self._made:
            mesh, world = self.mesh, self._world
            ranks, name = mesh.group(world.device.rank, *axes), mesh.name(*axes)
            is_world = (ranks, name) == (world.ranks, world.axis)
            self._made[axes] = world if is_world else world.subgroup(ranks, name, mesh.number(*axes))
        return self._made[axes]

    def replicas(self, *axes: str) -> Comm | None:
        """Return the ranks that hold the same part as this one of a buffer cut over these axes; None if no other rank
        does."""
        rest = without(DATA, axes) if without(DATA, axes) != without(DATA, ()) else DATA
        return self(*rest) if self.mesh.size(*rest) > 1 else None

    def ends(self, axis: str) -> Comm | None:
        """Return the group of the first and the last rank along an axis, for those two; None for the ranks between
        them."""
        rank = self._world.device.rank
        ranks = self.mesh.ends(rank, axis)
        if rank not in ranks:
            return None
        if (axis, 0) not in self._neighbours:
            whole = ranks == self.mesh.group(rank, axis)
            group = self(axis) if whole else self._world.subgroup(ranks, axis, 64 + self.mesh.number(axis))
            self._neighbours[axis, 0] = group
        return self._neighbours[axis, 0]

    def neighbours(self, axis: str, count: int) -> Comm:
        """Return the group of `count` neighbours along one axis, this rank among them; all of the axis if count is its
        size."""
        if count == self.mesh.size(axis):
            return self(axis)
        if (axis, count) not in self._neighbours:
            ranks = self.mesh.neighbours(self._world.device.rank, axis, count)
            self._neighbours[axis, count] = self._world.subgroup(ranks, axis, 64 * count + self.mesh.number(axis))
        return self._neighbours[axis, count]
