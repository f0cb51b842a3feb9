"""Context parallelism in what people see: plans, searches, formulas, other frameworks' words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.analysis.checks import agree, checks
from zerosim.analysis.meshes import beside, ladders, wider
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.train.plan import plan

LONG: dict[str, Any] = dict(
    model="llama", layers=2, hidden=64, heads=8, seq=256, vocab=64, ranks=4, stage=3, attention="flash"
)
H100 = cluster_of(find_hardware("h100-80"))
WAYS: list[dict[str, Any]] = [
    dict(context="ring"), dict(context="ring", context_order="contiguous"), dict(context="allgather"),
    dict(context="ulysses"), dict(context="ulysses+ring", ranks_per_node=2),
]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["context"])
def test_the_flops_of_a_step_are_those_of_ranks_that_share_no_rows(way: dict[str, Any]) -> None:
    config = plan_config(**LONG, recompute="full")
    plain = plan(config, cluster=H100).time
    time = plan(config.replace(cp=4, accumulate=4, **way), cluster=H100).time
    assert plain is not None
    assert time is not None
    assert (time.model_flops, time.hardware_flops) == (plain.model_flops, plain.hardware_flops)


def test_zigzag_ranks_compute_as_long_and_contiguous_ones_wait() -> None:
    config = plan_config(**LONG | {"hidden": 1024, "seq": 65536}, cp=4)
    even = plan(config, cluster=H100, every_rank=True).time
    uneven = plan(config.replace(context_order="contiguous"), cluster=H100, every_rank=True).time
    assert even is not None
    assert uneven is not None
    assert even.bubble == 0
    assert uneven.bubble > 0.3 * uneven.seconds > 0.4 * even.seconds


@pytest.mark.parametrize("accumulate", [1, 3])
def test_copies_of_offloaded_states_agree(accumulate: int) -> None:
    config = plan_config(**LONG, cp=2, accumulate=accumulate, offload="optimizer=host,params=host")
    (found,) = checks(plan(config))
    assert found.copied
    assert agree(found.copied)


@pytest.mark.parametrize("more", [{}, {"tp": 2, "sequence_parallel": True}, {"recompute": "selective"}], ids=str)
def test_a_block_keeps_what_the_paper_counts(more: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Queries of a part of a row have scores with all of its keys."""
    flags = [f"--{name.replace('_', '-')} {value}".removesuffix(" True") for name, value in more.items()]
    words = "plan --layers 2 --hidden 64 --heads 8 --seq 64 --cp 2 --context ulysses --attention eager --dropout 0.1"
    page = said(capsys, *f"{words} --precision bf16 --recipe megatron --all {' '.join(flags)}".split())
    assert "(s 32 of 64, b" in page
    assert "Formula: 2205.05198" in page
    assert "This is another count" not in page


def test_waits_for_other_tokens_and_for_model_states_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where one group of ranks does both."""
    words = "plan --model llama3-8b --seq 131072 --ranks 16 --cp 16 --context allgather --gpu h100-80 --all"
    page = said(capsys, *words.split())
    assert "waits for context parallelism " in page
    assert "waits for ZeRO's collectives " in page


def test_a_plan_says_who_shares_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama3-8b --seq 131072 --ranks 64 --cp 16 --gpu h100-80"
    page = said(capsys, *words.split())
    assert "1 row of 131,072 tokens on each of 4 groups of 16 ranks that share them, 8,192 tokens of a row each" in page
    assert "context ring (zigzag)" in page
    assert "Modelled, never compared" in page
    assert "one group of 64 ranks" in said(capsys, *words.replace("--cp 16", "--cp 64").split())


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("ring", "cp: send 88bsh"),
        ("allgather", "reduces their fp32 gradients once"),
        ("ulysses", "exchanges 7/8 of q, k and v"),
    ],
)
def test_formulas_say_what_a_block_sends(way: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --model llama --layers 2 --hidden 64 --heads 8 --kv-heads 8 --seq 256 --ranks 8 --cp 8 --context"
    page = said(capsys, *words.split(), way)
    assert expected in page
    assert "A rank has s of the 8s tokens of a row" in page


def test_rows_are_shared_where_activations_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama3-8b --ranks 16 --seq 262144 --recompute full --loss chunked --gpu h100-80"
    page = said(capsys, *words.split(), code=3)
    assert "Cheapest change: --cp 2 --accumulate 2 would fit" in page


@pytest.mark.slow
def test_a_search_of_meshes_cuts_rows_no_further_than_it_must(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A batch of two rows on eight ranks shares each; of sixteen rows none is cut where one fits."""
    sizes = "--layers 4 --hidden 64 --heads 8 --seq 64 --ranks 8 --gpu h100-80"
    out = tmp_path / "found.json"
    for batch, least in ((2, 4), (16, 1)):
        said(capsys, "fit", "--find", "mesh", *sizes.split(), "--global-batch", str(batch), "--json", str(out))
        found = json.loads(out.read_text("utf-8"))["meshes"]
        assert min(mesh["cp"] * mesh["tp"] * mesh["pp"] for mesh in found) >= least
        assert all(mesh["cp"] == 1 or mesh["micro_batch"] == 1 for mesh in found)
        assert all(mesh["dp"] * mesh["micro_batch"] * mesh["accumulate"] == batch for mesh in found)


@pytest.mark.slow
def test_a_search_cuts_rows_where_one_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 2 --hidden 64 --heads 2 --seq 8192 --vocab 64 --ranks 8 --global-batch 8 --limit 8MiB"
    page = said(capsys, "fit", "--find", "mesh", *sizes.split())
    assert "--cp " in page


def test_the_longest_rows_are_what_their_ranks_divide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = "--layers 2 --hidden 64 --heads 4 --vocab 64 --ranks 6 --cp 3 --limit 4MiB"
    said(capsys, "fit", "--find", "seq", *sizes.split(), "--json", str(out))
    tried = json.loads(out.read_text("utf-8"))["tried"]
    assert all(one["value"] % 6 == 0 for one in tried)


def test_wider_keeps_the_batch() -> None:
    config = plan_config(**LONG | {"ranks": 8}, accumulate=3)
    found = list(wider(config))
    assert [one.mesh.cp for one in found] == [2, 4, 8]
    assert {one.global_batch for one in found} == {config.global_batch}
    assert list(wider(plan_config(**LONG | {"ranks": 1}))) == []


def test_a_batch_of_fewer_rows_than_ranks_shares_them() -> None:
    """Of sixteen rows none is shared at first; other ways to share them come beside the best."""
    config = RunConfig(**LONG | {"ranks": 8})
    few = [ladder[0] for ladder in ladders(config, 2, 8)]
    assert {one.global_batch for one in few} == {2}
    assert {one.mesh.cp for one in few} == {1, 2, 4}
    assert {one.data.micro_batch for one in few if one.mesh.cp > 1} == {1}
    assert {ladder[0].mesh.cp for ladder in ladders(config, 16, 8)} == {1}
    shared = next(one for one in few if one.mesh.cp == 4)
    ways = {one.context.how for one in beside(shared, 8)}
    assert ways == {"ring", "ulysses", "allgather"}
    assert len({*beside(shared, 8)}) == len(list(beside(shared, 8)))
