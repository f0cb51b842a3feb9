"""Placement as a value: groups partition the world, parts cover every element, what is put together is what was cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.analysis.formulas import blocked_numel
from zerosim.comm.algorithms.execution import RangeCut
from zerosim.errors import InputError, PlacementError
from zerosim.placement.assemble import Piece, assemble
from zerosim.placement.axes import coordinates, joined, what_for, without
from zerosim.placement.classes import by_shares, classes, reasons
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import AXES, DATA, Mesh
from zerosim.placement.partition import EvenSlices, Partition, Slice, Whole, WholeUnits, shares
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.placement.zero import zero_rows

MESHES = st.builds(Mesh, *[st.integers(1, 3)] * len(AXES))
AXIS_SETS = st.lists(st.sampled_from(AXES), unique=True).map(tuple)
SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)
RULES: list[Partition] = [Whole(), EvenSlices(), WholeUnits()]


# -- the mesh ----------------------------------------------------------------------------------------------
@given(MESHES, AXIS_SETS)
def test_groups_cut_the_world_into_equal_parts(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = {mesh.group(rank, *axes) for rank in range(mesh.world_size)}
    assert len(groups) == mesh.world_size // mesh.size(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for rank in range(mesh.world_size):
        group = mesh.group(rank, *axes)
        assert group == tuple(sorted(group))
        assert group.index(rank) == mesh.index(rank, *axes)
        others = [axis for axis in AXES if axis not in axes]
        assert all(mesh.index(peer, axis) == mesh.index(rank, axis) for peer in group for axis in others)


@given(MESHES)
def test_coordinates_name_a_rank(mesh: Mesh) -> None:
    seen = {tuple(coordinates(mesh, rank).values()): rank for rank in range(mesh.world_size)}
    assert list(seen.values()) == list(range(mesh.world_size))
    assert list(seen) == sorted(seen)  # the last axis is the fastest
    assert mesh.group(0, *AXES) == tuple(range(mesh.world_size))


@given(MESHES)
def test_shards_and_copies_are_all_ranks_that_share_a_batch(mesh: Mesh) -> None:
    """Gradients that are averaged over shards and then over copies are averaged over every rank that has rows."""
    for rank in range(mesh.world_size):
        met = [peer for holder in mesh.group(rank, "dp_shard") for peer in mesh.group(holder, "dp_replicate")]
        assert sorted(met) == list(mesh.group(rank, *DATA))


def test_a_mesh_by_hand() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=3, tp=2)
    assert mesh.group(7, "tp") == (6, 7)
    assert mesh.group(7, "dp_shard") == (7, 9, 11)
    assert mesh.group(7, "dp_replicate") == (1, 7)
    assert mesh.group(7, "dp_shard", "dp_replicate") == (1, 3, 5, 7, 9, 11)
    assert coordinates(mesh, 7) == {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 1}
    numbers = {mesh.number(*axes) for count in range(1, 6) for axes in itertools.combinations(AXES, count)}
    assert len(numbers) == 31
    assert 1 <= min(numbers) <= max(numbers) <= 63


def test_an_axis_stands_for_finer_ones() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=6, tp=2, node=3)
    assert mesh.sizes == Mesh(dp_replicate=2, dp_shard=6, tp=2).sizes
    for rank in range(24):
        assert mesh.group(rank, "nodes", "node") == mesh.group(rank, "dp_shard") == mesh.group(rank, "dp_shard", "node")
        assert mesh.index(rank, "dp_shard") == 3 * mesh.index(rank, "nodes") + mesh.index(rank, "node")
    assert (mesh.group(13, "node"), mesh.group(13, "nodes")) == ((13, 15, 17), (13, 19))
    assert mesh.number("nodes", "node") == mesh.number("dp_shard")
    assert (mesh.name("node", "dp_replicate"), mesh.name("dp_shard", "tp")) == ("dp_replicate+node", "dp_shard+tp")
    assert [what_for(name) for name in ("dp_shard", "node", "dp_replicate", "dp_replicate+nodes", "tp", "pp")] == [
        "states", "node", "replicas", "replicas", "tp", "pp"
    ]  # fmt: skip
    assert without(DATA, ["nodes", "tp"]) == ("dp_replicate", "node")
    assert without(DATA, ["tp"]) == DATA
    assert joined({"nodes", "dp_shard", "tp"}) == ("dp_shard", "tp")
    with pytest.raises(InputError, match="expected one that divides dp_shard 6"):
        Mesh(dp_shard=6, node=4)
    assert mesh.number("tp", "pp") == mesh.number("pp", "tp")
    assert mesh.name("dp_shard", "dp_replicate") == "dp_replicate+dp_shard"
    assert Mesh(dp_shard=4).name("dp_replicate", "dp_shard") == "dp_shard"
    assert Mesh().name("tp") == "tp"


@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_of_no_ranks_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"dp_replicate has size {size}: expected at least 1"):
        Mesh(dp_replicate=size)


# -- specs -------------------------------------------------------------------------------------------------
def spec(shapes: list[tuple[int, ...]], name: str = "flat") -> FlatSpec:
    return FlatSpec(name, tuple(WeightSpec(f"{name}.{i}", shape) for i, shape in enumerate(shapes)))


@given(SHAPES, st.integers(0, 60), st.integers(0, 60))
def test_what_lies_within_a_part_is_told_once(shapes: list[tuple[int, ...]], start: int, length: int) -> None:
    flat = spec(shapes)
    values = [100 * i + j for i, weight in enumerate(flat.weights) for j in range(weight.numel)]
    part = Slice(start, start + length, flat.numel)
    found = [None] * part.size
    for which, weight, first, last, at in flat.within(part):
        assert weight is flat.weights[which]
        for j in range(first, last):
            assert found[at + j - first] is None
            found[at + j - first] = 100 * which + j
    expected = values[start : start + length]
    assert found == expected + [None] * (part.size - len(expected))


@given(SHAPES, st.integers(1, 9), st.integers(1, 4))
def test_even_slices_of_a_buffer_in_blocks_end_where_blocks_of_a_weight_do(
    shapes: list[tuple[int, ...]], block: int, members: int
) -> None:
    flat = replace(spec(shapes), block=block, members=members)
    assert flat.numel == blocked_numel([weight.numel for weight in flat.weights], members, block)
    elements = list[tuple[int, int]]()
    for index in range(members):
        part = EvenSlices().part([flat.numel], 0, index, members)
        gaps = [at for start, stop in flat.gaps(part) for at in range(start, stop)]
        assert len(gaps) == flat.padding(part)
        held = list[int]()
        for which, weight, start, stop, at in flat.within(part):
            assert start % block == 0
            assert stop % block == 0 or stop == weight.numel
            elements += [(which, element) for element in range(start, stop)]
            held += range(at, at + stop - start)
        assert sorted(held + gaps) == list(range(part.size))
    assert elements == [(i, element) for i, weight in enumerate(flat.weights) for element in range(weight.numel)]
    assert flat.num_parameters == len(elements)


# -- the layout --------------------------------------------------------------------------------------------
LAYOUTS = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.lists(SHAPES, min_size=1, max_size=4), st.sampled_from(RULES)
)


def layout_of(replicas: int, shards: int, shapes: list[list[tuple[int, ...]]], rule: Partition) -> Layout:
    flats = [spec(each, f"f{i}") for i, each in enumerate(shapes)]
    return Layout(Mesh(dp_replicate=replicas, dp_shard=shards), flats, zero_rows(3, rule))


@given(LAYOUTS)
def test_every_replica_holds_every_element_once(case: Any) -> None:
    layout = layout_of(*case)
    is_whole = isinstance(case[3], Whole)
    for flat in layout.flats.values():
        for replica in range(layout.mesh.dp_replicate):
            held = [0] * flat.numel
            ranks = [r for r in range(layout.mesh.world_size) if layout.mesh.index(r, "dp_replicate") == replica]
            for rank in ranks:
                part = layout.own(rank, flat.name)
                for element in range(part.start, min(part.stop, flat.numel)):
                    held[element] += 1
            assert set(held) == {layout.mesh.dp_shard if is_whole else 1}


def pieces_of(layout: Layout, weights: dict[str, Any]) -> list[Piece]:
    """What each rank holds, padding filled with nan."""
    pieces = []
    for rank in range(layout.mesh.world_size):
        for flat in layout.flats.values():
            part = layout.own(rank, flat.name)
            values = np.full(part.size, np.nan, np.float32)
            for _, weight, start, stop, at in flat.within(part):
                values[at : at + stop - start] = weights[weight.name].reshape(-1)[start:stop]
            pieces.append(Piece(rank, flat.name, part, values))
    return pieces


def drawn(layout: Layout) -> dict[str, Any]:
    random = np.random.default_rng(0)
    weights = [weight for flat in layout.flats.values() for weight in flat.weights]
    return {weight.name: random.standard_normal(weight.shape).astype(np.float32) for weight in weights}


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_what_was_cut_is_put_together_again(case: Any, random: Any) -> None:
    layout = layout_of(*case)
    weights = drawn(layout)
    pieces = pieces_of(layout, weights)
    random.shuffle(pieces)
    found = assemble(layout, pieces)
    assert list(found) == list(weights)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)


@settings(max_examples=60)
@given(LAYOUTS, st.randoms(use_true_random=False))
def test_copies_that_differ_and_holes_are_refused(case: Any, random: Any) -> None:
    layout = layout_of(*case)
    pieces = pieces_of(layout, drawn(layout))
    held = [p for p in pieces if p.part.size > p.part.padding]
    changed = random.choice(held)
    at = random.randrange(changed.part.size - changed.part.padding)
    copies = {p.rank for p in held if p.flat == changed.flat and p.part.start <= changed.part.start + at < p.part.stop}
    flat = layout.flats[changed.flat]
    [overlap] = flat.within(Slice(changed.part.start + at, changed.part.start + at + 1, flat.numel))
    element = f"element {overlap.start} of {overlap.weight.name}"
    if len(copies) > 1:
        changed.values[at] = -changed.values[at] if changed.values[at] else 1.0
        with pytest.raises(
            PlacementError, match=rf"rank \d+ and rank \d+ hold different values of {element}:"
        ) as found:
            assemble(layout, pieces)
        assert {int(word) for word in str(found.value).split()[1:5:3]} <= copies
    else:
        pieces.remove(changed)
        first = next(flat.within(changed.part))
        with pytest.raises(PlacementError, match=f"no rank holds element {first.start} of {first.weight.name}:"):
            assemble(layout, pieces)


def test_a_zero_of_another_sign_is_a_difference() -> None:
    layout = layout_of(2, 1, [[(2,)]], Whole())
    pieces = [
        Piece(rank, "f0", Slice(0, 2, 2), np.array([1.0, zero], np.float32)) for rank, zero in ((0, 0.0), (1, -0.0))
    ]
    with pytest.raises(PlacementError, match=r"element 1 of f0\.0"):
        assemble(layout, pieces)


@given(LAYOUTS, st.sampled_from([(0,), (-1, 0, 1)]), st.lists(st.integers(1, 20), max_size=2))
def test_ranks_of_a_class_hold_as_much_and_as_much_padding(case: Any, around: tuple[int, ...], uneven: Any) -> None:
    layout = layout_of(*case)
    mesh = layout.mesh
    found = classes_of(layout, [(("dp_shard",), numel) for numel in uneven], around)
    for rank, lowest in enumerate(found):
        assert found[lowest] == lowest <= rank
        for flat in layout.flats.values():
            mine, theirs = (layout.own(r, flat.name) for r in (rank, lowest))
            assert (mine.size, mine.padding) == (theirs.size, theirs.padding)
        for numel in uneven:
            assert len({shares(numel, mesh.dp_shard)[mesh.index(r, "dp_shard")] for r in (rank, lowest)}) == 1


def classes_of(layout: Layout, uneven: Any, around: tuple[int, ...] = (0,)) -> list[int]:
    found = classes(layout, reasons(by_tensor=False), around)
    return by_shares(found, layout.mesh, dict.fromkeys(found, uneven), around)


def test_classes_by_hand() -> None:
    rows = zero_rows(3)
    layout = Layout(Mesh(dp_replicate=2, dp_shard=4), [spec([(9,)])], rows)  # slices of 3, 3, 3 and padding alone
    assert classes_of(layout, []) == [0, 0, 0, 3, 0, 0, 0, 3]
    assert classes_of(layout, [(("dp_replicate",), 3)]) == [0, 0, 0, 3, 4, 4, 4, 7]  # replica 0 adds 2 of 3 elements
    assert classes_of(layout, [(("dp_shard",), 5)]) == [0, 0, 2, 3, 0, 0, 2, 3]
    assert classes_of(layout, [(("dp_shard",), 5)], (-1, 0, 1)) == [0, 1, 2, 3, 0, 1, 2, 3]
    found = classes_of(layout, [])
    only_padding = by_shares(found, layout.mesh, {0: [], 3: [(("dp_replicate",), 3)]})  # rank 0's class calls none
    assert only_padding == [0, 0, 0, 3, 0, 0, 0, 7]


def test_sixteen_thousand_ranks_are_told_apart_at_once() -> None:
    flats = [spec([(10**6, 10**3), (10**6,)], f"h.{i}") for i in range(128)]
    layout = Layout(Mesh(dp_replicate=16, dp_shard=1024), flats, zero_rows(3))
    found = classes_of(layout, [(("dp_replicate",), 977)])
    assert len(found) == 16384
    assert len(set(found)) == len({(c // 1024, c % 1024) for c in found}) < 40


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_a_share_is_what_a_collective_adds(numel: int, size: int) -> None:
    cut = RangeCut([numel], size, 0, numel)
    assert shares(numel, size) == [cut.size_of(index) for index in range(size)]
