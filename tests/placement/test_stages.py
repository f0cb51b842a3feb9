"""Which layers each pipeline stage holds, what a layout says of them, and command lines that cannot be cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.errors import InputError, PlacementError
from zerosim.placement.assemble import Piece, assemble
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.placement.spec import is_block
from zerosim.placement.stages import Chunks, cut_layers, cut_units
from zerosim.train.run import Experiment


# -- cuts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layers", "chunks", "how", "expected"),
    [
        (8, 4, {}, [2, 2, 2, 2]),
        (6, 4, dict(balance_ends=True), [1, 2, 2, 1]),
        (2, 4, dict(balance_ends=True), [0, 1, 1, 0]),
        (8, 2, dict(balance_ends=True), [4, 4]),
        (4, 3, dict(given=[1, 2, 1]), [1, 2, 1]),
        (4, 3, dict(given=[0, 4, 0]), [0, 4, 0]),
        (4, 3, dict(given=[1, 2, 1], balance_ends=True), [1, 2, 1]),
    ],
)
def test_layers_are_cut(layers: int, chunks: int, how: dict[str, Any], expected: list[int]) -> None:
    assert cut_layers(layers, Chunks(chunks), **how) == expected


def test_llama_3s_126_layers_on_16_stages_of_8_chunks() -> None:
    """The first chunk has the table alone, the last one the head (2407.21783, section 3.3.2)."""
    config = RunConfig(model="llama3.1-405b", ranks=16, pp=16, pipeline="interleaved", virtual_stages=8, accumulate=16,
                       balance_ends=True)  # fmt: skip
    assert config.layers_by_chunk(126) == [0, *[1] * 126, 0]


def test_a_chunk_may_be_empty_but_no_stage() -> None:
    lie = Chunks(2, 3)
    assert cut_layers(4, lie, given=[0, 2, 0, 0, 2, 0]) == [0, 2, 0, 0, 2, 0]
    assert cut_layers(3, lie, given=[1, 0, 0, 0, 1, 1], has_ends=False) == [1, 0, 0, 0, 1, 1]
    assert cut_units(["wte", "h.0", "h.1", "ln_f"], [0, 2, 0, 0, 0], is_block) == [
        range(1), range(1, 3), range(3, 3), range(3, 3), range(3, 4)
    ]  # fmt: skip
    with pytest.raises(InputError, match="stage 1 without layers has nothing to do"):
        cut_layers(4, Chunks(3, 2), given=[2, 0, 1, 1, 0, 0])
    with pytest.raises(InputError, match="first chunk and the last one need layers; choose 1,1,1,0,0,1"):
        cut_layers(4, lie, given=[0, 2, 0, 0, 2, 0], has_ends=False)


@pytest.mark.parametrize("has_ends", [True, False])
@pytest.mark.parametrize(
    "lie", [Chunks(2, 2, True), Chunks(3, 2, True), Chunks(2, 3), Chunks(3, 2), Chunks(4)], ids=str
)
def test_what_is_advised_in_place_of_equal_chunks_is_a_cut(lie: Chunks, has_ends: bool) -> None:
    for layers in range(lie.stages + (-1 if has_ends else 1), 4 * lie.last):
        with pytest.raises(InputError) as caught:
            cut_layers(layers, lie, given=[layers + 1], has_ends=has_ends)
        advised = [int(number) for number in str(caught.value).rpartition("such as ")[2].split(",")]
        assert cut_layers(layers, lie, given=advised, has_ends=has_ends) == advised


def test_the_first_chunk_takes_what_stands_before_all_layers_and_the_last_what_follows() -> None:
    names = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f", "lm_head"]
    assert cut_units(names, [1, 2], is_block) == [range(3), range(3, 7)]
    assert cut_units(names, [0, 3], is_block) == [range(2), range(2, 7)]
    assert cut_units(names, [3, 0], is_block) == [range(5), range(5, 7)]


# -- a layout with stages -------------------------------------------------------------------------------
SMALL: dict[str, Any] = dict(layers=4, hidden=8, heads=2, seq=4, vocab=256, micro_batch=1, accumulate=4, steps=1)


def layout(**changes: Any) -> Layout:
    return Experiment(RunConfig(**{**SMALL, **changes})).layout


def test_each_stage_holds_its_own_and_both_ends_a_tied_table() -> None:
    tied = layout(ranks=4, pp=2, stage=3)
    assert tied.stages == [("wte", "wpe", "h.0", "h.1"), ("h.2", "h.3", "ln_f", "wte")]
    assert [tied.is_counted(stage, "wte") for stage in (0, 1)] == [True, False]
    untied = layout(ranks=4, pp=2, stage=3, tie_embeddings=False, pipeline="interleaved")
    assert untied.stages == [("wte", "wpe", "h.0", "h.2"), ("h.1", "h.3", "ln_f", "lm_head")]
    for rank in range(4):
        for name in untied.stages[rank // 2]:
            numel = untied.flats[name].numel
            assert untied.part(rank, name, "optim") == Slice(rank % 2 * numel // 2, (rank % 2 + 1) * numel // 2, numel)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [dict(pp=2), dict(pp=4, tp=2), dict(pp=2, dp_replicate=2), dict(pp=2, tp=4)], ids=str)
def test_parts_cover_every_flat_once_per_copy(mesh: dict[str, int], stage: int) -> None:
    if stage == 0:
        mesh = {**mesh, "dp_replicate": 1}
    found = layout(ranks=16, stage=stage, heads=4, **mesh)
    for where, names in enumerate(found.stages):
        ranks = [rank for rank in range(16) if found.mesh.index(rank, "pp") == where]
        for name in names:
            for state in found.rows(name):
                held = np.zeros(found.flats[name].numel, int)
                for rank in ranks:
                    part = found.part(rank, name, state)
                    held[part.start : part.stop] += 1
                assert held.min() == held.max() >= 1, (name, state)


def test_owners_are_counted_within_their_stage() -> None:
    sizes = dict(model="flat", params=600, units=6, ranks=4, pp=2, stage=2, partition="owner")
    found = Experiment(RunConfig(**sizes, seq=4, steps=1)).layout
    owners = [found.owner(name) for name in found.flats]
    assert owners == [owners[0], owners[1], owners[2]] * 2  # both stages hold units as large
    assert set(owners) == {0, 1}


def pieces(found: Layout, values: dict[str, np.ndarray]) -> list[Piece]:
    """What every rank would hold of these flats."""
    ranks = range(found.mesh.world_size)
    held = [(rank, name) for rank in ranks for name in found.stages[found.mesh.index(rank, "pp")]]
    parts = [(rank, name, found.part(rank, name, "optim")) for rank, name in held]
    return [Piece(rank, name, part, values[name][part.start : part.stop].copy()) for rank, name, part in parts]


@pytest.mark.parametrize("stage", [0, 3])
def test_pieces_of_all_stages_are_put_together(stage: int) -> None:
    found = layout(ranks=4, pp=2, stage=stage)
    values = {name: np.arange(flat.numel, dtype=np.float32) for name, flat in found.flats.items()}
    whole = pieces(found, values)
    weights = assemble(found, whole)
    assert next(iter(weights)) == "wte.weight"
    assert sum(weight.size for weight in weights.values()) == sum(flat.numel for flat in found.flats.values())
    for at, piece in enumerate(whole):
        if piece.flat == "wte" and piece.rank >= 2:
            wrong = piece.values.copy()
            wrong[3] += 1
            with pytest.raises(
                PlacementError, match=r"rank \d and rank \d hold different values of .*wte\.weight"
            ) as bad:
                assemble(found, [*whole[:at], piece._replace(values=wrong), *whole[at + 1 :]])
            assert bad.value.rank >= 2
    without = [piece for piece in whole if piece.flat != "h.3"]
    with pytest.raises(PlacementError, match=r"no rank holds element 0 of h\.3"):
        assemble(found, without)
