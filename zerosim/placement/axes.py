"""Sets of a mesh's axes: what is left without some of them, and what a group along them is for."""

from __future__ import annotations

from collections.abc import Collection

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
