"""What people ask for by a name of Megatron, DeepSpeed or PyTorch, and zerosim does not model yet.

A flag or a key of a scenario that is none of zerosim's own is looked up here before a word that is spelled like it is
suggested.
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
        r"(q?lora|q?lora_.*|peft.*|adapter.*|freeze.*)",
        "LoRA, adapters or frozen parameters",
        "Every parameter is trained",
    ),
    (
        r"(.*offload.*|nvme.*|zero_infinity)",
        "offload of model states to the host or NVMe",
        "--cpu-checkpointing moves the inputs of recomputed blocks to the host",
    ),
    (
        r"(zero_quantized.*|zero_hpz.*|zeropp|qwz|hpz|qgz|quantiz.*|load_in_[48]bit)",
        "quantised weights or communication (ZeRO++)",
        "--dp-replicate keeps collectives within a group of ranks",
    ),
    (
        r"(fp8|fp8_.*|float8.*|fp4.*|te_.*)",
        "FP8 training",
        "--precision bf16 is the smallest format that models train in here",
    ),
)
"""A pattern of names, in underscores; what is not modelled; what comes nearest to it."""


def not_modelled(name: str) -> str | None:
    """What a flag or key asks for and zerosim does not model, in a sentence; None for a name of no such thing."""
    plain = name.lstrip("-").replace("-", "_").lower()
    found = next(((what, near) for pattern, what, near in _LACKING if re.fullmatch(pattern, plain)), None)
    return found and f"zerosim does not model {found[0]} yet. {found[1]}."
