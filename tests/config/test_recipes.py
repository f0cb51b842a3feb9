"""Recipes: the fields that each sets by stage, and what they cost by the closed forms, beside published numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from zerosim.analysis.formulas import BytesPerParameter, bytes_per_parameter, model_states, optimizer_step_states, total
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.precision import FLOATS
from zerosim.config.presets.recipes import NAMES, find_recipe, recipes
from zerosim.errors import InputError

RANKS = 64


def cost_of(name: str, stage: int) -> BytesPerParameter:
    """bf16 parameters with Adam."""
    config = RunConfig(recipe=name, stage=stage)
    grad = {"bf16": 2, "fp32": 4}[config.precision.grad_dtype]
    return bytes_per_parameter(2, grad, 2, cast_shards=config.gathering.cast_shards)


def after_backward(name: str, stage: int) -> Fraction:
    held = RunConfig(recipe=name, stage=stage).states_stage
    return total(model_states(held, cost_of(name, stage)).values()).at(Ψ=1, N=RANKS)


def in_optimizer(name: str, stage: int) -> Fraction:
    config = RunConfig(recipe=name, stage=stage)
    upcast, cost = config.grads.upcast, cost_of(name, stage)
    states = optimizer_step_states(config.states_stage, cost, upcast_grads=upcast)
    return total(states.values()).at(Ψ=1, N=RANKS)


def test_the_names() -> None:
    assert tuple(recipe.name for recipe in recipes()) == NAMES
    assert NAMES == ("paper", "ddp", "deepspeed", "hf-deepspeed", "fsdp1", "fsdp2", "megatron")
    for recipe in recipes():
        assert recipe.models
        assert recipe.source
        assert recipe.approximations


TORCH: dict[str, Any] = {"loss": "torch-half", "kernels": "eager"}
DEEPSPEED_0: dict[str, Any] = {**TORCH, "upcast_grads": True, "clip_norm": 1.0}
LAZY: dict[str, Any] = {"lazy_states": True, "skip_nonfinite": True, "flatten_grads": True}
DEEPSPEED: dict[str, Any] = {**DEEPSPEED_0, **LAZY, "reduce_bucket": 500_000_000}
LATE: dict[str, Any] = {**TORCH, "foreach": True, "overlap_reduction": True}
EACH: dict[str, Any] = {**LATE, "replica_reduction": "micro_batch"}
FP32: dict[str, Any] = {"grad_dtype": "fp32", "param_dtype_grads": True}
FSDP1: dict[str, Any] = {
    "replica_reduction": "micro_batch",
    "keep_grads": True,
    "sum_computed_grads": True,
    "adapter_shards": "tensor",
    "compress": "bf16",
}
MEGATRON: dict[str, Any] = {
    **FP32,
    "persistent_grads": True,
    "loss": "megatron",
    "flash_kernel": "cudnn",
    "transformer_engine": True,
    "keep_last_inputs": True,
    "weigh_between": True,
}
LEAVES = {"gather": "module", "persistent_numel": 100_000, "prefetch_elements": 50_000_000, "max_live": 1_000_000_000}


@pytest.mark.parametrize(
    ("name", "stage", "row"),
    [
        ("paper", 3, {}),
        ("ddp", 0, {**LATE, "grad_buckets": "copies"}),
        ("deepspeed", 0, {**DEEPSPEED_0, "skip_nonfinite": True}),
        ("deepspeed", 1, {**DEEPSPEED, "grad_reduction": "all_reduce", "own_grads_only": True}),
        (
            "deepspeed",
            2,
            {**DEEPSPEED, "grad_reduction": "all_reduce", "grads_in_partition": True, "host_buffers": True},
        ),
        ("hf-deepspeed", 0, {**DEEPSPEED_0, "skip_nonfinite": True, "foreach": True, "loss": "hf-5"}),
        (
            "deepspeed",
            3,
            {**DEEPSPEED, **LEAVES, "sub_group": 1_000_000_000, "persistent_grads": True, "overlap_comm": True},
        ),
        ("fsdp1", 2, {**LATE, **FP32, **FSDP1}),
        (
            "fsdp1",
            3,
            {**LATE, **FP32, **FSDP1, "keep_root_units": True, "cast_shards": True, "prefetch": 1}
            | {"forward_prefetch": False, "use_reentrant": True, "whole_scales": True},
        ),
        ("fsdp2", 2, {**EACH, **FP32, "adapter_shards": "rows"}),
        (
            "fsdp2",
            3,
            {**EACH, **FP32, "keep_root_units": True, "cast_shards": True, "prefetch": 1, "offload_policy": "fsdp2"}
            | {"keep_last_output": True, "whole_scales": True, "adapter_shards": "rows"},
        ),
        ("megatron", 1, {**MEGATRON, "gradient_accumulation_fusion": True}),
        ("megatron", 2, MEGATRON),
    ],
)
def test_rows(name: str, stage: int, row: dict[str, Any]) -> None:
    """Where a recipe says nothing it does as the paper does."""
    assert find_recipe(name).row(stage) == row
    unused = (
        "offload_policy",
        "adapter_shards",
        "use_reentrant",
        "whole_scales",
    )  # nothing is offloaded, and there are no adapters
    without = {flat: value for flat, value in row.items() if flat not in unused}
    assert RunConfig(recipe=name, stage=stage) == RunConfig(stage=stage, **without).replace(recipe=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_sets_what_follows_it_and_this_stage_has(name: str) -> None:
    for stage, precision in product(range(4), FLOATS):
        for flat, value in find_recipe(name).row(stage, precision).items():
            option = OPTIONS[flat]
            assert option.follows
            assert stage in option.stages
            assert option.checked(value) != option.default


@pytest.mark.parametrize("stage", range(4))
def test_bytes_per_parameter_when_backward_ends(stage: int) -> None:
    n = RANKS
    two_two_twelve = (16, 4 + Fraction(12, n), 2 + Fraction(14, n), Fraction(16, n))
    assert after_backward("paper", stage) == two_two_twelve[stage]
    assert (
        after_backward("deepspeed", stage)
        == (
            16,
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
    assert find_recipe("deepspeed").note(0) is None  # FP16_UnfusedOptimizer
    assert "stage 0 in bf16 divides the optimizer states too" in (find_recipe("deepspeed").note(0, pp=2) or "")
    assert find_recipe("fsdp2").note(3) is None
    assert "fsdp2 itself has no stage 1 (it has 2, 3)" in (find_recipe("fsdp2").note(1) or "")
    assert "megatron itself has no stage 3 (it has 0, 1)" in (find_recipe("megatron").note(3) or "")
    assert "deepspeed itself refuses stage 2 beside a pipeline" in (find_recipe("deepspeed").note(2, pp=2) or "")
    assert find_recipe("deepspeed").note(1, pp=2) is find_recipe("deepspeed").note(2) is None


def test_fsdp_gathers_nothing_on_one_rank_of_shards() -> None:
    """FSDP1 is NO_SHARD there. FSDP2 copies each unit at its turn."""
    assert "(PyTorch switches to NO_SHARD): --stage 0 plans that" in (find_recipe("fsdp1").note(3, shards=1) or "")
    assert find_recipe("fsdp1").note(3) is find_recipe("fsdp1").note(0, shards=1) is None
    for size, early in (({"ranks": 2}, 1), ({"ranks": 2, "dp_replicate": 2}, 0), ({"ranks": 1}, 0)):
        config = RunConfig(recipe="fsdp2", stage=3, **size)
        assert (config.gathering.prefetch, config.gathering.keep_last_output) == (early, bool(early))
    assert RunConfig(recipe="fsdp2", stage=3, ranks=1, prefetch=2).gathering.prefetch == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepsped", "recipe 'deepsped' is not known; did you mean deepspeed or hf-deepspeed?"),
        ("fsdp", "recipe 'fsdp' is not known; did you mean fsdp2 or fsdp1?"),
        (
            "horovod",
            f"recipe 'horovod' is not known; expected one of {', '.join(NAMES)}, usual",
        ),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_recipe(name)
    assert str(caught.value) == message
    assert find_recipe(" DeepSpeed ").name == "deepspeed"
