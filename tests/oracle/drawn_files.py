"""Files of accelerate and TrainingArguments, drawn from keys that their readers know: right values and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Values = Mapping[str, Sequence[Any]]
SECTIONS: Mapping[str, Values] = {
    "fsdp_config": {
        "fsdp_version": (1, 2, 2, "2", 3, "1"),
        "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", 1, "hybrid_shard", 6, "FULL", "2", None),
        "fsdp_reshard_after_forward": (True, False, "FULL_SHARD", "true", 4, 1, None),
        "fsdp_auto_wrap_policy": (
            "TRANSFORMER_BASED_WRAP",
            "transformer_based_wrap",
            "SIZE_BASED_WRAP",
            "BLOCKS",
            None,
        ),
        "fsdp_offload_params": (True, False, "yes", "maybe", None, 0),
        "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "PRE", 1, None, 3),
        "fsdp_forward_prefetch": (True, False, "x"),
        "fsdp_activation_checkpointing": (True, False, "no", "2", None),
        "fsdp_activation_checkpointing_offload": (True, False),
        "fsdp_state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL", 2, None),
        "fsdp_cpu_ram_efficient_loading": (True, False),
        "fsdp_sync_module_states": (True, False),
        "fsdp_use_orig_params": (True, False, "x"),
        "fsdp_min_num_params": (100, "100", "many"),
        "reduce_bucket_size": (1,),
    },
    "deepspeed_config": {
        "zero_stage": (0, 1, 2, 3, "3", "x", 2.0, None),
        "gradient_accumulation_steps": (1, 4, "auto", "4", None),
        "gradient_clipping": (1.0, 0, "auto", 0.5, "0.5", "x", None),
        "offload_optimizer_device": ("none", "cpu", "nvme", "CPU", None),
        "zero3_init_flag": (True, False, "x"),
        "deepspeed_config_file": ("none",),
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": (1, 1, 2, 0),
        "parallelism_config_dp_shard_size": (1, 2, 4, 8),
        "parallelism_config_tp_size": (1, 1, 2),
        "parallelism_config_cp_size": (1, 1, 2),
        "parallelism_config_sp_size": (1, 1, 2),
        "parallelism_config_cp_backend": ("torch", "te"),
        "parallelism_config_cp_comm_strategy": ("allgather", "alltoall", "ring"),
    },
    "dynamo_config": {"dynamo_backend": ("NO", "INDUCTOR", "inductor", "FAST")},
}
TOP: Values = {
    "num_machines": (1, 1, 2),
    "mixed_precision": ("no", "bf16", "fp16", "bfloat16", False, None, "BF16"),
    "downcast_bf16": ("no",),
    "use_cpu": (False,),
    "gradient_accumulation_steps": (2,),
}
ARGUMENTS: Values = {
    "per_device_train_batch_size": (1, 8),
    "max_grad_norm": (0, 1.0),
    "lr_scheduler_type": ("linear", "cosine", "constant", "reduce_lr_on_plateau", "greedy", "triangle"),
    "warmup_steps": (0, 0.1, 100, -1),
    "bf16": (True, False),
    "fp16": (True, False),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "muon", "AdamW", "paged_adamw_8bit", "galore_adamw"),
    "gradient_checkpointing": (True, False, None),
    "activation_checkpointing": (True, False, None),
    "torch_compile_mode": ("default",),
    "use_liger_kernel": (False, True),
    "torch_empty_cache_steps": (None, 4, 0),
    "eval_strategy": ("no", "steps", "epoch", "sometimes"),
    "save_strategy": ("no", "steps", "best", "x"),
    "hub_strategy": ("end", "x"),
    "warmup_ratio": (0.1,),
    "learning_rat": (1,),
    "fsdp": (True, "full_shard auto_wrap", "shard_grad_op", "hybrid_shard", "zero3", ["full_shard"], "", "FULL_SHARD"),
}  # fmt: skip
FSDP: Values = {
    "version": (1, 2, 2, "2"),
    "reshard_after_forward": (True, False, "full_shard", "true", "maybe"),
    "cpu_offload": (True, False),
    "fsdp_offload_params": (True,),
    "activation_checkpointing": (True, False, "x"),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "transformer_based_wrap", "NO_WRAP"),
    "transformer_layer_cls_to_wrap": ("LlamaDecoderLayer", ["A", "B"]),
    "cpu_ram_efficient_loading": (True, False, "x"),
    "backward_prefetch": ("backward_pre", "NO_PREFETCH"),
    "forward_prefetch": (True, "x"),
    "limit_all_gathers": (True, "x"),
}
RARE = ("gradient_accumulation_steps", "reduce_bucket_size", "warmup_ratio", "learning_rat")


def drawn(draw: random.Random, values: Values, share: float) -> dict[str, Any]:
    """Return some of these keys, each with its first value more often than another."""
    return {
        key: known[0] if draw.random() < 0.6 else draw.choice(known)
        for key, known in values.items()
        if draw.random() < (0.05 if key in RARE and share < 0.4 else share)
    }


def launch_file(seed: int) -> dict[str, Any]:
    """Return a file of accelerate."""
    draw = random.Random(seed)
    kind = draw.choice(
        ("FSDP", "FSDP", "FSDP", "DEEPSPEED", "DEEPSPEED", "MULTI_GPU", "NO", "MEGATRON_LM", "TPU", None)
    )
    own = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(str(kind), "dynamo_config")
    sections = [own, *(["parallelism_config"] if draw.random() < 0.3 else [])]
    values = {"num_processes": draw.choice((8, 8, 4, -1)), **drawn(draw, TOP, 0.35)}
    if kind is not None:
        values["distributed_type"] = kind
    return values | {name: drawn(draw, SECTIONS[name], 0.35) for name in sections}


def arguments(seed: int) -> dict[str, Any]:
    """Return TrainingArguments as a dictionary."""
    draw = random.Random(seed)
    values = drawn(draw, ARGUMENTS, 0.25)
    return values | ({"fsdp_config": drawn(draw, FSDP, 0.3)} if draw.random() < 0.6 else {})
