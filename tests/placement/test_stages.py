"""Which layers each pipeline stage holds, what a layout says of them, and command lines that cannot be cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import InputError, PlacementError
from zerosim.placement.layout import STATES, Layout, Piece
from zerosim.placement.partition import Slice
from zerosim.placement.spec import is_block
from zerosim.placement.stages import cut_layers, cut_units
from zerosim.train.plan import plan
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
    assert cut_layers(layers, chunks, **how) == expected


@pytest.mark.parametrize(
    ("layers", "chunks", "how", "said"),
    [
        (7, 4, {}, "layers 7 do not divide into 4 equal chunks: choose layers 8, or pass --stage-layers 2,2,2,1"),
        (5, 5, dict(balance_ends=True), "layers 5 and two ends do not divide into 5 equal chunks: choose layers 8"),
        (4, 2, dict(given=[4]), "expected 2 numbers that make up 4 layers, such as 2,2"),
        (4, 2, dict(given=[1, 2]), "expected 2 numbers that make up 4 layers"),
        (4, 3, dict(given=[2, 0, 2]), "a stage without layers has nothing to do; the first and the last may have none"),
        (4, 2, dict(given=[0, 4], has_ends=False, word="units"), "a stage without units has nothing to do; choose 2,2"),
    ],
)
def test_what_cannot_be_cut_is_refused(layers: int, chunks: int, how: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        cut_layers(layers, chunks, **how)


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
            for state in STATES:
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
    weights = found.assemble(whole)
    assert next(iter(weights)) == "wte.weight"
    assert sum(weight.size for weight in weights.values()) == sum(flat.numel for flat in found.flats.values())
    for at, piece in enumerate(whole):
        if piece.flat == "wte" and piece.rank >= 2:
            wrong = piece.values.copy()
            wrong[3] += 1
            with pytest.raises(
                PlacementError, match=r"rank \d and rank \d hold different values of .*wte\.weight"
            ) as bad:
                found.assemble([*whole[:at], piece._replace(values=wrong), *whole[at + 1 :]])
            assert bad.value.rank >= 2
    without = [piece for piece in whole if piece.flat != "h.3"]
    with pytest.raises(PlacementError, match=r"no rank holds element 0 of h\.3"):
        found.assemble(without)


@pytest.mark.parametrize("ranks", [6, 10, 12])
@pytest.mark.parametrize("stage", [1, 3])
def test_classes_hold_what_every_rank_shows(ranks: int, stage: int) -> None:
    """Slices are padded, differently on each stage."""
    config = RunConfig(**{**SMALL, "hidden": 10, "ranks": ranks, "stage": stage, "pp": 2, "precision": "fp32"})
    few, every = plan(config), plan(config, every_rank=True)
    assert few.memory == every.memory
    assert few.traffic == every.traffic
    assert len(few.ran) < ranks


# -- bad input ------------------------------------------------------------------------------------------
MODEL = "--layers 4 --hidden 16 --heads 2 --seq 4 --micro-batch 1 --steps 1"
FLAT_MODEL = "--model flat --params 1000 --units 4 --seq 4 --micro-batch 1 --steps 1"
BAD = [
    ("--ranks 4 --pp 3", "--pp 3 does not divide ranks 4", "--ranks 3 --pp 3 --layers 3"),
    ("--ranks 8 --pp 2 --tp 3", "tp 3 x pp 2 does not divide ranks 8: a world is", "--ranks 6 --pp 2 --tp 1"),
    ("--ranks 3 --pp 3", "choose layers 3, or pass --stage-layers 2,1,1", "--ranks 3 --pp 3 --stage-layers 2,1,1"),
    ("--ranks 3 --pp 3", "--layers 4 do not divide into 3 equal chunks", "--ranks 3 --pp 3 --layers 3"),
    ("--ranks 5 --pp 5 --layers 5 --balance-ends", "choose layers 8", "--ranks 5 --pp 5 --layers 8 --balance-ends"),
    ("--ranks 8 --pp 8", "--pp 8: more than the model's layers, 4; choose pp 4", "--ranks 8 --pp 4"),
    ("--ranks 6 --pp 6", "choose pp 2", "--ranks 6 --pp 2"),
    (
        "--ranks 2 --pp 2 --layers 3 --pipeline interleaved --accumulate 2",
        "--pp 2 x virtual_stages 2: more than the model's layers, 3; choose layers 4",
        "--ranks 2 --pp 2 --layers 4 --pipeline interleaved --accumulate 2",
    ),
    (
        "--ranks 4 --pp 4 --virtual-stages 2 --pipeline interleaved --accumulate 4",
        "choose pp 2",
        "--ranks 4 --pp 2 --virtual-stages 2 --pipeline interleaved --accumulate 4",
    ),
    (
        "--ranks 2 --pp 2 --pipeline interleaved --accumulate 5",
        "accumulate 5: an interleaved schedule wants a multiple of pp 2; choose 4",
        "--ranks 2 --pp 2 --pipeline interleaved --accumulate 4",
    ),
    ("--virtual-stages 2", "pass --pipeline interleaved too", None),
    ("--virtual-stages 2 --pipeline interleaved", "--pipeline: without pp there are no stages; pass --pp 2", None),
    ("--pipeline gpipe", "--pipeline: without pp there are no stages; pass --pp 2", None),
    ("--stage-layers 2,2", "--stage-layers: without pp there are no stages", None),
    (
        "--ranks 4 --pp 2 --stage-layers 2,2 --balance-ends",
        "--balance-ends: stage_layers says how the layers are cut",
        None,
    ),
    ("--balance-ends", "--balance-ends: without pp there are no stages", None),
    ("--ranks 2 --pp 2 --pipeline 1fb1", "'1fb1': expected one of gpipe, 1f1b, interleaved", None),
    ("--ranks 2 --pp 2 --stage-layers 1,2", "expected 2 numbers that make up 4 layers, such as 2,2", None),
    ("--ranks 2 --pp 2 --stage-layers 4", "expected 2 numbers that make up 4 layers, such as 2,2", None),
    ("--ranks 2 --pp 2 --stage-layers=-1,5", "'-1,5': expected numbers with commas", None),
    ("--ranks 2 --pp 2 --stage-layers 1.5,2.5", "expected numbers with commas, such as 3,4,4,3", None),
    ("--ranks 2 --pp 2 --stage-layers 2,²", "expected numbers with commas", None),
    ("--ranks 2 --pp 2 --stage-layers 2,,2", "expected numbers with commas", None),
    (f"--ranks 2 --pp 2 --stage-layers 2,{'9' * 5000}", "expected numbers with commas", None),
    ("--ranks 2 --pp 2 --stage-layers 999999999,2", "expected 2 numbers that make up 4 layers", None),
    ("--ranks 3 --pp 3 --stage-layers 2,0,2", "choose 2,1,1, for one", "--ranks 3 --pp 3 --stage-layers 2,1,1"),
    ("--ranks 2 --pp 0", "--pp 0: expected at least 1", None),
    ("--ranks 2 --pp two", "--pp: 'two': expected a whole number", None),
    ("--ranks 4 --pp 2 --partition owner", "a table that is tied across stages", "--ranks 4 --pp 2 --partition slices"),
]
BAD_FLAT = [
    ("--ranks 3 --pp 3", "--units 4 do not divide into 3 equal chunks: choose units 3", "--ranks 3 --pp 3 --units 3"),
    ("--ranks 2 --pp 2 --stage-layers 0,4", "a stage without units has nothing to do; choose 2,2", None),
    ("--ranks 4 --pp 2 --balance-ends", "--balance-ends: model flat has no table and no head", None),
    ("--ranks 8 --pp 8", "--pp 8: more than the model's units, 4; choose pp 4", "--ranks 8 --pp 4"),
]
CASES = [*((MODEL, *case) for case in BAD), *((FLAT_MODEL, *case) for case in BAD_FLAT)]
CASES.append(
    ("--model mlp --steps 1", "--ranks 2 --pp 2", "model mlp is not cut into stages; choose gpt, llama or flat", None)
)


@pytest.mark.parametrize(("model", "words", "said", "right"), CASES, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_line_with_a_right_choice(
    model: str, words: str, said: str, right: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *model.split(), *words.split()]) == 2
    got = capsys.readouterr()
    assert (got.out, got.err.count("\n")) == ("", 1)
    assert len(got.err) < 3000
    assert said in got.err
    if right is not None:
        assert main(["plan", "--quiet", *model.split(), *right.split()]) == 0
