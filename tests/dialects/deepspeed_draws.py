"""Random DeepSpeed files: from each key of the table good values and bad ones, alone and together."""

from __future__ import annotations

import random
from typing import Any

from zerosim.dialects.deepspeed.keys import REMOVED, STRICT, TABLE
from zerosim.dialects.rows import boolean

WORLD = 8
_BOOLEANS = (True, False, True, False, "true", "maybe", 1, 2, None)
_NUMBERS = (1, 8, 5e8, 1000, 2.0, "500000000", 0, "5e8", -1, 0.5, True, None, "x")
_REALS = (0.5, 0.75, "0.25", 1.0, 0.0, 2.0, -1.0, "x")
_BATCH: tuple[dict[str, Any], ...] = (
    {"train_batch_size": 64}, {"train_micro_batch_size_per_gpu": 2}, {"train_batch_size": 60},
    {"train_batch_size": 64, "gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}, {},
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 2}, {"train_micro_batch_size_per_gpu": 0},
    {"train_batch_size": 4}, {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16},
    {"train_batch_size": "64"}, {"train_micro_batch_size_per_gpu": 1.0},
)  # fmt: skip
_GOOD_BATCH = (*_BATCH[:2], {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_optimization.stage": (1, 2, 3, "3", 3.0, 0, True, 4, 2.5, "auto", "x", None),
    "zero_optimization.offload_optimizer.device": ("none", "cpu", "nvme", "CPU", None),
    "zero_optimization.offload_param.device": ("none", "cpu", "nvme", "gpu"),
    "zero_optimization.offload_optimizer.nvme_path": ("/mnt/nvme", None),
    "zero_optimization.offload_param.nvme_path": ("/mnt/nvme", None),
    "zero_optimization.zenflow.select_strategy": ("auto", "step", "epoch", "never"),
    "zero_optimization.zenflow.select_interval": ("auto", 4, "x", 2.0),
    "zero_optimization.zenflow.update_interval": ("auto", 4, 0, "x"),
    "zero_optimization.leaf_module.classes": ("A", ["A", "B"], 3),
    "zero_optimization.leaf_module.names": ("a", ["a"]),
    "zero_optimization.leaf_module.name_suffixes": ("a", ["a"]),
    "communication_data_type": ("fp32", "bf16", "FP16", "auto", "bfloat16", 16),
    "seq_parallel_communication_data_type": ("fp32", "bf16", "x"),
    "gradient_allreduce_op": ("mean", "sum", "SUM", "max"),
    "prescale_gradients": (True, False),
    "gradient_predivide_factor": (1.0, 2.0),
    "data_types.grad_accum_dtype": ("fp32", "bf16", None, "x"),
    "data_types.param_dtype": ("bf16", None),
    "data_types.buffer_dtype": ("fp32", None),
    "data_types.keep_in_fp32_modules": ("auto", ["norm"], "norm", 3),
    "optimizer.type": ("Adam", "AdamW", "adamw", "Lion", "SGD", "OneBitAdam"),
    "torch_autocast.dtype": ("bfloat16", "float16", "bf16"),
    "torch_autocast.lower_precision_safe_modules": (["torch.nn.Linear"], None),
    "compile.passes": (None, ["z3"], ["x"], "z3"),
    "tensor_parallel.vocab_parallel_lm_head": (None, True, "x"),
    "sequence_parallel_size": (1, 2),
    "activation_checkpointing.number_checkpoints": (None, 4, "x"),
    "wall_clock_breakdown": (True, False),
    "checkpoint": ({}, {"tag_validation": "Warn"}, {"tag_validation": "x"}),
    "pipeline.stages": ("auto", 2),
    "aio.block_size": (1048576,),
}
_NOT_DRAWN = {
    *("data_parallel_size", "monitor_config", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor"),
    *("aio.use_gds", "pipeline.partition", "pipeline.activation_checkpoint_interval"),
}
"""Sections of other tools, with settings of their own, and what only a CUDA build takes."""


def _values(key: str, kind: Any) -> tuple[Any, ...]:
    if key in _VALUES:
        return _VALUES[key]
    if kind is boolean or key.endswith(("pin_memory", "cpu_offload", "cpu_offload_param", "use_pin_memory", "_comm")):
        return _BOOLEANS
    if "perc" in key or "ratio" in key or key.endswith(("lr", "eps")):
        return _REALS
    return _NUMBERS


def drawn(seed: int) -> dict[str, Any]:
    """Return one file's values: a batch, and up to nine further keys."""
    rng = random.Random(seed)
    keys = [(key, row.kind) for row in TABLE for key in row.key.split() if key not in _NOT_DRAWN]
    is_good = rng.random() < 0.5
    flat: dict[str, Any] = dict(rng.choice(_GOOD_BATCH if is_good else _BATCH))
    batch = {key for one in _BATCH for key in one}
    for key, kind in rng.sample(keys, rng.randint(1, 9)):
        sections = {one for other in flat for one in _sections(other)}
        if key in batch or key in sections or any(one in flat for one in _sections(key)):
            continue
        if key in STRICT or key in ("optimizer", "scheduler", "aio", "activation_checkpointing", "torch_autocast"):
            continue
        values = _values(key, kind)
        if is_good and key in REMOVED:
            continue
        flat[key] = rng.choice(values[: max(2, len(values) // 2)] if is_good else values)
    if not is_good and rng.random() < 0.1:
        flat[rng.choice(("zero_optimization.stage3_prefetch", "fp16.x", "bf16.loss_scale", "zero_optimisation"))] = 1
    if not is_good and rng.random() < 0.05:
        flat = {key: value for key, value in flat.items() if not key.startswith("bf16.")} | {"bf16": True}
    return flat


def _sections(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:index]) for index in range(1, len(parts))]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return keys with dots as sections."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        at = found
        *sections, last = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return found
