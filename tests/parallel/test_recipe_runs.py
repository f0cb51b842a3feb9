"""What frameworks do otherwise than the paper: the same weights to the bit, other bytes and volumes."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from same import assert_same_weights

from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import BytesPerParameter, after_step_states, total
from zerosim.config import RunConfig
from zerosim.device.events import Alloc
from zerosim.stepper import debug
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, steps=2, micro_batch=1, ranks=4)


def small(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, **changes})


CHOICES = [
    *(dict(stage=stage, grad_reduction="all_reduce") for stage in (1, 2)),
    *(dict(stage=stage, upcast_grads=True) for stage in (0, 1, 2, 3)),
    *(dict(stage=stage, upcast_grads=True, partition="owner") for stage in (1, 2, 3)),
    *(dict(stage=stage, upcast_grads=True, keep_upcast=True) for stage in (1, 3)),
    *(dict(stage=stage, persistent_grads=True, param_dtype_grads=True, tie_embeddings=False) for stage in (0, 1, 2, 3)),
    dict(stage=1, persistent_grads=True, reduce_bucket=600, tie_embeddings=False),
    dict(stage=1, own_grads_only=True),
    dict(stage=3, keep_root_units=True),
    dict(stage=3, keep_root_units=True, keep_last_unit=True, tie_embeddings=False),
    dict(stage=3, persistent_numel=1000),
    dict(stage=3, persistent_numel=10**9),
    dict(stage=3, persistent_numel=1000, partition="owner", cast_shards=True),
    dict(stage=3, cast_shards=True),
    dict(stage=3, cast_shards=True, partition="owner"),
    dict(stage=3, cast_shards=True, precision="fp32"),
    dict(stage=3, keep_root_units=True, persistent_numel=1000, cast_shards=True, upcast_grads=True, dropout=0.1),
]


@cache
def trained_by_ddp(config: RunConfig) -> RunResult:
    return run(config)


@pytest.mark.quick(2)
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_no_choice_changes_a_bit(choice: dict[str, Any], ranks: int) -> None:
    paper = {key: value for key, value in choice.items() if key in ("precision", "dropout", "tie_embeddings")}
    result = run(small(**choice, ranks=ranks))
    assert_same_weights(trained_by_ddp(small(stage=0, ranks=ranks, **paper)), result)
    assert result.live_bytes_after == [0] * ranks
    assert all(state.agrees for state in checks(result)[0].states)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("recipe", "precision"),
    [("deepspeed", "fp16"), ("fsdp2", "bf16"), ("megatron", "bf16"), ("megatron", "fp16"), ("megatron", "fp64")],
)
def test_stages_of_one_recipe_agree_to_the_bit(recipe: str, precision: str) -> None:
    """With gradients of one format, which the recipe fixes for every stage."""
    settings = dict(recipe=recipe, precision=precision, accumulate=2, dropout=0.1)
    one, zero, three, two = [run(small(stage=stage, **settings)) for stage in (1, 0, 3, 2)]
    assert_same_weights(zero, one)
    assert_same_weights(two, three)
    assert one.live_bytes_after == three.live_bytes_after == [0] * 4


@pytest.mark.slow
def test_a_buffer_that_persists_changes_no_bit() -> None:
    """In fp64 all that is left of recipe megatron is its buffer, to which every weight's gradient is added."""
    for stage in (0, 1, 2, 3):
        # (A tied table is added to the sum at each of its uses, and not their sum at once.)
        settings = dict(stage=stage, precision="fp64", dropout=0.1, clip_norm=1.0, accumulate=3, tie_embeddings=False)
        assert_same_weights(run(small(**settings)), run(small(**settings, recipe="megatron")))


def states(result: RunResult, mark: str) -> Fraction:
    """Model states per parameter at a mark, padding taken off; all ranks hold as much."""
    snapshot = result.memory[0].marks[mark]
    held = sum(snapshot.by_kind.get(kind, 0) - snapshot.padding.get(kind, 0) for kind in ("param", "grad", "optim"))
    return Fraction(held, result.num_parameters)


