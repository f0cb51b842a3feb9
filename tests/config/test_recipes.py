"""Recipes: the fields that each sets by stage, and what they cost by the closed forms, beside published numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from zerosim.analysis.formulas import BytesPerParameter, bytes_per_parameter, model_states, optimizer_step_states
from zerosim.config.presets.recipes import NAMES, RecipeChoices, find_recipe, recipes
from zerosim.errors import InputError

RANKS = 64


def cost_of(name: str, stage: int) -> BytesPerParameter:
    """bf16 parameters with Adam."""
    choices = find_recipe(name).choices(stage)
    return bytes_per_parameter(2, {"": 2, "fp32": 4}[choices.grad_dtype], 2, cast_shards=choices.cast_shards)


def after_backward(name: str, stage: int) -> Fraction:
    held = find_recipe(name).choices(stage).states_stage(stage)
    return sum(model_states(held, 1, RANKS, cost_of(name, stage)).values(), Fraction(0))


def in_optimizer(name: str, stage: int) -> Fraction:
    choices = find_recipe(name).choices(stage)
    held = choices.states_stage(stage)
    states = optimizer_step_states(held, 1, RANKS, cost_of(name, stage), upcast_grads=choices.upcast_grads)
    return sum(states.values(), Fraction(0))


def test_the_names() -> None:
    assert tuple(recipe.name for recipe in recipes()) == NAMES == ("paper", "ddp", "deepspeed", "fsdp2", "megatron")
    for recipe in recipes():
        assert recipe.models
        assert recipe.source
        assert recipe.approximations


TORCH: dict[str, Any] = {"loss": "torch"}
FOREACH: dict[str, Any] = {**TORCH, "foreach": True}
SUB_GROUP: dict[str, Any] = {"sub_group": 1_000_000_000}
BUCKET: dict[str, Any] = {"reduce_bucket": 500_000_000}
LATE_FP32: dict[str, Any] = {"grad_dtype": "fp32", "param_dtype_grads": True}


@pytest.mark.parametrize(
    ("name", "by_stage"),
    [
        ("paper", ({}, {}, {}, {})),
        ("ddp", ({**FOREACH, "grad_buckets": "copies", "overlap_reduction": True}, FOREACH, FOREACH, FOREACH)),
        (
            "deepspeed",
            (
                {**TORCH, **LATE_FP32, "persistent_grads": True},
                {**TORCH, **BUCKET, "grad_reduction": "all_reduce", "upcast_grads": True, "own_grads_only": True},
                {**TORCH, **BUCKET, "grad_reduction": "all_reduce", "upcast_grads": True},
                {
                    **TORCH,
                    **BUCKET,
                    **SUB_GROUP,
                    "upcast_grads": True,
                    "persistent_grads": True,
                    "persistent_numel": 100_000,
                    "gather": "module",
                    "prefetch_elements": 50_000_000,
                    "max_live": 1_000_000_000,
                },
            ),
        ),
        (
            "fsdp2",
            (
                *[{**FOREACH, **LATE_FP32}] * 2,
                {**FOREACH, **LATE_FP32, "overlap_reduction": True},
                {
                    **FOREACH,
                    **LATE_FP32,
                    "keep_root_units": True,
                    "cast_shards": True,
                    "prefetch": 1,
                    "overlap_reduction": True,
                },
            ),
        ),
        ("megatron", ({**LATE_FP32, "persistent_grads": True, "loss": "megatron"},) * 4),
    ],
)
def test_choices(name: str, by_stage: tuple[dict[str, Any], ...]) -> None:
    """Where a recipe says nothing it does as the paper does."""
    recipe = find_recipe(name)
    assert [recipe.choices(stage) for stage in range(4)] == [RecipeChoices(**choices) for choices in by_stage]
    assert RecipeChoices() == RecipeChoices("", "reduce_scatter", False, False, 0, False)


@pytest.mark.parametrize("stage", range(4))
def test_bytes_per_parameter_when_backward_ends(stage: int) -> None:
    n = RANKS
    two_two_twelve = (16, 4 + Fraction(12, n), 2 + Fraction(14, n), Fraction(16, n))
    assert after_backward("paper", stage) == two_two_twelve[stage]
    assert (
        after_backward("deepspeed", stage)
        == (
            18,  # stage 0 in bf16 adds up in fp32
            2 + Fraction(14, n),  # stage 1 has let go of the rest of its gradients
            *two_two_twelve[2:],
        )[stage]
    )
    eighteen = (18, 6 + Fraction(12, n), 2 + Fraction(16, n), Fraction(18, n))
    assert after_backward("megatron", stage) == eighteen[stage]
    # FSDP2: 4 + 4 + 8 in stage 3, for the 2-byte shard is not stored.
    assert after_backward("fsdp2", stage) == (*eighteen[:3], Fraction(16, n))[stage]


def test_bytes_per_parameter_in_the_optimizer() -> None:
    """DeepSpeed's fp32 copies: 2 + 18/N in stages 1 and 2, of which stage 1 has let go of the rest of its gradients.
    Nobody else has any in bf16."""
    assert in_optimizer("deepspeed", 1) == 2 + Fraction(18, RANKS)
    assert in_optimizer("deepspeed", 2) == 2 + Fraction(18, RANKS)
    assert in_optimizer("deepspeed", 3) == Fraction(20, RANKS)
    for name in ("paper", "fsdp2", "megatron"):
        assert [in_optimizer(name, stage) for stage in range(4)] == [after_backward(name, stage) for stage in range(4)]


def test_stages_that_a_framework_does_not_have() -> None:
    assert find_recipe("deepspeed").note(1) is find_recipe("deepspeed").note(0, "fp16") is None
    assert "stage 0 in bf16 divides the optimizer states too" in (find_recipe("deepspeed").note(0) or "")
    assert find_recipe("fsdp2").note(3) is None
    assert "fsdp2 itself has no stage 1 (it has 2, 3)" in (find_recipe("fsdp2").note(1) or "")
    assert "megatron itself has no stage 3 (it has 0, 1)" in (find_recipe("megatron").note(3) or "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepsped", "unknown recipe 'deepsped': did you mean deepspeed?"),
        ("fsdp", "unknown recipe 'fsdp': did you mean fsdp2?"),
        ("horovod", "unknown recipe 'horovod': expected one of paper, ddp, deepspeed, fsdp2, megatron"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_recipe(name)
    assert str(caught.value) == message
    assert find_recipe(" DeepSpeed ").name == "deepspeed"
