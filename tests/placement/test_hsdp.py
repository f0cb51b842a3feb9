"""Hybrid sharding: replicas that each divide the model states. Which runs are equal to the bit, and what is sent.

f = dp_shard ranks hold one of r = dp_replicate copies together; a mesh is written r x f.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_schedule import run_with
from test_shapes import assert_same_record

from zerosim.analysis.compare import check_states
from zerosim.analysis.traffic import check_traffic
from zerosim.cli.main import main
from zerosim.comm.collectives import Comm
from zerosim.comm.runtime import launch
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.errors import InputError, NonFiniteGradient, PlacementError
from zerosim.ledger.ranks import RankLedgers
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.owner import OwnerZero2
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero3 import Zero3
from zerosim.stepper import debug
from zerosim.train.build import world_of
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=2, steps=3, ranks=4)
ZERO = [(stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner")]


def small(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, "dp_replicate": 2, **changes})


def trained(**changes: Any) -> RunResult:
    return run(small(**changes))


def assert_same_bits(result: RunResult, expected: RunResult) -> None:
    assert result.losses == expected.losses
    assert result.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        np.testing.assert_array_equal(result.weights[name], values, err_msg=name)


def assert_close(result: RunResult, expected: RunResult, tolerance: float) -> None:
    """Losses and weights, but for key biases.

    Softmax does not see a constant added to all scores of a query: the true gradient of a key bias is 0. What is
    computed is rounding, and Adam, which divides a gradient by its own size, makes whole steps of its sign.
    """
    np.testing.assert_allclose(result.losses, expected.losses, rtol=tolerance, atol=0)
    assert result.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        seen = np.ones(values.shape, bool)
        if name.endswith("attn.c_attn.bias"):
            width = len(values) // 3
            seen[width : 2 * width] = False
        np.testing.assert_allclose(
            result.weights[name][seen], values[seen], rtol=tolerance, atol=tolerance, err_msg=name
        )


# -- weights --------------------------------------------------------------------------------------------
@pytest.mark.quick(2)
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("recipe", ["deepspeed", "fsdp2", "megatron"])
def test_recipes_change_no_bit_of_a_mesh(recipe: str) -> None:
    """In fp32, where gradients have one format in all of them."""
    paper = trained(stage=3, precision="fp32", steps=2)
    for stage in (1, 2, 3):
        assert_same_bits(trained(stage=stage, recipe=recipe, precision="fp32", steps=2), paper)


@pytest.mark.slow
@pytest.mark.bits
def test_accumulation_pairs_stages_2_and_3() -> None:
    """Stage 1 adds over micro-batches and then over ranks, 2 and 3 the other way round."""
    results = {
        (stage, partition): trained(stage=stage, partition=partition, accumulate=2, clip_norm=0.5, steps=2)
        for stage, partition in ZERO
    }
    for partition in ("slices", "owner"):
        assert_same_bits(results[3, partition], results[2, "slices"])
        assert_same_bits(results[2, partition], results[2, "slices"])
        assert_same_bits(results[1, partition], results[1, "slices"])
    exact = [trained(stage=stage, accumulate=2, precision="fp64") for stage in (1, 2)]
    assert_close(*exact, tolerance=1e-12)


@pytest.mark.slow
def test_replicas_may_be_averaged_in_each_micro_batch() -> None:
    early: dict[str, Any] = dict(replica_reduction="micro_batch", accumulate=2, steps=2)
    second = trained(stage=2, **early)
    assert_same_bits(trained(stage=3, **early), second)
    assert_same_bits(trained(stage=3, partition="owner", **early), second)
    assert_same_bits(
        trained(stage=1, **early), trained(stage=1, accumulate=2, steps=2)
    )  # stage 1 has one reduction a step
    exact = [
        trained(stage=3, **{**early, "precision": "fp64", "replica_reduction": when})
        for when in ("step", "micro_batch")
    ]
    assert_close(*exact, tolerance=1e-12)
    for stage in (2, 3):
        assert_same_bits(trained(stage=stage, replica_reduction="micro_batch", steps=2), trained(stage=stage, steps=2))


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


@pytest.mark.parametrize("ranks", [4, 8])
def test_replicas_train_what_one_group_trains(ranks: int) -> None:
    """The same rows in the same places: sums in another order, so rounding apart."""
    one = trained(stage=3, ranks=ranks, dp_replicate=1, precision="fp64")
    assert_close(trained(stage=3, ranks=ranks, precision="fp64"), one, tolerance=1e-12)


def test_rings_are_close_and_replicas_stay_equal() -> None:
    """A ring's all_reduce leaves the same bits on all of its members: else the copies would drift apart."""
    ring = trained(stage=3, ranks=6, dp_replicate=3, collective="ring", precision="fp64")
    assert_close(ring, trained(stage=3, ranks=6, dp_replicate=3, precision="fp64"), tolerance=1e-12)


