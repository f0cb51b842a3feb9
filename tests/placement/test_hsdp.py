"""Hybrid sharding: replicas that each divide the model states. Which runs are equal to the bit, and what is sent.

f = dp_shard ranks hold one of r = dp_replicate copies together; a mesh is written r x f.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from poisoned import poisoned
from same import assert_close, assert_same_bits
from test_schedule import run_with
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.errors import NonFiniteGradient
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=2, steps=3, ranks=4)
ZERO = [(stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner")]


def small(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, "dp_replicate": 2, **changes})


def trained(**changes: Any) -> RunResult:
    return run(small(**changes))


# -- weights --------------------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(
    "options",
    [
        dict(precision="fp64", dropout=0.1),
        dict(precision="fp32", clip_norm=0.5, dropout=0.1),
        dict(precision="bf16", clip_norm=0.5),
        dict(precision="fp16", initial_scale_power=18, hysteresis=1),
        dict(precision="fp32", ranks=6, hidden=10),  # 3 divides few units: slices are padded
    ],
    ids=str,
)
def test_stages_and_partitions_of_one_mesh_are_equal_to_the_bit(options: dict[str, Any]) -> None:
    first, *others = [trained(stage=stage, partition=partition, **options) for stage, partition in ZERO]
    if options["precision"] == "fp16":  # of both kinds: steps that overflowed, and steps that did not
        assert {step.skipped for step in first.steps} == {True, False}
    if "clip_norm" in options:
        assert any(step.grad_norm > options["clip_norm"] for step in first.steps)
    for other in others:
        assert_same_bits(other, first)
        assert repr(other.steps) == repr(first.steps)  # the norm of a skipped step may be nan
        assert other.live_bytes_after == [0] * other.config.mesh.ranks


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(("precision", "accumulate"), [("bf16", 2), ("fp32", 1), ("fp16", 2)])
def test_as_many_replicas_as_ranks_are_ddp(precision: str, accumulate: int) -> None:
    options = dict(precision=precision, accumulate=accumulate, dropout=0.1, steps=2)
    ddp = trained(stage=0, dp_replicate=1, **options)
    for stage in (1, 2, 3):
        assert_same_bits(trained(stage=stage, dp_replicate=4, **options), ddp)


def test_as_many_replicas_as_ranks_clip_as_ddp_does() -> None:
    """The norm's squares are added by slices, of which DDP has N and one replica alone has one: close, not equal."""
    options = dict(precision="fp64", clip_norm=0.5)
    ddp = trained(stage=0, dp_replicate=1, **options)
    assert all(step.grad_norm > 0.5 for step in ddp.steps)
    for stage in (1, 2, 3):
        assert_close(trained(stage=stage, dp_replicate=4, **options), ddp, tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_replicas_train_what_one_group_trains(ranks: int) -> None:
    """The same rows in the same places: sums in another order, so rounding apart."""
    one = trained(stage=3, ranks=ranks, dp_replicate=1, precision="fp64")
    assert_close(trained(stage=3, ranks=ranks, precision="fp64"), one, tolerance=1e-12)


# -- bytes ----------------------------------------------------------------------------------------------
def sent(result: RunResult, rank: int, axis: str, purpose: str = "states") -> int:
    """Bytes of the last step."""
    last = len(result.steps) - 1
    rows = [row for row in result.traffic[rank] if (row.step, row.axis, row.purpose) == (last, axis, purpose)]
    return sum(row.wire_bytes for row in rows)


FLAT: dict[str, Any] = dict(model="flat", params=1536, units=4, vocab=256, seq=8, micro_batch=2, steps=2)


def assert_checks_agree(result: RunResult) -> None:
    for check in checks(result)[0].states:
        assert check.agrees, check
    for sum_ in checks(result, len(result.steps) - 1)[0].sent:
        assert sum_.agrees, sum_


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_micro_batch_may_cross_replicas(stage: int) -> None:
    axes: dict[str, Any] = dict(ranks=4, dp_replicate=2, replica_reduction="micro_batch")
    result = run(RunConfig(**FLAT, **axes, stage=stage, precision="bf16", accumulate=3))
    times = 1 if stage == 1 else 3
    assert sent(result, 0, "dp_replicate") == times * 2 * 1536 // 2 * 2 // 2
    assert_checks_agree(result)


@pytest.mark.parametrize(("ranks", "r"), [(6, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize(("stage", "partition"), ZERO)
def test_checks_agree_where_nothing_divides(stage: int, partition: str, ranks: int, r: int) -> None:
    """Padded slices, parts of which replicas add unlike shares, and owners."""
    options = dict(stage=stage, partition=partition, ranks=ranks, dp_replicate=r, hidden=10, vocab=257, steps=1)
    result = plan(small(**options, accumulate=2, replica_reduction="micro_batch"))
    if partition == "slices" and (ranks, r) == (6, 3):
        assert len({sent(result, rank, "dp_replicate") for rank in range(ranks)}) > 1
    assert_checks_agree(result)


# -- shapes ---------------------------------------------------------------------------------------------
MORE: list[dict[str, Any]] = [
    dict(stage=1, precision="bf16"),
    dict(stage=2, precision="fp32", accumulate=2, replica_reduction="micro_batch"),
    dict(stage=3, precision="bf16", accumulate=2, clip_norm=0.5),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize(("partition", "collective"), [("slices", "direct"), ("slices", "ring"), ("owner", "direct")])
def test_shapes_leave_the_record_of_a_real_run(partition: str, collective: str, more: dict[str, Any]) -> None:
    """3 ranks to a shard: padding."""
    sizes = dict(ranks=6, hidden=10, seq=5, micro_batch=1, steps=1)
    assert_same_record(small(partition=partition, collective=collective, **sizes, **more))


def test_owners_of_other_units_reduce_unevenly_too() -> None:
    """Rank 0's own unit divides by 3 replicas, that of the other place in its shard group does not."""
    config = RunConfig(model="flat", params=11, units=2, ranks=6, dp_replicate=3, partition="owner", stage=2)
    few, every = plan(config), plan(config, every_rank=True)
    assert few.traffic == every.traffic
    assert few.memory == every.memory
    assert len(few.ran) > 2


def test_replicas_of_even_parts_are_one_class() -> None:
    assert plan(RunConfig(**FLAT, ranks=8, dp_replicate=2)).ran == [0]


# -- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kind"), [(1, Zero1), (2, Zero2), (3, Zero3)])
def test_a_bad_gradient_is_blamed_on_its_rank_among_all(stage: int, kind: type[Strategy]) -> None:
    """It is averaged into other ranks' parts in both replicas before anyone looks."""
    with pytest.raises(NonFiniteGradient, match=r"rank 3's gradient of h\.1 is not finite at step 1:") as raised:
        run_with(poisoned(kind, 3, "h.1"), **SMALL, stage=stage, dp_replicate=2)
    assert raised.value.rank == 3


# -- the command line -----------------------------------------------------------------------------------
MODEL = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--micro-batch", "1"]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """say("plan --ranks 4"): exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def say(words: str, *more: str) -> tuple[int, str, str]:
        code = main([*words.split(), *more])
        said = capsys.readouterr()
        return code, said.out, said.err

    return say


def test_explain_puts_both_sizes_in(say: Say) -> None:
    """7.5B on 8 replicas of 8: 16 Psi / 8, and 3 Psi 7/8 inside, 2 Psi/8 7/8 across, two bytes each."""
    code, out, _ = say("explain --stage 3 --params 7.5B --ranks 64 --dp-replicate 8")
    assert code == 0
    for figure in ("15,000,000,000", "13,125,000,000", "26,250,000,000", "3,281,250,000", "42,656,250,000"):
        assert figure in out
    assert "3Ψ + 2Ψ/N" in out


@pytest.mark.slow
def test_compare_says_which_stages_are_equal(say: Say) -> None:
    words = "compare --stages 0,1,2,3 --ranks 4 --dp-replicate 2 --steps 2"
    code, out, _ = say(words, *MODEL, "--json", "compare.json")
    assert code == 0
    assert "Final weights of stages 1, 2 and 3: bit-identical" in out
    assert "Final weights of stages 0 and 1: largest difference" in out
    assert "Stage 0 adds over all ranks at once" in out
    code, out, _ = say(words, *MODEL, "--accumulate", "2")
    assert code == 0
    assert "Final weights of stages 2 and 3: bit-identical" in out
    assert "With --accumulate 1 stages 1, 2 and 3 agree." in " ".join(out.split())


def test_plans_json_tells_ranks_by_their_place(say: Say) -> None:
    code, out, _ = say("plan --ranks 6 --dp-replicate 3 --quiet --json -", *MODEL)
    values = json.loads(out)
    assert (code, values["schema"]) == (0, 2)
    assert values["mesh"] == {"pp": 1, "dp_replicate": 3, "dp_shard": 2, "cp": 1, "tp": 1}
    assert sum(rank["stands_for"] for rank in values["ranks"]) == 6
    for rank in values["ranks"]:
        place = rank["coordinates"]
        assert 2 * place["dp_replicate"] + place["dp_shard"] == rank["rank"]
        assert {row["axis"] for row in rank["traffic"]} == {"dp_shard", "dp_replicate"}


@pytest.mark.slow
def test_pictures_say_how_many_replicas_there_are(tmp_path: Path) -> None:
    """Stage 0 beside them has none; where no numbers of ranks are given, those that the replicas divide are drawn."""
    for figure in ("memory", "traffic", "scaling"):
        words = f"plot {figure} --model flat --params 1M --dp-replicate 8 -o {tmp_path}/{figure}.svg"
        assert main([*words.split(), *(["--ranks", "64"] if figure != "scaling" else [])]) == 0
        text = (tmp_path / f"{figure}.svg").read_text("utf-8")
        ranks = "16 to 1,024" if figure == "scaling" else "64"
        assert f"Ψ = 1.00M parameters on {ranks} ranks, dp_replicate 8 x dp_shard" in text