N = 4


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("recipe", "stage", "mark", "expected"),
    [
        ("paper", 2, "end_of_backward", 2 + Fraction(14, N)),
        ("deepspeed", 2, "gradients_upcast", 2 + Fraction(18, N)),  # DeepSpeed's estimator
        ("deepspeed", 3, "gradients_upcast", Fraction(20, N)),  # its estimator's 18 leaves out one of two gradients
        ("deepspeed", 2, "end_of_backward", 2 + Fraction(14, N)),
        ("deepspeed", 1, "end_of_backward", 2 + Fraction(14, N)),  # out of its buffer it keeps its slice
        ("deepspeed", 1, "gradients_upcast", 2 + Fraction(18, N)),  # all but the own slice is gone by then
        ("deepspeed", 1, "after_step", 2 + Fraction(12, N)),
        ("deepspeed", 3, "after_init", Fraction(8, N)),  # the first step makes the states
        ("deepspeed", 3, "after_step", Fraction(16, N)),
        ("deepspeed", 0, "after_step", Fraction(14)),
        ("megatron", 0, "end_of_backward", Fraction(18)),
        ("megatron", 0, "after_init", Fraction(18)),
        ("megatron", 1, "end_of_backward", 6 + Fraction(12, N)),
        ("megatron", 1, "after_init", 6 + Fraction(12, N)),
        ("megatron", 1, "after_step", 6 + Fraction(12, N)),
        ("fsdp2", 3, "end_of_backward", Fraction(16, N)),  # 4 + 4 + 8: the master is the shard
        ("fsdp2", 3, "after_step", Fraction(12, N)),
    ],
)
def test_bytes_per_parameter_of_a_recipe(recipe: str, stage: int, mark: str, expected: Fraction) -> None:
    # No unit is so small that stage 3 of DeepSpeed keeps it.
    result = run(small(recipe=recipe, stage=stage, ranks=N, persistent_numel=0))
    assert states(result, mark) == expected
    if mark == "after_step":
        config = result.config
        grad = 4 if config.precision.grad_dtype == "fp32" else 2
        cost, lasts = BytesPerParameter(0 if config.gathering.cast_shards else 2, grad, 12), config.grads.lasts
        forms = after_step_states(stage, cost, persistent_grads=lasts)
        assert total(forms.values()).at(Ψ=1, N=N) == expected


@pytest.mark.parametrize("partition", ["slices", "owner"])
def test_stage_1_of_deepspeed_holds_its_own_gradients_only_when_backward_ends(partition: str) -> None:
    """Without a buffer too; under whole units also a rank that owns none lets go of them. Weights are the paper's."""
    result = run(small(recipe="deepspeed", stage=1, partition=partition, reduce_bucket=0, clip_norm=0))
    assert all(check.agrees for check in checks(result)[0].states)
    assert sum(check.mean for check in checks(result)[0].states if check.name == "grad") == 2 * Fraction(
        result.num_parameters, result.config.mesh.ranks
    )
    assert_same_weights(result, run(small(stage=1)))


@pytest.mark.parametrize(("stage", "expected"), [(0, Fraction(20)), (1, 4 + Fraction(16, N))])
def test_megatron_in_fp16_keeps_an_fp32_slice_from_step_to_step(stage: int, expected: Fraction) -> None:
    result = run(small(recipe="megatron", stage=stage, precision="fp16", initial_scale_power=8))
    assert not any(report.skipped for report in result.steps)
    assert states(result, "after_step") == expected
    assert states(result, "end_of_backward") == expected - Fraction(4, N if stage else 1)