# -- bytes ----------------------------------------------------------------------------------------------
def sent(result: RunResult, rank: int, axis: str, purpose: str = "states") -> int:
    """Bytes of the last step."""
    last = len(result.steps) - 1
    rows = [row for row in result.traffic[rank] if (row.step, row.axis, row.purpose) == (last, axis, purpose)]
    return sum(row.wire_bytes for row in rows)


FLAT: dict[str, Any] = dict(model="flat", params=1536, units=4, vocab=256, seq=8, micro_batch=2, steps=2)
GPT: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=2, steps=2)
MESHES = [(2, 2), (2, 4), (4, 2)]
"""(r, f). Their product divides every unit of FLAT and GPT: nothing is padded, and all shares are alike."""


@cache
def on_mesh(r: int, f: int, stage: int, kind: str, **more: Any) -> RunResult:
    sizes = FLAT if kind == "flat" else {**GPT, "tie_embeddings": kind == "tied"}
    return run(RunConfig(ranks=r * f, dp_replicate=r, stage=stage, precision="bf16", **sizes, **more))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "tied", "untied"])
@pytest.mark.parametrize(("r", "f"), MESHES)
def test_traffic_by_axis_is_that_of_the_formulas(r: int, f: int, kind: str) -> None:
    item = 2  # bytes of a gradient and of a parameter
    for stage in (1, 2, 3):
        result = on_mesh(r, f, stage, kind)
        psi, table = result.num_parameters, 256 * 16 if kind == "tied" else 0
        inside = 2 * psi if stage < 3 else 3 * psi + 2 * table
        for rank in range(r * f):
            assert sent(result, rank, "dp_shard") * f == inside * (f - 1) * item
            assert sent(result, rank, "dp_replicate") * f * r == 2 * psi * (r - 1) * item
            assert sent(result, rank, "dp_replicate", "control") == 0  # the norm is the same in every replica
            assert {row.axis for row in result.traffic[rank]} == {"dp_shard", "dp_replicate"}
            held = result.memory[rank].model_states()
            assert held["param"] * (f if stage == 3 else 1) == 2 * psi
            assert held["grad"] * (f if stage >= 2 else 1) == 2 * psi
            assert held["optim"] * f == 12 * psi
        assert_checks_agree(result)


def assert_checks_agree(result: RunResult) -> None:
    for check in check_states(result):
        assert check.agrees, check
    for sum_ in check_traffic(result, len(result.steps) - 1):
        assert sum_.agrees, sum_


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_micro_batch_may_cross_replicas(stage: int) -> None:
    result = on_mesh(2, 2, stage, "flat", accumulate=3, replica_reduction="micro_batch")
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize(("partition", "collective"), [("slices", "direct"), ("slices", "ring"), ("owner", "direct")])
def test_shapes_leave_the_record_of_a_real_run(partition: str, collective: str, more: dict[str, Any]) -> None:
    """3 ranks to a shard: padding."""
    sizes = dict(ranks=6, hidden=10, seq=5, micro_batch=1, steps=1)
    assert_same_record(small(partition=partition, collective=collective, **sizes, **more))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["direct", "ring"])
@pytest.mark.parametrize(("ranks", "r"), [(6, 2), (6, 3), (8, 2), (12, 2), (12, 3)])
@pytest.mark.parametrize(("stage", "partition"), ZERO)
def test_classes_hold_what_every_rank_shows(stage: int, partition: str, ranks: int, r: int, collective: str) -> None:
    """Units smaller than N among them, and none that N divides."""
    config = RunConfig(stage=stage, partition=partition, ranks=ranks, dp_replicate=r, layers=2, hidden=5, heads=1)
    config = replace(config, vocab=17, seq=3, positions=3, micro_batch=1, steps=1, collective=collective)
    few, every = plan(config), plan(config, every_rank=True)
    assert few.memory == every.memory
    assert few.traffic == every.traffic
    assert every.ran == list(range(ranks))


