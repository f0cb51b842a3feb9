"""Which ranks cannot differ in bytes and traffic: of such a class one is run, and stands for all.

Why ranks differ is a list of reasons. A reason gives, for one pipeline stage, axes and a value for each place along
them; ranks whose values are equal for every reason are of one class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial

from zerosim.placement.layout import Layout
from zerosim.placement.partition import EvenSlices, Slice, shares
from zerosim.placement.spec import FlatSpec

Column = tuple[tuple[str, ...], Sequence[Hashable]]
"""Axes, and what makes members along them differ: a value for each, in mesh order."""
Reason = Callable[[Layout, int], Iterator[Column]]
"""Called as reason(layout, pipeline stage)."""


def classes(layout: Layout, reasons: Sequence[Reason], around: Sequence[int] = (0,)) -> list[int]:
    """For each rank the lowest one that it cannot differ from.

    `around` says whose values a member's record depends on beside its own: (-1, 0, 1) for a ring, which passes its
    neighbours' on.
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


def _around(columns: Sequence[Sequence[Hashable]], around: Sequence[int]) -> list[Hashable]:
    """For each member its values, and those of the members around it."""
    own = list(zip(*columns, strict=True))
    return [tuple([own[(index + step) % len(own)] for step in around]) for index in range(len(own))]


def reasons(uneven: Collection[tuple[tuple[str, ...], int]], *, by_tensor: bool) -> list[Reason]:
    """Why ranks differ. `uneven` are the all-reduces whose elements the group does not divide, as (axes, elements);
    `by_tensor`: what an optimizer keeps of a part depends on the tensors in it."""
    return [parts_held, partial(unlike_shares, uneven=uneven), shared_gradients, *([tensors_held] if by_tensor else [])]


def parts_held(layout: Layout, stage: int) -> Iterator[Column]:
    """Parts of other sizes, or with other padding."""
    for partition, axes, numels in {(row.partition, row.axes, numels) for row, numels in layout.cuts(stage)}:
        yield axes, partition.kinds(numels, layout.mesh.size(*axes))


def unlike_shares(layout: Layout, stage: int, uneven: Collection[tuple[tuple[str, ...], int]]) -> Iterator[Column]:
    """Members that add unlike shares of what an all-reduce adds up."""
    for axes, numel in uneven:
        yield axes, shares(numel, layout.mesh.size(*axes))


def shared_gradients(layout: Layout, stage: int) -> Iterator[Column]:
    """What of their parts several ranks hold shares of gradients of, for each kind of buffer."""
    seen = set[Hashable]()
    for flat, axes, is_sliced in _trained(layout, stage):
        size = layout.mesh.size(flat.axis)
        runs = tuple((weight.numel, weight.sharers(size)) for weight in flat.weights)
        if (axes, runs) in seen or all(sharers == 1 for _, sharers in runs):
            continue
        if is_sliced:  # equal buffers are cut alike
            seen.add((axes, runs))
        yield axes, [_shares_within(flat, part, size) for part in layout.parts(stage, flat.name)]


def tensors_held(layout: Layout, stage: int) -> Iterator[Column]:
    """What they have of which tensors, for each kind of buffer. Whole buffers differ by their owners."""
    trained = _trained(layout, stage)
    kinds = {(tuple(w.shape for w in flat.weights), axes): flat for flat, axes, is_sliced in trained if is_sliced}
    for (_, axes), flat in kinds.items():
        parts = layout.parts(stage, flat.name)
        yield axes, [tuple((mine.weight.shape, mine.numel) for mine in flat.within(part)) for part in parts]


def _trained(layout: Layout, stage: int) -> Iterator[tuple[FlatSpec, tuple[str, ...], bool]]:
    """The trained buffers of a stage, the axes that cut them, and whether into even slices."""
    for name in layout.stages[stage]:
        if layout.is_trained(name):
            row = layout.rows(name)["optim"]
            yield layout.flats[name], row.axes, isinstance(row.partition, EvenSlices)


def _shares_within(flat: FlatSpec, part: Slice, size: int) -> Hashable:
    """Elements by the number of ranks that share their gradient, in the order of the weights."""
    return tuple((mine.weight.sharers(size), mine.numel) for mine in flat.within(part) if mine.weight.sharers(size) > 1)
