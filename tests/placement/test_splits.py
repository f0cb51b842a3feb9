"""Weights cut over a tensor-parallel group: windows cover the whole once, what was cut is put together again, copies
that differ are refused, and neighbours that share a piece form groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.comm.groups import Groups
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.dtypes import fp32
from zerosim.errors import InputError, PlacementError
from zerosim.placement.assemble import Piece, assemble, cut
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import Mesh
from zerosim.placement.partition import EvenSlices, Partition, Whole, WholeUnits
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.placement.split import Split
from zerosim.placement.zero import zero_rows
from zerosim.train.plan import plan

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def splits(draw: Callable[[Any], Any], sizes: Any = SIZES) -> tuple[Split, int]:
    """How a group of some size cuts a weight: parts side by side, equal or not, copies, or padding at the end."""
    size = draw(sizes)
    pieces = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    parts, step = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = parts * pieces * step
    padding = draw(st.integers(0, length - 1)) if parts == 1 else 0
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = length - padding
    lengths = tuple(draw(st.lists(st.integers(1, 3).map(lambda n: n * pieces), max_size=3)))
    if lengths:
        shape[dim], parts, padding = sum(lengths), 1, 0
    return Split(tuple(shape), dim, pieces, parts, padding, "tp", lengths), size


def numbered(split: Split) -> Any:
    """No two elements are alike, and none is 0."""
    return np.arange(1, np.prod(split.shape) + 1, dtype=np.float32).reshape(split.shape)


@given(splits())
def test_windows_of_all_members_cover_the_whole_once(case: tuple[Split, int]) -> None:
    split, size = case
    length, copies = split.shape[split.dim], split.copies(size)
    held = np.zeros(length, int)
    for index in range(size):
        assert split.piece(index, size) == split.piece(index // copies * copies, size)
        filled = np.zeros(split.local_shape[split.dim], int)
        for here, there in split.windows(index, size):
            held[there] += 1
            filled[here] += 1
            assert here.stop - here.start == there.stop - there.start > 0
        assert filled.max(initial=0) <= 1
    assert set(held) == {copies}
    local = split.local_shape[split.dim]
    assert local * split.pieces == length + split.padding
    assert [n for d, n in enumerate(split.local_shape) if d != split.dim] == [
        n for d, n in enumerate(split.shape) if d != split.dim
    ]


@given(splits())
def test_what_members_take_gives_the_whole_back(case: tuple[Split, int]) -> None:
    split, size = case
    whole, back = numbered(split), np.full(split.shape, np.nan, np.float32)
    copies = split.copies(size)
    for index in range(size):
        local = split.take(whole, index, size)
        assert local.shape == split.local_shape
        assert np.array_equal(local, split.take(whole, index // copies * copies, size))
        split.put(local, back, index, size)
    assert np.array_equal(back, whole)
    absent = sum(int((split.take(whole, index, size) == 0).sum()) for index in range(0, size, copies))
    assert absent == split.padding * whole.size // split.shape[split.dim]  # zeros, and nothing else is one


@given(splits())
def test_a_weight_is_counted_once(case: tuple[Split, int]) -> None:
    split, size = case
    cut, whole = WeightSpec("w", split.local_shape, splits=(split,)), WeightSpec("w", (3,))
    rows, mesh = WeightSpec("w", (3,), summed=("tp",)), Mesh(tp=size)
    for weight, count in (cut, split.pieces), (whole, 1), (rows, 1):
        assert sum(weight.counts(mesh, rank, ("tp",)) for rank in range(size)) == count
    sharers = [dict(weight.shared_over(mesh)).get("tp", 1) for weight in (cut, whole, rows)]
    assert sharers == [split.copies(size), 1, size]
    assert cut.whole_shape == split.shape


def test_a_split_by_hand() -> None:
    """q|k|v of 2 heads of 1 column each on 2 ranks; 7 rows of a table on 4; 2 heads on 4 ranks."""
    packed = Split((1, 6), 1, 2, parts=3)
    assert packed.take(np.array([[1, 2, 3, 4, 5, 6]]), 1, 2).tolist() == [[2, 4, 6]]
    table = Split((5, 1), 0, 4, padding=3)
    assert [table.windows(index, 4) for index in (0, 2, 3)] == [
        [(slice(0, 2), slice(0, 2))],
        [(slice(0, 1), slice(4, 5))],
        [],
    ]
    shared = Split((2, 1), 0, 2)
    assert [shared.piece(index, 4) for index in range(4)] == [0, 0, 1, 1]
    assert shared.copies(4) == 2


# -- neighbours -----------------------------------------------------------------------------------------
MESHES = st.builds(
    Mesh, pp=st.integers(1, 2), dp_replicate=st.integers(1, 2), dp_shard=st.integers(1, 3), cp=st.just(1), tp=SIZES
)


@given(MESHES)
def test_neighbours_cut_an_axis_into_equal_runs(mesh: Mesh) -> None:
    for count in [n for n in range(1, mesh.tp + 1) if mesh.tp % n == 0]:
        groups = {mesh.neighbours(rank, "tp", count) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for rank in range(mesh.world_size):
            group = mesh.neighbours(rank, "tp", count)
            assert len(group) == count
            assert rank in group
            assert group == tuple(range(group[0], group[0] + count))  # tp is the fastest axis
            assert set(group) <= set(mesh.group(rank, "tp"))
    assert mesh.neighbours(0, "tp", mesh.tp) == mesh.group(0, "tp")


def test_neighbours_along_a_slow_axis() -> None:
    mesh = Mesh(dp_shard=4, tp=2)
    assert [mesh.neighbours(rank, "dp_shard", 2) for rank in (0, 1, 5, 6)] == [(0, 2), (1, 3), (5, 7), (4, 6)]


def test_groups_of_neighbours_add_up_beside_others() -> None:
    """Groups of 2 and 4 along tp and along the data, in use at once: none takes another's messages."""
    mesh = Mesh(dp_shard=2, tp=4)

    def program(ctx: Context) -> list[float]:
        groups, found = Groups(mesh, ctx.comm), []
        for comm in (groups.neighbours("tp", 2), groups("dp_shard"), groups.neighbours("tp", 4), groups("tp")):
            buffer = ctx.device.alloc((3,), fp32, Kind.GRAD)
            ctx.device.backend.fill(buffer.array, 2.0**ctx.rank)
            comm.all_reduce(buffer, op="sum")
            found.append(float(buffer.array[1]))
        assert groups.neighbours("tp", 2) is groups.neighbours("tp", 2)
        assert groups.neighbours("tp", 4) is groups("tp")
        return found

    for rank, found in enumerate(launch(program, World(ranks=8))):
        pair, other = 3 << rank // 2 * 2, (1 << rank) + (1 << (rank + 4) % 8)
        four = 15 << rank // 4 * 4
        assert found == [pair, other, four, four]