def test_owners_of_other_units_reduce_unevenly_too() -> None:
    """Rank 0's own unit divides by 3 replicas, that of the other place in its shard group does not."""
    config = RunConfig(model="flat", params=11, units=2, ranks=6, dp_replicate=3, partition="owner", stage=2)
    few, every = plan(config), plan(config, every_rank=True)
    assert few.traffic == every.traffic
    assert few.memory == every.memory
    assert len(few.ran) > 2


def test_replicas_of_even_parts_are_one_class() -> None:
    assert plan(RunConfig(**FLAT, ranks=8, dp_replicate=2)).ran == [0]


# -- the stepper ----------------------------------------------------------------------------------------
def test_a_stepped_world_leaves_what_the_run_leaves() -> None:
    config = small(stage=3, steps=2, micro_batch=1, clip_norm=0.5)
    expected = run(config)
    with debug(config) as world:
        assert [view.place for view in world.ranks] == [
            "dp_replicate 0, dp_shard 0",
            "dp_replicate 0, dp_shard 1",
            "dp_replicate 1, dp_shard 0",
            "dp_replicate 1, dp_shard 1",
        ]
        world.next(count=40)
        world.until("all_reduce", rank=2, phase="backward")
        result = world.finish()
    assert_same_bits(result, expected)
    assert result.memory == expected.memory
    assert result.traffic == expected.traffic


# -- what goes wrong ------------------------------------------------------------------------------------
class Poisoning(Strategy):
    """Rank 3's gradient of h.1 has one nan at step 1."""

    def post_backward(self, unit: Unit) -> None:
        if (self.device.rank, unit.name, self.device.where.step) == (3, "h.1", 1):
            assert unit.flat.grad is not None
            unit.flat.grad.array[7] = np.nan
        super().post_backward(unit)


class Poisoned1(Poisoning, Zero1): ...


class Poisoned2(Poisoning, OwnerZero2): ...


class Poisoned3(Poisoning, Zero3): ...


@pytest.mark.parametrize(("stage", "kind"), [(1, Poisoned1), (2, Poisoned2), (3, Poisoned3)])
def test_a_bad_gradient_is_blamed_on_its_rank_among_all(stage: int, kind: type[Strategy]) -> None:
    """It is averaged into other ranks' parts in both replicas before anyone looks."""
    partition = "owner" if kind is Poisoned2 else "slices"
    with pytest.raises(NonFiniteGradient, match=r"rank 3's gradient of h\.1 is not finite at step 1:") as raised:
        run_with(kind, **SMALL, stage=stage, partition=partition, dp_replicate=2)
    assert raised.value.rank == 3


