"""Recipes: how the ZeRO of frameworks differs from the paper's, as values of a run's fields.

The rows (`recipe_rows.py`) say what each recipe does at which ZeRO stage; here are their sources. The strategies
implement it (`parallel/`); its cost in bytes is in `analysis/formulas/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.config.presets.recipe_rows import ROWS, TRANSFORMER_ENGINE, WITHOUT_IT
from zerosim.errors import did_you_mean, wrong

NAMES = ("paper", "ddp", "deepspeed", "hf-deepspeed", "fsdp1", "fsdp2", "megatron")
PYTORCHS = ("ddp", "fsdp1", "fsdp2")
FUSED_LOSS: Mapping[str, str] = MappingProxyType(
    {"megatron": "megatron-fused", **dict.fromkeys((*PYTORCHS, "deepspeed", "hf-deepspeed"), "liger")}
)
"""By recipe the loss that its users switch on to hold less of the logits: Megatron-LM's own, or Liger's in PyTorch."""
USUAL = "usual"
"""In place of a name: the recipe that people run at this ZeRO stage (`usual_recipe`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One framework's way. `stages` are the ZeRO stages that the framework has, `pipelined` those beside a pipeline."""

    name: str
    models: str
    source: str
    approximations: str
    stages: tuple[int, ...]
    pipelined: tuple[int, ...]

    def row(self, stage: int, precision: str = "bf16", *, transformer_engine: bool | None = None) -> Mapping[str, Any]:
        """Return its values at this ZeRO stage with parameters of this dtype, by flat name. All others are the paper's.

        `transformer_engine`: whether it was asked for; False turns off a recipe's use of it.
        """
        by_precision = ROWS[self.name]
        stored = "bf16" if precision == "bf16-pure" else precision
        row = by_precision.get(precision, by_precision.get(stored, by_precision[""]))[stage]
        if transformer_engine is False and "transformer_engine" in row:
            return {name: value for name, value in row.items() if name not in TRANSFORMER_ENGINE} | WITHOUT_IT
        return row

    def note(self, stage: int, precision: str = "bf16", pp: int = 1, shards: int = 2) -> str | None:
        """Return a note on a ZeRO stage that the framework lacks, or does otherwise beside a pipeline or on one rank of
        shards."""
        if self.name.endswith("deepspeed") and stage == 0 and precision == "bf16" and pp > 1:
            return (
                "deepspeed's stage 0 in bf16 divides the optimizer states too, beside its own pipeline "
                "(BF16_Optimizer: 6 + 12/N, as recipe megatron at stage 1); zerosim leaves them whole, as stage 0 does"
            )
        if self.name == "fsdp1" and stage == 3 and shards == 1:
            return "fsdp1 gathers nothing on one rank of shards (PyTorch switches to NO_SHARD): --stage 0 plans that"
        if stage in self.stages and pp > 1 and stage not in self.pipelined:
            return (
                f"{self.name} itself refuses stage {stage} beside a pipeline (ZeRO-2 and ZeRO-3 are incompatible with "
                "pipeline parallelism): zerosim applies its rules to the paper's stage; --stage 1 is DeepSpeed's"
            )
        if stage in self.stages or (self.name == "fsdp1" and stage == 0 and shards == 1):
            return None
        return (
            f"{self.name} itself has no stage {stage} (it has {', '.join(map(str, self.stages))}): zerosim applies "
            f"its rules to the paper's stage; --recipe {usual_recipe(stage)} has it"
        )


def recipes() -> tuple[Recipe, ...]:
    """Return all of them, in the order of `NAMES`."""
    return (
        Recipe(
            "paper",
            "ZeRO as the paper describes it: gradients in the parameters' dtype, reduce-scattered; stage 3 gathers "
            "each unit for forward and again for backward.",
            "arXiv 1910.02054, sections 5 and 7",
            "none",
            (0, 1, 2, 3),
            (0, 1, 2, 3),
        ),
        Recipe(
            "ddp",
            "PyTorch's DistributedDataParallel: it copies gradients into permanent buckets, all-reduces them there "
            "during backward, and copies them back after backward (its default; "
            "gradient_as_bucket_view=True is --grad-buckets views). Frozen parameters have no buckets, and one "
            "data-parallel rank has no DistributedDataParallel. The optimizer steps all tensors together "
            "(foreach). The loss is PyTorch's on the model's logits. Where these are cast first, use --loss torch.",
            "PyTorch torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets, mark_variable_ready_dense, "
            "finalize_bucket_dense), nn/parallel/distributed.py (bucket_cap_mb 25), optim/adam.py (_multi_tensor_adam)",
            "In PyTorch the first step has one bucket with everything, so nothing overlaps there. From the second step "
            "on the first bucket has 1 MiB, and a bucket ends with a tensor. In zerosim one call moves at "
            "most 25 MiB in every step. Half types have fp32 masters, as with apex O2 or ZeRO's own "
            "baseline. Autocast, which keeps fp32 parameters and casts them for each product, is "
            "--precision fp32 --autocast bf16.",
            (0,),
            (0,),
        ),
        Recipe(
            "deepspeed",
            "DeepSpeed's defaults: gradients are reduced from a buffer of 5e8 elements, however few are trained. "
            "Stages 1 and 2 all-reduce them and keep the local slice. The step copies it into one flat buffer and "
            "casts that to fp32. The first step makes the states. At stage 2 the first gradient of a backward makes "
            "room for the whole slice, and each microbatch after the first has a second one. Stage 3 gathers "
            "each linear map and norm separately, and prefetches 5e7 more elements at each turn until 1e9 are "
            "gathered. It allocates the buffer for its slice of the gradients at the start, and never frees tensors "
            "of at most 1e5 elements: after each step it gathers them again, frozen ones too. Its reductions overlap "
            "with compute (overlap_comm; only the clock uses this). Microbatches are added in the parameters' dtype. "
            "Gradients are clipped to a norm of 1 (gradient_clipping; 0 before June 2026; --clip-norm 0 turns it "
            "off), and a step with a gradient that is not finite is skipped, except at stage 0 in fp32. "
            "The loss is PyTorch's on the model's logits. Where these are cast first, use --loss torch.",
            "deepspeedai/DeepSpeed edaa722 and, as run, 0.19.8: stage_1_and_2.py (use_multi_rank_bucket_allreduce; "
            "copy_grads_in_partition; independent_gradient_partition_epilogue; step), stage3.py "
            "(grad_partitions_flat_buffer; _post_step), fp16/unfused_optimizer.py (stage 0 in bf16), "
            "runtime/constants.py (GRADIENT_CLIPPING_DEFAULT 1.0), zero/config.py "
            "(stage3_param_persistence_threshold 1e5, stage3_prefetch_bucket_size 5e7, "
            "stage3_max_live_parameters 1e9), zero/partitioned_param_coordinator.py (fetch_sub_module)",
            "In stage 3 zerosim gathers each tensor in its own call, DeepSpeed all tensors of a turn in one. A "
            "Llama's q|k|v and gate|up are one module each in zerosim, three and two in DeepSpeed. zerosim "
            "prefetches from the first step, within a forward or backward. DeepSpeed prefetches from the second step "
            "on, and from forward into backward. allgather_bucket_size has no effect where PyTorch has "
            "all_gather_into_tensor (since 1.13): parameters are gathered in place. --allgather-bucket is the older "
            "behaviour. "
            "stage3_max_reuse_distance is not modelled: DeepSpeed does not free parameters between forward and "
            "backward if they recur within 1e9 others. So a smaller model stays gathered and sends about 2 Psi, "
            "and recompute gathers no module of a block a third time. Its stage 3 estimator "
            "says 18/N bytes; with the 2-byte gradients still alive beside their copies it is 20/N, and 22/N while the "
            "flat copy is cast.",
            (0, 1, 2, 3),
            (0, 1),
        ),
        Recipe(
            "hf-deepspeed",
            "Hugging Face's Trainer with a DeepSpeed configuration without 'optimizer': recipe deepspeed with the "
            "Trainer's AdamW, which steps one flat buffer with the temporaries of foreach (optim adamw_torch). "
            "adamw_torch_fused, its default from PyTorch 2.8 on, is --no-foreach; PyTorch's loop, which DeepSpeed's "
            "own wrapper of torch.optim.AdamW may take, is --for-loop: 24 bytes a parameter of the slice, foreach 20, "
            "fused 16. The loss is transformers'.",
            "transformers 5.24 training_args.py (optim), trainer.py; DeepSpeed 0.19.8 as run with a client optimizer; "
            "PyTorch torch/optim/adam.py (_single_tensor_adam, _multi_tensor_adam)",
            "As recipe deepspeed.",
            (0, 1, 2, 3),
            (0, 1),
        ),
        Recipe(
            "fsdp1",
            "PyTorch's FullyShardedDataParallel as Hugging Face's Trainer wraps a model: each block is a unit, each "
            "tensor of an adapter too, and the rest is the root, which stays gathered until backward ends. Shards are "
            "fp32 and cast at each gather; gradients are computed and reduced in 2 bytes, and their shards are fp32 "
            "(accelerate's mixed precision). fp32 adapters and pure bf16 are gathered and reduced as they are. Only "
            "backward prefetches (BACKWARD_PRE). A shard's gradient stays until the next step begins. With "
            "recompute a frozen block keeps its input and that input's gradient until backward ends "
            "(reentrant checkpoints, transformers before 5), and the first block's input has one too. In QLoRA "
            "scales are whole on every rank. Every microbatch is reduced, and averaged over replicas.",
            "PyTorch 2.13 distributed/fsdp: _runtime_utils.py (_register_post_backward_reshard_only_hook, "
            "_finalize_params, _prefetch_handle), _flat_param.py (use_orig_params); autograd/graph.py "
            "(register_multi_grad_hook); accelerate 1.0.1 and peft 0.13.2 (fsdp_auto_wrap_policy), run with a fake "
            "process group",
            "An adapter's tensors are gathered with their block, not each at its own turn. The root's units are "
            "gathered and reduced one by one. A unit with frozen and trained parameters has a buffer of each; "
            "FSDP1 has one for both, so that some ranks hold no states and the reduce-scatter carries frozen elements. "
            "accelerate reduces only the last microbatch (no_sync: --no-grad-sync, which adds in 2 bytes, whatever "
            "reduce_dtype says). In stage 2 "
            "(SHARD_GRAD_OP) the 2-byte parameters stay between steps.",
            (2, 3),
            (2, 3),
        ),
        Recipe(
            "fsdp2",
            "PyTorch's fully_shard with a mixed-precision policy: gradients are computed in 2 bytes and reduced in "
            "fp32. The root's units stay gathered until backward ends, and no 16-bit shard is stored. While a unit "
            "computes, the next unit is gathered and the previous unit's gradient reduced. Stage 2 is "
            "reshard_after_forward=False. The optimizer steps "
            "all tensors together (foreach; fused=True is --no-foreach). The loss is PyTorch's on the model's logits. "
            "Where these are cast first, use --loss torch. Every microbatch is "
            "reduced, and averaged over replicas, its default; set_requires_gradient_sync(False) is --no-grad-sync, "
            "set_requires_all_reduce(False) before the last is --replica-reduction step. In QLoRA scales are whole on "
            "every rank.",
            "PyTorch fully_shard: MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32); _fully_shard/"
            "_fsdp_param_group.py at 002a76f (_backward_prefetch; post_backward, which waits for the reduction before)",
            "In stage 2 FSDP2 frees the gathered parameters when backward ends and stores fp32 shards only; in "
            "zerosim the 2-byte parameters stay. FSDP2 copies gathered parameters into a tensor per parameter: in "
            "forward it holds both copies of the computing unit and gathers the next unit when its turn comes. That "
            "takes as much memory as zerosim's gather of the next unit. Under transformers' losses the last block's "
            "first copy stays beside the loss. FSDP2 gathers and reduces the root's units "
            "in one call, zerosim one by one.",
            (2, 3),
            (2, 3),
        ),
        Recipe(
            "megatron",
            "Megatron-LM: a permanent gradient buffer. In bf16 it is fp32 (18 bytes per parameter; stage 1, "
            "its distributed optimizer, 6 + 12/N). In fp16 it has 2 bytes (plus an fp32 slice that lives from step to "
            "step, 4 + 16/N). A weight's gradient is computed in the parameters' dtype and added to the buffer at "
            "once. Blocks with Transformer Engine and fused accumulation (its defaults) compute it in a permanent "
            "dummy, one for each shape of weight. "
            "--no-transformer-engine is Megatron's own blocks, which keep eager attention's softmax in fp32 unless a "
            "fused kernel runs (--no-fp32-softmax). In a pipeline each chunk's last input and its gradient stay from "
            "one step to the next. Experts' weights multiply what is between an expert's maps.",
            "NVIDIA/Megatron-LM d98e8a6: docs on the distributed optimizer, theoretical_memory_usage.py, "
            "core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py, arguments.py "
            "(accumulate_allreduce_grads_in_fp32 with bf16), core/fusions/fused_softmax.py (forward_torch_softmax), "
            "core/pipeline_parallel/schedules.py (set_input_tensor), core/transformer/moe/experts.py (bias_act_func); "
            "TransformerEngine: pytorch/module/base.py (get_dummy_wgrad)",
            "zerosim has one buffer for each unit, Megatron one for all. With gradient_accumulation_fusion "
            "Megatron's products add to the buffer directly, without the rounding and the kernel between; the head's "
            "2-byte gradient is a "
            "temporary dummy. Megatron's fused softmax kernel (masked_softmax_fusion) saves 2 bytes also without "
            "Transformer Engine, as its own tests on A100 did.",
            (0, 1),
            (0, 1),
        ),
    )


def find_recipe(name: str, usual: str = NAMES[0]) -> Recipe:
    """Return the recipe of this name; `usual` is the one that 'usual' means. Raises: InputError for an unknown name,
    with the nearest one."""
    wanted = name.strip().lower()
    for recipe in recipes():
        if recipe.name == (usual if wanted == USUAL else wanted):
            return recipe
    hint = did_you_mean(wanted, (*NAMES, USUAL), f"expected one of {', '.join((*NAMES, USUAL))}", most=2, quote=str)
    raise wrong("recipe", f" {name!r} is not known; {hint}")


def usual_recipe(stage: int, *, is_cut: bool = False, is_pure: bool = False) -> str:
    """Return the recipe that people run at this ZeRO stage. `is_cut`: tensor or pipeline parallelism cuts the model,
    which Megatron-LM offers below stage 3. `is_pure`: no fp32 masters, which the frameworks' rules need."""
    if is_pure:
        return "paper"
    if stage < 3 and is_cut:
        return "megatron"
    return ("ddp", "deepspeed", "deepspeed", "fsdp2")[stage]


def recipes_run(stage: int, *, is_cut: bool = False, has_adapters: bool = False) -> tuple[str, ...]:
    """Return the recipes with which people run this ZeRO stage. `is_cut`: beside tensor or pipeline parallelism, which
    Megatron-LM has at stages 0 and 1, and PyTorch (torchtitan) with fully_shard. Megatron-LM itself trains no
    adapters."""
    cut = (("megatron",), ("megatron",), ("fsdp2",), ("fsdp2",))
    whole = (("ddp",), ("deepspeed", "megatron"), ("deepspeed", "fsdp2"), ("fsdp2", "deepspeed"))
    found = (cut if is_cut else whole)[stage]
    return tuple(name for name in found if not (has_adapters and name == "megatron"))