@pytest.mark.quick(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("recipe", "precision"), [("megatron", "bf16"), ("fsdp2", "bf16"), ("deepspeed", "fp16")])
def test_gradients_are_made_in_the_parameters_format(recipe: str, precision: str, stage: int) -> None:
    """Two bytes for each element of what backward makes, though it is kept and sent in four."""
    unfused = {"gradient_accumulation_fusion": False} if recipe == "megatron" else {}  # Transformer Engine's: a dummy
    result = run(small(recipe=recipe, stage=stage, precision=precision, steps=1, **unfused), keep_events=True)
    made = [
        e for e in result.events[0] if isinstance(e, Alloc) and e.kind == "unsharded_grad" and e.scope.block == "h.0"
    ]
    numels = [unit.numel for unit in result.units if unit.name.startswith("h.0")]  # by module one for each tensor
    numel = sum(numels)
    largest = 4 * 16 * 16
    if recipe == "megatron" and stage < 2:
        assert max(event.nbytes for event in made) == 2 * largest  # one weight at a time
    elif recipe == "deepspeed" and stage < 2:
        assert made == []  # kept in the format in which it is made, whole
    elif recipe == "fsdp2" and stage < 2:
        assert [event.nbytes for event in made] == [2 * numel]  # the cast copy is what is kept
    elif recipe == "deepspeed":
        assert sorted(event.nbytes for event in made) == sorted(2 * each for each in numels)
    else:
        assert [event.nbytes for event in made] == [2 * numel, 4 * numel]


def sent(result: RunResult) -> Fraction:
    """Elements of Psi that one rank sent in the last step, before the factor (N-1)/N."""
    return Fraction(result.sent_bytes(0, 1), 2 * result.num_parameters) * Fraction(N, N - 1)


def test_an_all_reduce_where_a_reduce_scatter_is_enough_sends_three_psi() -> None:
    assert sent(run(small(stage=1))) == sent(run(small(stage=2))) == 2
    assert sent(run(small(stage=1, grad_reduction="all_reduce"))) == 3
    assert sent(run(small(stage=2, grad_reduction="all_reduce"))) == 3
    twice = dict(accumulate=2)
    assert sent(run(small(stage=1, grad_reduction="all_reduce", **twice))) == 3
    assert sent(run(small(stage=2, grad_reduction="all_reduce", **twice))) == 5


def test_what_stays_gathered_is_not_gathered_again() -> None:
    plain = small(stage=3, tie_embeddings=False)
    result = run(plain)
    numels = {unit.name: unit.numel for unit in result.units}
    psi = result.num_parameters
    root = sum(numel for name, numel in numels.items() if not name.startswith("h."))
    assert sent(result) == 3
    assert sent(run(plain.replace(keep_root_units=True))) == 3 - Fraction(root, psi)
    small_units = [numel for numel in numels.values() if numel < 1000]
    assert 0 < len(small_units) < len(numels)
    persistent = run(plain.replace(persistent_numel=1000))
    assert sent(persistent) == 3 - Fraction(sum(small_units), psi)
    gathered = persistent.memory[0].marks["after_step"].by_kind.get("unsharded_param", 0)
    assert gathered == 2 * sum(small_units)
    tied = run(small(stage=3, keep_root_units=True))  # the table is gathered once, and is the head too
    assert tied.num_parameters < psi
    root_tied = root - numels["lm_head"]
    assert sent(tied) == 3 - Fraction(root_tied, tied.num_parameters)


def test_the_root_stays_until_backward_ends() -> None:
    """FSDP2's: while the first block is in backward, the head is still gathered and its gradient not reduced."""
    with debug(small(stage=3, keep_root_units=True, tie_embeddings=False, steps=1)) as world:
        world.until(rank=0, phase="backward", unit="h.0")
        assert world.ranks[0].parameters["lm_head.weight"].state == "gathered"
        assert any(row.name == "lm_head gradient of this microbatch" for row in world.ranks[0].live())
        assert world.ranks[0].parameters["h.1.mlp.c_fc.weight"].state in ("sharded", "freed")
        world.until("end_of_backward", rank=0)
        assert world.ranks[0].parameters["lm_head.weight"].state == "sharded"
        assert "unsharded_grad" not in world.ranks[0].memory().by_kind


@pytest.mark.parametrize("partition", ["slices", "owner"])
def test_a_shard_that_is_cast_for_use_is_what_it_is_used_as(partition: str) -> None:
    """A slice is cast to be sent, and goes when the whole is there; an owner's cast copy is the whole."""
    for events in run(small(stage=3, cast_shards=True, partition=partition, steps=1), keep_events=True).events:
        cast = {
            e.kind
            for e in events
            if isinstance(e, Alloc) and e.scope.unit == "h.0" and e.kind in ("comm", "unsharded_param")
        }
        assert cast == ({"comm", "unsharded_param"} if partition == "slices" else {"unsharded_param"})
