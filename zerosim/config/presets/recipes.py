"""Recipes: how frameworks' ZeRO differs from the paper's, as values of a run's fields.

What each recipe does in which stage, with sources. The strategies implement it (`parallel/`); what it costs in bytes
is in `analysis/formulas/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zerosim.errors import InputError, did_you_mean

NAMES = ("paper", "deepspeed", "fsdp2", "megatron")


@dataclass(frozen=True, slots=True)
class RecipeChoices:
    """Where published implementations differ from the paper, whose own values are the defaults.

    grad_dtype         that gradients are kept and sent in; '' is the parameters' own
    grad_reduction     stages 1 and 2: 'reduce_scatter', or 'all_reduce' of which a rank keeps its slice
    upcast_grads       the optimizer step first copies the own slice of the gradients to fp32
    keep_root_units    stage 3: units outside the blocks stay gathered from forward to backward
    persistent_numel   stage 3: units with fewer elements stay gathered for good
    loss               what a step holds of its logits (functional/loss_modes.py)
    cast_shards        stage 3: no 2-byte shard is stored, the master's is cast at each gather
    """

    grad_dtype: str = ""
    grad_reduction: str = "reduce_scatter"
    upcast_grads: bool = False
    keep_root_units: bool = False
    persistent_numel: int = 0
    cast_shards: bool = False
    loss: str = "lean"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One framework's way. `stages` are those that the framework itself has."""

    name: str
    models: str
    source: str
    approximations: str
    stages: tuple[int, ...]

    def choices(self, stage: int) -> RecipeChoices:
        """What it does in this stage."""
        return _CHOICES[self.name][stage]

    def note(self, stage: int) -> str | None:
        """What to say of a stage that the framework does not have."""
        if stage in self.stages:
            return None
        return (
            f"{self.name} itself has no stage {stage} (it has {', '.join(map(str, self.stages))}): "
            "this applies its rules to the paper's stage"
        )


def recipes() -> tuple[Recipe, ...]:
    """All of them, in the order of `NAMES`."""
    return (
        Recipe(
            "paper",
            "ZeRO as the paper describes it: gradients in the parameters' dtype, reduce-scattered; stage 3 gathers "
            "each unit for forward and again for backward.",
            "arXiv 1910.02054, sections 5 and 7",
            "none",
            (0, 1, 2, 3),
        ),
        Recipe(
            "deepspeed",
            "DeepSpeed's defaults: stages 1 and 2 all-reduce gradients, the optimizer step casts the reduced "
            "gradients to fp32, and stage 3 never frees small parameters.",
            "deepspeedai/DeepSpeed edaa722: stage_1_and_2.py (use_multi_rank_bucket_allreduce), stage3.py, "
            "zero/config.py (stage3_param_persistence_threshold 1e5)",
            "The threshold counts whole units here, single tensors there. Buckets (5e8 elements), prefetching and "
            "sub-groups, which bound the fp32 copy in stage 3 to 1e9 elements at a time, are left out. So is "
            "stage3_max_reuse_distance: parameters that recur within 1e9 others are not freed between forward and "
            "backward there, so that a smaller model stays gathered and sends about 2 Psi. Its stage 3 estimator "
            "says 18/N bytes; with the 2-byte gradients still alive beside their copies it is 20/N.",
            (0, 1, 2, 3),
        ),
        Recipe(
            "fsdp2",
            "PyTorch's fully_shard with a mixed-precision policy: gradients reduced in fp32, the root's units gathered "
            "until backward ends, no 16-bit shard stored. Stage 2 is reshard_after_forward=False.",
            "PyTorch fully_shard: MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)",
            "In stage 2 FSDP2 frees the gathered parameters when backward ends and stores fp32 shards only; here the "
            "2-byte parameters stay. There gradients are computed in 2 bytes and cast for the reduce-scatter; here "
            "they are fp32 from the start. Prefetching is left out.",
            (2, 3),
        ),
        Recipe(
            "megatron",
            "Megatron-LM in bf16: fp32 gradients, 18 bytes per parameter; stage 1 is its distributed optimizer, "
            "6 + 12/N.",
            "NVIDIA/Megatron-LM d98e8a6: docs on the distributed optimizer, theoretical_memory_usage.py",
            "Its gradient buffer is one contiguous fp32 buffer that lives through the whole run; here gradients appear "
            "as backward reaches them.",
            (0, 1),
        ),
    )


def find_recipe(name: str) -> Recipe:
    """Raises: InputError for an unknown name, with the nearest one."""
    for recipe in recipes():
        if recipe.name == name.strip().lower():
            return recipe
    hint = did_you_mean(name.strip().lower(), NAMES, f"expected one of {', '.join(NAMES)}", quote=str)
    raise InputError(f"unknown recipe {name!r}: {hint}")


_PAPER = RecipeChoices()
_DEEPSPEED = RecipeChoices(loss="torch")
_ALL_REDUCED = replace(_DEEPSPEED, grad_reduction="all_reduce", upcast_grads=True)
_FSDP2 = RecipeChoices(grad_dtype="fp32", loss="torch")
_MEGATRON = RecipeChoices(grad_dtype="fp32", loss="megatron")
_CHOICES: Mapping[str, tuple[RecipeChoices, ...]] = MappingProxyType(
    {
        "paper": (_PAPER,) * 4,
        "deepspeed": (
            _DEEPSPEED,
            _ALL_REDUCED,
            _ALL_REDUCED,
            replace(_DEEPSPEED, upcast_grads=True, persistent_numel=100_000),
        ),
        "fsdp2": (*[_FSDP2] * 3, replace(_FSDP2, keep_root_units=True, cast_shards=True)),
        "megatron": (_MEGATRON,) * 4,
    }
)
"""By recipe, in stages 0 to 3."""
