"""Find classes of ranks with identical bytes and traffic: one rank of each class runs, and represents the others.

A list of reasons says how ranks differ. A reason returns, for one pipeline stage, axes and a value for each place along
them. Ranks with equal values for every reason belong to one class. Only a record tells which all-reduces their group
does not divide: `by_shares` cuts the classes again by these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

from zerosim.placement.layout import Layout
from zerosim.placement.mesh import Mesh
from zerosim.placement.partition import EvenSlices, Slice, shares
from zerosim.placement.spec import FlatSpec

Column = tuple[tuple[str, ...], Sequence[Hashable]]
"""Axes, and a value for each member along them, in mesh order. Members differ if their values differ."""
Reason = Callable[[Layout, int], Iterator[Column]]
"""A function reason(layout, pipeline stage)."""


def classes(layout: Layout, reasons: Sequence[Reason], around: Sequence[int] = (0,)) -> list[int]:
    """Return for each rank the lowest identical rank.

    `around` says which neighbours' values a member's record depends on: (-1, 0, 1) for a ring, which passes its
    neighbours' values on.
    """
    mesh = layout.mesh
    by_stage = []
    for stage in range(mesh.pp):
        columns: dict[tuple[str, ...], list[Sequence[Hashable]]] = {}
        for reason in reasons:
            for axes, values in reason(layout, stage):
                columns.setdefault(axes, []).append(values)
        by_stage.append([(axes, _around(found, around)) for axes, found in columns.items()])
    seen: dict[Hashable, int] = {}
    index = mesh.index
    return [
        seen.setdefault((stage, *[values[index(rank, *axes)] for axes, values in by_stage[stage]]), rank)
        for rank in range(mesh.world_size)
        for stage in [index(rank, "pp")]
    ]


def by_shares(
    stands_for: Sequence[int],
    mesh: Mesh,
    uneven: Mapping[int, Collection[tuple[tuple[str, ...], int]]],
    around: Sequence[int] = (0,),
) -> list[int]:
    """Cut classes again, by the shares that their ranks add in all-reduces whose elements the group does not divide.
    `uneven` are these, as (axes, elements), by the lowest rank of a class: its members call the same ones."""
    columns = {
        (axes, numel): _around([shares(numel, mesh.size(*axes))], around)
        for found in uneven.values()
        for axes, numel in found
    }
    calls = {lowest: sorted(found) for lowest, found in uneven.items()}
    seen: dict[Hashable, int] = {}
    return [
        seen.setdefault((lowest, *[columns[call][mesh.index(rank, *call[0])] for call in calls[lowest]]), rank)
        for rank, lowest in enumerate(stands_for)
    ]


def _around(columns: Sequence[Sequence[Hashable]], around: Sequence[int]) -> list[Hashable]:
    """Return each member's values with those of its neighbours."""
    own = list(zip(*columns, strict=True))
    return [tuple([own[(index + step) % len(own)] for step in around]) for index in range(len(own))]


def reasons(*, by_tensor: bool) -> list[Reason]:
    """Return the reasons why ranks differ. `by_tensor`: an optimizer's states for a slice depend on the tensors in
    it."""
    return [parts_held, shared_gradients, *([tensors_held] if by_tensor else [])]


def parts_held(layout: Layout, stage: int) -> Iterator[Column]:
    """Compare the sizes and the padding of slices."""
    for partition, axes, numels in {(row.partition, row.axes, numels) for row, numels in layout.cuts(stage)}:
        yield axes, partition.kinds(numels, layout.mesh.size(*axes))


def shared_gradients(layout: Layout, stage: int) -> Iterator[Column]:
    """Compare the elements with shared gradients, for each kind of buffer."""
    seen = set[Hashable]()
    for flat, axes, is_sliced in _cut(layout, stage):
        runs = tuple((weight.numel, tuple(weight.shared_over(layout.mesh))) for weight in flat.weights)
        if (axes, runs) in seen or not any(sharers for _, sharers in runs):
            continue
        if is_sliced:  # equal buffers are cut alike
            seen.add((axes, runs))
        yield axes, [_shares_within(flat, part, runs) for part in layout.parts(stage, flat.name)]


def tensors_held(layout: Layout, stage: int) -> Iterator[Column]:
    """Compare the tensors in the slices, for each kind of buffer: of optimizer states or, where blocks leave gaps
    between tensors, of every state. Whole buffers differ by their owners."""
    kinds = dict[Hashable, tuple[FlatSpec, str, tuple[str, ...]]]()
    for flat, _, is_sliced in _cut(layout, stage):
        for state, row in layout.rows(flat.name).items() if is_sliced else ():
            if state == "optim" or (flat.block > 1 and not row.is_whole):
                kinds[tuple(weight.shape for weight in flat.weights), row.partition, row.axes] = flat, state, row.axes
    for flat, state, axes in kinds.values():
        parts = layout.parts(stage, flat.name, state)
        yield axes, [tuple((mine.weight.shape, mine.numel) for mine in flat.within(part)) for part in parts]


def _cut(layout: Layout, stage: int) -> Iterator[tuple[FlatSpec, tuple[str, ...], bool]]:
    """Return a pipeline stage's trained buffers, the axes that cut a rank's slices, and whether the slices are even."""
    for name in filter(layout.is_trained, layout.stages[stage]):
        row = layout.rows(name)["optim"]
        yield layout.flats[name], row.axes, isinstance(row.partition, EvenSlices)


def _shares_within(flat: FlatSpec, part: Slice, runs: Sequence[tuple[int, Collection[Hashable]]]) -> Hashable:
    """Return elements by the ranks that share their gradient, which one all-reduce adds up."""
    found: dict[Hashable, int] = {}
    for mine in flat.within(part):
        for sharers in runs[mine.which][1]:
            found[sharers] = found.get(sharers, 0) + mine.numel
    return tuple(found.items())