def pairs(comm: Comm, device: Device, updater: Updater) -> Strategy:
    """Hybrid sharding that forgets its replicas: two groups of ZeRO-3, each on its own rows."""
    first = 2 * (comm.rank // 2)
    return Zero3(comm.subgroup([first, first + 1]), device, updater)


def test_groups_that_train_apart_are_found() -> None:
    with pytest.raises(
        PlacementError, match=r"rank 2 and rank 0 hold different values of element \d+ of wte\.weight"
    ) as raised:
        run_with(pairs, **SMALL, stage=3)  # type: ignore[arg-type]
    assert raised.value.rank == 2


def test_one_copy_of_each_part_is_enough_and_none_is_not() -> None:
    experiment, ledgers = Experiment(small(stage=3)), [RankLedgers(rank) for rank in range(4)]
    outcomes = launch(experiment.train_rank, world_of(experiment.config), lambda rank: ledgers[rank].readers)
    whole = experiment.result(outcomes, ledgers)
    without = [replace(outcome, pieces=[]) if rank == 1 else outcome for rank, outcome in enumerate(outcomes)]
    assert_same_bits(experiment.result(without, ledgers), whole)  # rank 3 holds what rank 1 does
    without[3] = replace(outcomes[3], pieces=[])
    with pytest.raises(PlacementError, match=r"no rank holds element \d+ of wte\.weight"):
        experiment.result(without, ledgers)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(ranks=4, dp_replicate=3), "dp_replicate 3 does not divide ranks 4"),
        (dict(ranks=4, dp_replicate=8), "dp_replicate 8 does not divide ranks 4"),
        (dict(ranks=4, dp_replicate=0), "dp_replicate 0: expected at least 1"),
        (dict(ranks=4, dp_replicate=-2), "dp_replicate -2: expected at least 1"),
        (dict(ranks=4, dp_replicate=2.0), "dp_replicate 2.0: expected int"),
        (dict(ranks=4, dp_replicate=2, stage=0), "plain data parallelism"),
        (dict(ranks=4, dp_replicate=2, replica_reduction="never"), "expected one of step, micro_batch"),
    ],
    ids=str,
)
def test_what_is_no_mesh_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        RunConfig(**fields)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --ranks 4 --dp-replicate 3", "--dp-replicate 3 does not divide ranks 4"),
        ("run --ranks 4 --dp-replicate 0", "--dp-replicate 0: expected at least 1"),
        ("run --ranks 4 --dp-replicate 2 --stage 0", "plain data parallelism"),
        ("run --ranks 4 --dp-replicate two", "--dp-replicate: 'two': expected a whole number"),
        ("run mesh.toml", "unknown key 'dp_replicat'; did you mean 'dp_replicate'?"),
        ("run three.toml", "scenario three.toml: dp_replicate 3 does not divide ranks 4"),
        ("plan --ranks 4 --dp-replicate 3", "--dp-replicate 3 does not divide ranks 4"),
        ("compare --ranks 4 --dp-replicate 3", "--dp-replicate 3 does not divide ranks 4"),
        ("fit --find ranks --dp-replicate 0 --limit 1MB", "--dp-replicate 0: expected at least 1"),
        ("fit --find ranks --dp-replicate 2 --stage 0 --limit 1MB", "plain data parallelism"),
    ],
)
def test_a_bad_mesh_is_one_line_and_exit_2(say: Say, words: str, said: str) -> None:
    Path("mesh.toml").write_text("ranks = 4\ndp_replicat = 2\n", "utf-8")
    Path("three.toml").write_text("ranks = 4\ndp_replicate = 3\n", "utf-8")
    code, out, err = say(words, *MODEL)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 64 --stage 3 --dp-replicate 3", "--dp-replicate 3 does not divide --ranks 64"),
        ("--ranks 64 --stage 3 --dp-replicate 0", "--dp-replicate 0: expected at least 1"),
        ("--ranks 64 --stage 0 --dp-replicate 2", "plain data parallelism"),
    ],
)
def test_explain_refuses_the_same(say: Say, words: str, said: str) -> None:
    code, out, err = say(f"explain --params 7.5B {words}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_explain_puts_both_sizes_in(say: Say) -> None:
    """7.5B on 8 replicas of 8: 16 Psi / 8, and 3 Psi 7/8 inside, 2 Psi/8 7/8 across, two bytes each."""
    code, out, _ = say("explain --stage 3 --params 7.5B --ranks 64 --dp-replicate 8")
    assert code == 0
    for figure in ("15,000,000,000", "13,125,000,000", "26,250,000,000", "3,281,250,000", "42,656,250,000"):
        assert figure in out
    assert "3Ψ + 2Ψ/N" in out


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


def test_fit_tries_what_replicas_divide(say: Say) -> None:
    for r in (2, 3):  # 3 does not divide the 4 ranks that a run has by default
        code, out, _ = say(f"fit --find ranks --dp-replicate {r} --limit 100KB --json -", *MODEL, "--quiet")
        values = json.loads(out)
        assert code == 0
        assert all(tried["value"] % r == 0 for tried in values["tried"])
        assert (values["best"]["value"], values["beyond"]["value"]) == (2 * r, r)
        assert values["best"]["peak_bytes"] <= 100_000 < values["beyond"]["peak_bytes"]
    code, out, _ = say("fit --find ranks --dp-replicate 2 --limit 1MB", *MODEL)
    assert code == 0
    assert "One rank per replica is enough." in out


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
        assert "N = 64 data-parallel ranks in 8 replicas" in text or figure == "scaling"
