"""Recipes: how frameworks' ZeRO differs from the paper's, as values of a run's fields.

What each recipe does in which stage, with sources. The strategies implement it (`parallel/`); what it costs in bytes
is in `analysis/formulas/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zerosim.errors import InputError, did_you_mean

NAMES = ("paper", "ddp", "deepspeed", "fsdp2", "megatron")


@dataclass(frozen=True, slots=True)
class RecipeChoices:
    """Where published implementations differ from the paper, whose own values are the defaults.

    grad_dtype         that gradients are kept and sent in; '' is the parameters' own
    grad_reduction     stages 1 and 2: 'reduce_scatter', or 'all_reduce' of which a rank keeps its slice
    persistent_grads   what is kept of the gradients has its buffer from start to end
    param_dtype_grads  backward makes gradients in the parameters' dtype; they are cast when they are kept or reduced
    own_grads_only     stage 1: when backward ends, all but the own slice of the gradients goes
    upcast_grads       the optimizer step first copies the own slice of the gradients to fp32
    keep_upcast        that copy stays until the next step begins
    grad_buckets       stage 0: gradients are reduced where they are ('none'), in buckets that stay and are copied
                       back ('copies'), or live in such buckets ('views')
    sub_group          stage 3: elements of a rank that the optimizer steps, and copies to fp32, together; 0: all
    foreach            the optimizer steps all tensors together, with temporaries of their size
    keep_root_units    stage 3: units outside the blocks stay gathered from forward to backward
    gather             stage 3: what is gathered at a time, a 'unit' or a leaf 'module', whose tensors have a flat
                       buffer each; at any stage where an optimizer wants whole matrices
    persistent_numel   stage 3: units with fewer elements stay gathered for good; by module, tensors with no more
    reduce_bucket      stages 1 to 3: elements of the buffer out of which gradients are reduced; 0: from where they are
    reduce_buffers     how many there are; with two, one is filled while the other is reduced
    allgather_bucket   stages 1 and 2: elements of the buffer through which new parameters arrive; 0: where they belong
    loss               what a step holds of its logits (functional/loss_modes.py)
    cast_shards        stage 3: no 2-byte shard is stored, the master's is cast at each gather
    prefetch           stage 3: units that are gathered ahead, while another one computes
    prefetch_elements  stage 3: elements that are gathered ahead at each turn (parallel/zero3.py, Ahead)
    max_live           stage 3: at so many gathered elements nothing is gathered ahead; 0: no limit
    overlap_reduction  backward goes on while a gradient is reduced (parallel/base.py, overlaps)
    """

    grad_dtype: str = ""
    grad_reduction: str = "reduce_scatter"
    persistent_grads: bool = False
    param_dtype_grads: bool = False
    own_grads_only: bool = False
    upcast_grads: bool = False
    keep_upcast: bool = False
    grad_buckets: str = "none"
    sub_group: int = 0
    foreach: bool = False
    keep_root_units: bool = False
    gather: str = "unit"
    persistent_numel: int = 0
    cast_shards: bool = False
    reduce_bucket: int = 0
    reduce_buffers: int = 1
    allgather_bucket: int = 0
    prefetch: int = 0
    prefetch_elements: int = 0
    max_live: int = 0
    overlap_reduction: bool = False
    loss: str = "lean"

    @property
    def lasting_grads(self) -> bool:
        """Whether the buffer of what is kept of the gradients is there from start to end."""
        return self.persistent_grads or self.grad_buckets == "views"

    @property
    def wants_masters(self) -> bool:
        """Whether it casts from fp32 masters, or gradients for them."""
        return self.cast_shards or self.upcast_grads or self.keep_upcast

    def states_stage(self, stage: int) -> int:
        """The stage whose model states are there when backward ends: stage 1 may have let go of all but its slice of
        the gradients, as stage 2 has."""
        return 2 if stage == 1 and (self.own_grads_only or self.reduce_bucket) else stage

    @property
    def piece(self) -> str:
        """What has a flat buffer of its own: a 'unit' or a 'tensor'."""
        return "tensor" if self.gather == "module" else "unit"

    def stays(self, numel: int) -> bool:
        """Whether a flat buffer of so many elements stays gathered for good, in stage 3."""
        limit = self.persistent_numel
        return numel <= limit if self.gather == "module" else numel < limit


@dataclass(frozen=True, slots=True)
class Recipe:
    """One framework's way. `stages` are those that the framework itself has."""

    name: str
    models: str
    source: str
    approximations: str
    stages: tuple[int, ...]

    def choices(self, stage: int, precision: str = "bf16") -> RecipeChoices:
        """What it does in this stage, with parameters of this dtype."""
        by_precision = _CHOICES[self.name]
        return by_precision.get(precision, by_precision[""])[stage]

    def note(self, stage: int, precision: str = "bf16") -> str | None:
        """What to say of a stage that the framework does not have, or has otherwise."""
        if self.name == "deepspeed" and stage == 0 and precision == "bf16":
            return (
                "deepspeed's stage 0 in bf16 divides the optimizer states too (BF16_Optimizer: 6 + 12/N, as recipe "
                "megatron at stage 1); this leaves them whole, as stage 0 does"
            )
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
            "ddp",
            "PyTorch's DistributedDataParallel: gradients are copied into buckets that live through the run, are "
            "all-reduced there while backward goes on, and copied back when it is over (its default; "
            "gradient_as_bucket_view=True is --grad-buckets views). The optimizer steps all tensors together "
            "(foreach), and the loss is PyTorch's.",
            "PyTorch torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets, mark_variable_ready_dense, "
            "finalize_bucket_dense), nn/parallel/distributed.py (bucket_cap_mb 25), optim/adam.py (_multi_tensor_adam)",
            "There the first bucket has 1 MiB, and a bucket ends with a tensor; here one call moves at most 25 MiB. "
            "Autocast is left out, which keeps fp32 parameters and casts them for each product: half types have fp32 "
            "masters here, as with apex O2 or ZeRO's own baseline.",
            (0,),
        ),
        Recipe(
            "deepspeed",
            "DeepSpeed's defaults: gradients are reduced out of a buffer of 5e8 elements; stages 1 and 2 all-reduce "
            "them and keep the own slice, which the step casts to fp32; stage 3 gathers each linear map and norm on "
            "its own, and at each turn 5e7 more elements until 1e9 are there, has the buffer for its gradients' slice "
            "from the start, and never frees tensors of at most 1e5 elements. The loss is PyTorch's.",
            "deepspeedai/DeepSpeed edaa722: stage_1_and_2.py (use_multi_rank_bucket_allreduce; "
            "independent_gradient_partition_epilogue), stage3.py (grad_partitions_flat_buffer), bf16_optimizer.py, "
            "zero/config.py (stage3_param_persistence_threshold 1e5, stage3_prefetch_bucket_size 5e7, "
            "stage3_max_live_parameters 1e9), zero/partitioned_param_coordinator.py (fetch_sub_module)",
            "Stage 3 gathers each tensor in a call of its own here, those of a turn in one there; a Llama's q|k|v and "
            "gate|up are one module each here, and three and two there. It prefetches from the first step here, and "
            "within a forward or backward; there from the second on, and from forward into backward. "
            "allgather_bucket_size decides nothing where PyTorch has all_gather_into_tensor (since "
            "1.13): parameters are gathered where they belong; --allgather-bucket is what it did before. Left out is "
            "stage3_max_reuse_distance: parameters that recur within 1e9 others are not freed between forward and "
            "backward there, so that a smaller model stays gathered and sends about 2 Psi, and recompute gathers no "
            "module of a block a third time. Its stage 3 estimator "
            "says 18/N bytes; with the 2-byte gradients still alive beside their copies it is 20/N.",
            (0, 1, 2, 3),
        ),
        Recipe(
            "fsdp2",
            "PyTorch's fully_shard with a mixed-precision policy: gradients made in 2 bytes and reduced in fp32, the "
            "root's units gathered until backward ends, no 16-bit shard stored, the next unit gathered and the last "
            "one's gradient reduced while one computes. Stage 2 is reshard_after_forward=False. The optimizer steps "
            "all tensors together (foreach; fused=True is --no-foreach). The loss is PyTorch's.",
            "PyTorch fully_shard: MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32); _fully_shard/"
            "_fsdp_param_group.py at 002a76f (_backward_prefetch; post_backward, which waits for the reduction before)",
            "In stage 2 FSDP2 frees the gathered parameters when backward ends and stores fp32 shards only; here the "
            "2-byte parameters stay. FSDP2 copies what it gathers into a "
            "tensor per parameter: in forward it holds both copies of the unit that computes and gathers the next one "
            "when its turn comes, which takes as much as the next one's gather here. The root's units are gathered "
            "and reduced in one call there, one by one here.",
            (2, 3),
        ),
        Recipe(
            "megatron",
            "Megatron-LM: a gradient buffer that lives through the run, fp32 in bf16 (18 bytes per parameter; stage 1, "
            "its distributed optimizer, 6 + 12/N), 2 bytes in fp16 (with an fp32 slice from one step to the next, "
            "4 + 16/N). A weight's gradient is made in the parameters' dtype and added at once.",
            "NVIDIA/Megatron-LM d98e8a6: docs on the distributed optimizer, theoretical_memory_usage.py, "
            "core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py, arguments.py "
            "(accumulate_allreduce_grads_in_fp32 with bf16)",
            "One buffer for each unit here, one for all there. With gradient_accumulation_fusion the products add to "
            "the buffer themselves, and the 2-byte gradient of one weight does not exist.",
            (0, 1),
        ),
    )


