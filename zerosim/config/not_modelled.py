"""Names from Megatron, DeepSpeed or PyTorch: features that are not modelled, and features with another name here.

An unknown flag or scenario key is looked up here before a similarly spelled word is suggested.
"""

from __future__ import annotations

import re

_LACKING = (
    (
        r"(cp|cp_size|context_parallel.*|ring_attention|ulysses.*)",
        "context parallelism",
        "--tp with --sequence-parallel cuts a part of the activations by rows",
    ),
    (
        r"(ep|ep_size|expert.*|num_experts|n_experts|moe.*|experts|num_experts_per_tok)",
        "expert parallelism or mixtures of experts",
        "Every model here is dense",
    ),
    (
        r"(qlora.*|peft.*)",
        "PEFT's files and its other methods",
        "--lora-rank trains adapters, and --base nf4 keeps the frozen base in 4 bits",
    ),
    (
        r"(.*offload.*|nvme.*|zero_infinity)",
        "offload of model states to the host or NVMe",
        "--cpu-checkpointing moves the inputs of recomputed blocks to the host",
    ),
    (
        r"(zero_quantized_nontrainable_weights|zeropp_loco.*|quantiz.*|load_in_8bit)",
        "frozen weights in int8, or error feedback for ZeRO++'s codes (LoCo)",
        "--base nf4 keeps a frozen base in 4 bits, and --compress has error feedback",
    ),
    (
        r"(fp8|fp8_.*|float8.*|fp4.*|te_.*)",
        "FP8 training",
        "--precision bf16 is the smallest format for training",
    ),
    (r"(sliding_window.*|window_size)", "attention in windows", "Attention always covers the whole context"),
    (
        r"(async_tp|tp_comm_overlap.*|.*async_tensor_parallel.*)",
        "overlap of tensor parallelism's collectives",
        "--overlap covers the collectives of ZeRO and of replicas",
    ),
    (r"(enable_)?cuda_graphs?.*", "CUDA graphs", "--kernels compiled launches the fewest kernels"),
)
_CALLED = (
    (r"(vpp|virtual_pipeline.*|num_virtual_stages.*)", "--pipeline interleaved --virtual-stages V"),
    (r"num_layers_per_virtual_pipeline_stage", "--pipeline interleaved --virtual-stages V, for layers / (pp V) each"),
    (r"(use_)?distributed_optimizer", "--stage 1 --recipe megatron"),
    (r"(use_)?flash_attn(ention)?.*", "--attention flash"),
    (r"(seq|sequence)_parallel_size", "--sequence-parallel, over the ranks of --tp"),
    (r"(zero_quantized_weights|qwz)", "--quantized-weights"),
    (r"(zero_quantized_gradients|qgz)", "--quantized-gradients"),
    (r"(zero_hpz_partition_size|hpz|zero_hpz.*)", "--secondary-shard G, for G ranks of a node"),
    (r"(zeropp|zero_plus_plus)", "--secondary-shard G --quantized-weights --quantized-gradients"),
    (r"load_in_4bit", "--base nf4, with --lora-rank R"),
    (r"mics_shard_size", "--dp-replicate R, for groups of N / R ranks"),
    (r"mics_hierarchical.*", "--hierarchical-gather, with --ranks-per-node R"),
    (r"sharding_strategy", "--stage: 3 is FULL_SHARD, 2 SHARD_GRAD_OP, 0 NO_SHARD; --dp-replicate makes it HYBRID"),
)
"""A pattern of names, in underscores, and its equivalent here."""
"""A pattern of names, in underscores; the feature that is not modelled; the nearest feature."""


def not_modelled(name: str) -> str | None:
    """Return in a sentence the feature that a flag or key asks for, if zerosim does not model it or names it
    differently; None for other names."""
    plain = name.lstrip("-").replace("-", "_").lower()
    if (here := next((here for pattern, here in _CALLED if re.fullmatch(pattern, plain)), None)) is not None:
        return f"here it is {here}"
    found = next(((what, near) for pattern, what, near in _LACKING if re.fullmatch(pattern, plain)), None)
    return found and f"zerosim does not model {found[0]} yet. {found[1]}."