# -- the layout -----------------------------------------------------------------------------------------
RULES: list[Partition] = [Whole(), EvenSlices(), WholeUnits()]


@st.composite
def layouts(draw: Callable[[Any], Any]) -> Layout:
    tp, node = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2, 4]))
    flats = []
    for i in range(draw(st.integers(1, 3))):
        weights = []
        for j in range(draw(st.integers(1, 3))):
            axis = "node" if node > 1 and i == 1 else "tp"  # of one buffer the neighbours in a node have parts
            cut = draw(splits(st.just(node if axis == "node" else tp)))[0] if draw(st.booleans()) or not j else None
            found = () if cut is None else (replace(cut, axis=axis),)
            shape = found[0].local_shape if found else (draw(st.integers(1, 5)),)
            weights.append(WeightSpec(f"f{i}.{j}", shape, splits=found))
        flats.append(FlatSpec(f"f{i}", tuple(weights)))
    rule = draw(st.sampled_from(RULES))
    mesh = Mesh(dp_replicate=draw(st.integers(1, 2)), dp_shard=draw(st.integers(1, 2)) * node, tp=tp, node=node)
    rows = zero_rows(3, rule)
    of_node = {state: replace(row, axes=("nodes",)) for state, row in rows.items()}
    return Layout(mesh, flats, lambda flat: of_node if "node" in flat.cut_axes else rows)


def drawn(layout: Layout) -> dict[str, Any]:
    random = np.random.default_rng(0)
    weights = [weight for flat in layout.flats.values() for weight in flat.weights]
    return {weight.name: 1 + random.random(weight.whole_shape).astype(np.float32) for weight in weights}


def pieces_of(layout: Layout, weights: dict[str, Any]) -> Iterator[Piece]:
    """What each rank holds: its part of each weight that is cut, of that its slice."""
    for rank in range(layout.mesh.world_size):
        yield from cut(layout, weights, rank)


