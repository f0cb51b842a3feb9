"""A mesh's axes: what is left without some of them, what a group along them is for, and a rank's place along each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zerosim.placement.mesh import (
    AXES,
    DATA,
    EXPERT_STATES,
    EXPERTS,
    FINER,
    FINEST,
    FOLDS,
    SHARES,
    STATES,
    Mesh,
    finest,
)


def without(axes: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """Return these axes without the others, in mesh order; of an axis of which a finer one is gone, what is left. All
    axes of experts together are what they fold."""
    gone, found = {*finest(others)}, list[str]()
    if gone.issuperset(EXPERTS):
        gone.update(finest(FOLDS))
    for axis in joined(axes):
        single = finest((axis,))
        found += [axis] if gone.isdisjoint(single) else [one for one in single if one not in gone]
    return tuple(found)


def joined(axes: Collection[str]) -> tuple[str, ...]:
    """Return these axes without those that another one of them includes, in mesh order."""
    finer = {part for axis in axes for part in FINER.get(axis, ())}
    return tuple(axis for axis in dict.fromkeys((*AXES, *FINEST)) if axis in axes and axis not in finer)


def what_for(axis: str) -> str:
    """Return the purpose of a group along axes of this name (`Mesh.name`): 'states' if they cut model
    states, 'replicas' if they hold copies of those, else their name, as for a finer axis."""
    axes, states, data = ({*finest(some)} for some in (axis.split("+"), STATES, DATA))
    if axes <= {*EXPERT_STATES} or (axes <= states and (axes - {*SHARES}) in (set(), states - {*SHARES})):
        return "states"  # an axis of one rank has no name
    return "replicas" if axes <= data and not axes < states else axis


def coordinates(mesh: Mesh, rank: int) -> Mapping[str, int]:
    """Return a rank's index along each axis."""
    return {axis: mesh.index(rank, axis) for axis in mesh.sizes}


def first_ranks(mesh: Mesh, *axes: str) -> list[int]:
    """Return the lowest rank at each place along these axes."""
    found: dict[int, int] = {}
    for rank in range(mesh.world_size):
        found.setdefault(mesh.index(rank, *axes), rank)
    return [found[index] for index in sorted(found)]


def place_of(mesh: Mesh, rank: int) -> str:
    """Return 'dp_replicate 0, dp_shard 1': the axes with more than one place; '' in a mesh of one axis."""
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    return ", ".join(f"{axis} {mesh.index(rank, axis)}" for axis in axes) if len(axes) > 1 else ""
