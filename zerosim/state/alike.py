"""How ranks differ in what they write, told from the layout alone: ranks that agree need one program in a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.placement.rows import Row
from zerosim.placement.spec import FlatSpec
from zerosim.placement.split import Splits
from zerosim.state.gathered import leads
from zerosim.state.runs import cuts_of, holders, share

Place = tuple[int, int]
"""A rank's number among those with the same numbers of a weight, and how many they are."""


def in_gathered(layout: Layout, rank: int) -> Hashable:
    """Return which weights a rank writes in a gathered save; nothing on ranks that write nothing."""
    mesh = layout.mesh
    names = [name for name in layout.stages[mesh.index(rank, "pp")] if leads(layout, rank, name)]
    flats = [layout.flats[name] for name in names]
    return tuple(tuple(one.counts(mesh, rank, flat.cut_axes) for one in flat.weights) for flat in flats)


def in_shards(layout: Layout, *, by_tensor: bool) -> list[Hashable]:
    """Return by rank how many numbers it writes in a sharded save. Copies are written by shares, which are rounded up
    on the first ranks. `by_tensor`: an optimizer's states depend on the tensors, so each share counts alone."""
    mesh, found = layout.mesh, [list[Hashable]() for _ in range(layout.mesh.world_size)]
    for stage, names in enumerate(layout.stages):
        ranks = [rank for rank in range(mesh.world_size) if mesh.index(rank, "pp") == stage]
        kinds = dict[tuple[Hashable, Row], str]()
        for name in filter(lambda name: layout.is_counted(stage, name), names):
            flat = layout.flats[name]
            weights = tuple((one.numel, one.splits) for one in flat.weights)
            kinds.setdefault((weights, layout.rows(name)["optim" if layout.is_trained(name) else "param"]), name)
        for (_, row), name in kinds.items():
            flat = layout.flats[name]
            places = {one.splits: holders(mesh, ranks, row, one) for one in flat.weights}
            known = dict[Hashable, Hashable]()
            for rank in ranks:
                copies = tuple(of[rank] for of in places.values())
                part = layout.own(rank, name)
                key = part.start, part.stop, copies
                if key not in known:
                    by_splits = dict(zip(places, copies, strict=True))
                    known[key] = (
                        _tensors(flat, part, by_tensor=by_tensor),
                        copies if by_tensor else _numel(flat, part, by_splits),
                    )
                found[rank].append(known[key])
    return [tuple(one) for one in found]


def written_once(layout: Layout, stage: int) -> int:
    """Return how many numbers of trained weights the ranks of a pipeline stage write of each state, copies once."""
    mesh, total, pieces = layout.mesh, 0, dict[Splits, int]()
    ranks = [rank for rank in range(mesh.world_size) if mesh.index(rank, "pp") == stage]
    for name in layout.stages[stage]:
        for weight in layout.flats[name].weights if layout.is_counted(stage, name) and layout.is_trained(name) else ():
            if weight.splits not in pieces:
                pieces[weight.splits] = len({cuts_of(weight, mesh, rank) for rank in ranks})
            total += weight.numel * pieces[weight.splits]
    return total


def _tensors(flat: FlatSpec, part: Slice, *, by_tensor: bool) -> Hashable:
    """Return what only the first slice of a tensor writes: its rows and columns, and scales that every rank has."""
    begins = tuple(mine.start == 0 for mine in flat.within(part)) if by_tensor else ()
    return begins, part.start == 0 and flat.scale_bytes > 0


def _numel(flat: FlatSpec, part: Slice, places: Mapping[Splits, Place]) -> int:
    """Return how many numbers of a slice a rank writes."""
    runs = Counter((mine.numel, places[mine.weight.splits]) for mine in flat.within(part))
    spans = {one: share(one[0], *one[1]) for one in runs}
    return sum(times * (spans[one][1] - spans[one][0]) for one, times in runs.items())