@pytest.mark.slow
@given(layouts(), st.randoms(use_true_random=False))
def test_what_was_cut_twice_is_put_together_again(layout: Layout, random: Any) -> None:
    weights = drawn(layout)
    pieces = list(pieces_of(layout, weights))
    random.shuffle(pieces)
    found = assemble(layout, pieces)
    assert list(found) == list(weights)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)


@settings(max_examples=60)
@given(layouts(), st.randoms(use_true_random=False))
def test_copies_that_differ_are_refused_with_rank_and_tensor(layout: Layout, random: Any) -> None:
    """Those along tp and those along the data: whatever one rank has changed, somebody else has it too, or nobody."""
    pieces = list(pieces_of(layout, drawn(layout)))
    changed = random.choice([piece for piece in pieces if piece.part.size > piece.part.padding])
    at = random.randrange(changed.part.size - changed.part.padding)
    flat = layout.flats[changed.flat]
    [mine] = [m for m in flat.within(changed.part) if m.at <= at < m.at + m.numel]
    axis = flat.cut_axes[-1]
    copies = mine.weight.copies(layout.mesh, axis)
    holders = {
        piece.rank
        for piece in pieces
        if piece.flat == changed.flat
        and layout.mesh.index(piece.rank, axis) // copies == layout.mesh.index(changed.rank, axis) // copies
        and piece.part.start <= changed.part.start + at < piece.part.stop
    }
    changed.values[at] = -changed.values[at] if changed.values[at] else 1.0
    if len(holders) == 1:
        assemble(layout, pieces)
        return
    said = rf"rank (\d+) and rank (\d+) hold different values of element \d+ of (their part of )?{mine.weight.name}:"
    with pytest.raises(PlacementError, match=said) as raised:
        assemble(layout, pieces)
    ranks = {int(word) for word in re.findall(r"rank (\d+)", str(raised.value))}
    assert ranks <= holders
    assert raised.value.rank in ranks


def test_a_group_of_which_a_member_says_nothing_is_refused() -> None:
    split = Split((4, 2), 0, 2, axis="tp")
    flat = FlatSpec("f", (WeightSpec("f.w", split.local_shape, splits=(split,)),))
    layout = Layout(Mesh(dp_shard=2, tp=2), [flat], zero_rows(3))
    pieces = list(pieces_of(layout, drawn(layout)))
    with pytest.raises(PlacementError, match=r"no rank holds element 0 of f\.w"):
        assemble(layout, [piece for piece in pieces if piece.rank % 2 == 0])


# -- classes --------------------------------------------------------------------------------------------
def test_a_large_world_has_few_classes() -> None:
    """Slices of 2 elements of a norm are added over 8 tensor-parallel ranks: these are of three kinds."""
    sizes: dict[str, Any] = dict(layers=2, hidden=512, heads=8, seq=16, vocab=65536, micro_batch=1, steps=1)
    found = plan(RunConfig(**sizes, ranks=4096, tp=8, stage=3, sequence_parallel=True, precision="bf16"))
    assert len(found.ran) <= 21


@pytest.mark.parametrize("dim", [0, 1])
def test_unequal_parts_are_each_cut(dim: int) -> None:
    """q|k|v of 4 heads of queries and 2 of keys and of values, 3 columns each, over 2 ranks."""
    whole = np.arange(24 * 24).reshape(24, 24)[:, : 24 if dim else 5]
    split = Split(whole.shape, dim, 2, lengths=(12, 6, 6))
    for rank in (0, 1):
        local = split.take(whole, rank, 2)
        rows = [i + rank * step for start, step in ((0, 6), (12, 3), (18, 3)) for i in range(start, start + step)]
        assert local.shape == split.local_shape
        assert (local == whole.take(rows, dim)).all()
    back = np.full_like(whole, -1)
    for rank in (0, 1):
        split.put(split.take(whole, rank, 2), back, rank, 2)
    assert (back == whole).all()
    equal = Split(whole.shape, dim, 2, lengths=(8, 8, 8)), Split(whole.shape, dim, 2, parts=3)
    assert equal[0].windows(1, 2) == equal[1].windows(1, 2)


def test_unequal_parts_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(InputError, match=r"parts of \(12, 6, 6\) cannot each be cut over 4 ranks: choose a --tp that"):
        Split((24, 5), 0, 4, axis="tp", lengths=(12, 6, 6))
    with pytest.raises(InputError, match=r"parts of \(12, 6\) do not fill its 24"):
        Split((24, 5), 0, 2, lengths=(12, 6))