def find_recipe(name: str) -> Recipe:
    """Raises: InputError for an unknown name, with the nearest one."""
    for recipe in recipes():
        if recipe.name == name.strip().lower():
            return recipe
    hint = did_you_mean(name.strip().lower(), NAMES, f"expected one of {', '.join(NAMES)}", quote=str)
    raise InputError(f"unknown recipe {name!r}: {hint}", field="recipe")


_PAPER = RecipeChoices()
_TORCH = RecipeChoices(loss="torch")
_DEEPSPEED_1 = replace(_TORCH, grad_reduction="all_reduce", upcast_grads=True, reduce_bucket=500_000_000)
_DEEPSPEED_3 = replace(
    _TORCH,
    upcast_grads=True,
    persistent_grads=True,
    persistent_numel=100_000,
    reduce_bucket=500_000_000,
    sub_group=1_000_000_000,
    gather="module",
    prefetch_elements=50_000_000,
    max_live=1_000_000_000,
)
_DEEPSPEED = (replace(_DEEPSPEED_1, own_grads_only=True), _DEEPSPEED_1, _DEEPSPEED_3)
_FOREACH = replace(_TORCH, foreach=True)
_LATE = replace(_FOREACH, overlap_reduction=True)
_FSDP2_3 = replace(_LATE, keep_root_units=True, cast_shards=True, prefetch=1)
_FSDP2 = (_FOREACH, _FOREACH, _LATE, _FSDP2_3)
_MEGATRON = RecipeChoices(loss="megatron", persistent_grads=True, param_dtype_grads=True)
_CHOICES: Mapping[str, Mapping[str, tuple[RecipeChoices, ...]]] = MappingProxyType(
    {
        "paper": {"": (_PAPER,) * 4},
        "ddp": {"": (replace(_LATE, grad_buckets="copies"), _FOREACH, _FOREACH, _FOREACH)},
        "deepspeed": {
            "bf16": (replace(_TORCH, grad_dtype="fp32", param_dtype_grads=True, persistent_grads=True), *_DEEPSPEED),
            "": (replace(_TORCH, upcast_grads=True), *_DEEPSPEED),
        },
        "fsdp2": {
            "bf16": tuple(replace(choices, grad_dtype="fp32", param_dtype_grads=True) for choices in _FSDP2),
            "fp16": tuple(replace(choices, grad_dtype="fp32", param_dtype_grads=True) for choices in _FSDP2),
            "": _FSDP2,
        },
        "megatron": {
            "bf16": (replace(_MEGATRON, grad_dtype="fp32"),) * 4,
            "fp16": (replace(_MEGATRON, upcast_grads=True, keep_upcast=True),) * 4,
            "": (_MEGATRON,) * 4,
        },
    }
)
"""By recipe and the parameters' dtype ('': all others), in stages 0 to 3."""
