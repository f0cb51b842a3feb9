"""Weights cut along several named axes, on random meshes: pieces tile the whole, what is cut is assembled again, copies
are told from shares, and ranks of one class hold alike. Context parallelism's axis is the made-up one: no weight of
zerosim's models is cut along it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.placement.assemble import Piece, assemble, cut
from zerosim.placement.axes import first_ranks, without
from zerosim.placement.classes import classes, reasons
from zerosim.placement.formats import NF4
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import EXPERT_STATES, EXPERTS, FOLDS, STATES, Mesh
from zerosim.placement.partition import EvenSlices, Whole, WholeUnits
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.placement.split import Split, Tile, put, take
from zerosim.placement.zero import zero_rows
from zerosim.tensor.stored import values_of

AXES = ("cp", "tp", "node")
FOLDED = ("ep", "etp")


def split_of(draw: Callable[[Any], Any], shape: tuple[int, ...], axis: str, size: int) -> Split:
    """A cut of this shape along any dim: equal parts or padding, into as many pieces as ranks, or fewer."""
    dim, pieces = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0]))
    parts = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % (n * pieces) == 0] or [1]))
    return Split(shape, dim, pieces, parts, -shape[dim] % pieces if parts == 1 else 0, axis)


@st.composite
def layouts(draw: Callable[[Any], Any]) -> Layout:
    sizes = st.sampled_from([1, 2])
    node, tp = draw(sizes), draw(st.sampled_from([1, 2, 4]))
    shards, cp, pp = draw(sizes) * node, draw(sizes), draw(sizes)
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if shards * cp * tp % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if shards * cp * tp % (n * ep) == 0]))
    mesh = Mesh(pp=pp, dp_replicate=draw(sizes), dp_shard=shards, cp=cp, tp=tp, node=node, ep=ep, etp=etp)
    rule, stage = draw(st.sampled_from([Whole(), EvenSlices(), WholeUnits()])), draw(st.integers(0, 3))
    flats, stages = list[FlatSpec](), [list[str]() for _ in range(mesh.pp)]
    for i in range(draw(st.integers(1, 3))):
        folded = mesh.is_folded and draw(st.booleans())
        over = draw(st.permutations(FOLDED if folded else AXES))[: draw(st.integers(0, 2))]
        weights = list[WeightSpec]()
        for j in range(draw(st.integers(1, 3))):
            shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
            found: tuple[Split, ...] = ()
            for axis in over[: draw(st.integers(0, 2))]:
                found += (split_of(draw, found[-1].local_shape if found else shape, axis, mesh.size(axis)),)
            summed = tuple(axis for axis in over if mesh.size(axis) > 1 and draw(st.booleans()))
            local = found[-1].local_shape if found else shape
            weights.append(WeightSpec(f"f{i}.{j}", local, splits=found, summed=summed))
        flats.append(FlatSpec(f"f{i}", tuple(weights), axes=EXPERT_STATES if folded else STATES))
        for at in {0, mesh.pp - 1} if i == 2 else {i % mesh.pp}:  # the third one is tied across pipeline stages
            stages[at].append(f"f{i}")
    rows = zero_rows(stage, rule)

    def rows_of(flat: FlatSpec) -> Any:
        axes = flat.axes if flat.axes != STATES else without(STATES, flat.cut_axes)
        return {state: replace(row, axes=axes) for state, row in rows.items()}

    return Layout(mesh, flats, rows_of, stages)


def drawn(layout: Layout) -> dict[str, Any]:
    """Whole weights in which no two elements are alike, and none is 0."""
    weights, found, at = [weight for flat in layout.flats.values() for weight in flat.weights], dict[str, Any](), 1
    for weight in weights:
        numel = int(np.prod(weight.whole_shape))
        found[weight.name] = np.arange(at, at + numel, dtype=np.float32).reshape(weight.whole_shape)
        at += numel
    return found


def pieces_of(layout: Layout, weights: dict[str, Any]) -> Iterator[Piece]:
    """What all ranks hold, with nan where a flat buffer has padding."""
    for rank in range(layout.mesh.world_size):
        for piece in cut(layout, weights, rank):
            flat = layout.flats[piece.flat]
            assert piece.part == layout.own(rank, piece.flat)
            for start, stop in flat.gaps(piece.part):
                assert not piece.values[start:stop].any()
                piece.values[start:stop] = np.nan
            yield piece


@settings(max_examples=500)
@pytest.mark.slow
@given(layouts(), st.randoms(use_true_random=False))
def test_assemble_inverts_cut_on_random_meshes(layout: Layout, random: Any) -> None:
    weights = drawn(layout)
    pieces = list(pieces_of(layout, weights))
    random.shuffle(pieces)
    found = assemble(layout, pieces)
    assert list(found) == list(weights)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    again = [Piece(*piece) for rank in range(layout.mesh.world_size) for piece in cut(layout, found, rank)]
    key = {(piece.rank, piece.flat): piece.values for piece in pieces}
    assert all(np.array_equal(np.nan_to_num(key[one.rank, one.flat]), one.values) for one in again)


@settings(max_examples=60)
@given(layouts())
def test_every_element_is_counted_once_and_copies_lie_beside_each_other(layout: Layout) -> None:
    mesh, weights = layout.mesh, drawn(layout)
    for flat in layout.flats.values():
        axes = flat.cut_axes
        for weight in flat.weights:
            held = Counter[float]()
            for rank in first_ranks(mesh, *axes):
                cuts = weight.cuts(mesh, rank)
                local = take(weights[weight.name], cuts)
                assert local.shape == weight.shape
                if weight.counts(mesh, rank, axes):
                    held.update(local[local != 0].tolist())
                for axis, count in [(axis, weight.copies(mesh, axis)) for axis in axes]:
                    alike = [weight.cuts(mesh, one) for one in mesh.neighbours(rank, axis, count)]
                    assert all([a.piece for a in one] == [a.piece for a in cuts] for one in alike)
                shared = dict(weight.shared_over(mesh))
                for axis in axes:
                    is_cut = any(split.axis == axis for split in weight.splits)
                    copies = mesh.size(axis) if axis in weight.summed else weight.copies(mesh, axis) if is_cut else 1
                    assert shared.get(axis, 1) == copies
            assert held == Counter(weights[weight.name].ravel().tolist())


@settings(max_examples=60)
@given(layouts(), st.booleans())
def test_ranks_of_a_class_hold_parts_padding_and_shares_alike(layout: Layout, by_tensor: bool) -> None:
    def held(rank: int) -> Any:
        found = []
        for name in layout.stages[layout.mesh.index(rank, "pp")]:
            flat, part = layout.flats[name], layout.own(rank, name)
            shares = Counter[Any]()  # of which one all-reduce takes all
            for mine in flat.within(part):
                shares.update(dict.fromkeys(mine.weight.shared_over(layout.mesh), mine.numel))
            found.append((part.size, flat.padding(part), [*shares.items()]))
        return found

    for rank, lowest in enumerate(classes(layout, reasons(by_tensor=by_tensor))):
        assert lowest <= rank
        assert held(rank) == held(lowest)


@pytest.mark.parametrize(("dims", "window"), [((0, 1), np.s_[4:6, :, 3:6]), ((0, 2), np.s_[4:6, 3:6])], ids=str)
def test_experts_are_cut_over_one_axis_and_then_over_tp(dims: tuple[int, int], window: Any) -> None:
    """Eight experts of (6, 6) over four ranks along one axis, then columns or rows over two along tp."""
    mesh, whole = Mesh(cp=4, tp=2), np.arange(8 * 36.0).reshape(8, 6, 6)
    experts = Split(whole.shape, 0, 4, axis="cp")
    within = Split(experts.local_shape, 3 - dims[1], 2, axis="tp")
    weight = WeightSpec("experts", within.local_shape, splits=(experts, within))
    assert (weight.whole_shape, weight.shape) == (whole.shape, within.local_shape)
    rank = 5  # third along cp, second along tp
    assert np.array_equal(take(whole, weight.cuts(mesh, rank)), whole[window])
    assert (weight.copies(mesh, "cp"), weight.copies(mesh, "tp"), list(weight.shared_over(mesh))) == (1, 1, [])
    back = np.zeros_like(whole)
    for each in range(8):
        put(take(whole, weight.cuts(mesh, each)), back, weight.cuts(mesh, each))
    assert np.array_equal(back, whole)


def test_one_dim_is_cut_along_two_axes() -> None:
    """Seven rows, padded to eight, over two ranks, and each half over two: the last one has one row and padding."""
    mesh, whole = Mesh(cp=2, tp=2), np.arange(1.0, 8.0)
    first = Split((7,), 0, 2, padding=1, axis="cp")
    weight = WeightSpec("w", (2,), splits=(first, Split(first.local_shape, 0, 2, axis="tp")))
    assert [take(whole, weight.cuts(mesh, rank)).tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 6], [7, 0]]
    back = np.zeros(7)
    for rank in range(4):
        put(take(whole, weight.cuts(mesh, rank)), back, weight.cuts(mesh, rank))
    assert np.array_equal(back, whole)


def test_tiles_and_codes_are_cut_and_assembled() -> None:
    """A weight in two tiles, each with its buffer, and one in NF4, over three ranks; owners hold some, too."""
    from zerosim.backends.numpy.nf4 import encode_nf4

    random = np.random.default_rng(0)
    whole = {"t": random.random((6, 4), np.float32), "q": random.standard_normal((16, 8)).astype(np.float32)}
    tile = Split((6, 4), 1, 2)
    flats = [FlatSpec(f"t.{i}", (WeightSpec("t", (6, 2), tile=Tile(tile, i)),)) for i in range(2)]
    flats.append(FlatSpec("q", (WeightSpec("q", (16, 8), format=NF4),)))
    codes = {"q": values_of(flats[2].weights[0], encode_nf4(whole["q"])).reshape(16, 8)}
    for rule in EvenSlices(), WholeUnits(), Whole():
        layout = Layout(Mesh(dp_shard=3), flats, zero_rows(3, rule))
        pieces = [one for rank in range(3) for one in cut(layout, whole, rank, lambda _, values: encode_nf4(values))]
        found = assemble(layout, pieces, values_of)
        assert np.array_equal(found["t"], whole["t"])
        assert np.array_equal(found["q"], codes["q"])


@pytest.mark.parametrize(
    ("mesh", "edp", "ep"),
    [
        (Mesh(dp_shard=4, ep=2), (0, 2), (0, 1)),
        (Mesh(dp_shard=2, tp=2, ep=2, etp=1), (0, 2), (0, 1)),  # experts over the ranks of tp: torchtitan's
        (Mesh(dp_shard=4, tp=2, ep=2, etp=2), (0, 4), (0, 2)),  # Megatron's default: etp is tp
        (Mesh(dp_shard=2, cp=2, tp=2, ep=8, etp=1), (0,), tuple(range(8))),
        (Mesh(pp=2, dp_replicate=2, dp_shard=4, ep=4), (0,), (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_experts_are_cut_over_the_same_ranks_a_second_time(
    mesh: Mesh, edp: tuple[int, ...], ep: tuple[int, ...]
) -> None:
    assert (mesh.group(0, "edp"), mesh.group(0, "ep")) == (edp, ep)
    for rank in range(mesh.world_size):
        assert mesh.group(rank, *EXPERTS) == mesh.group(rank, *FOLDS)
        assert {mesh.group(other, "ep") for other in mesh.group(rank, "ep")} == {mesh.group(rank, "ep")}
