"""Which framework's file it is: by its keys, never by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zerosim.errors import InputError

_BY_KEY = (
    ("accelerate", "distributed_type compute_environment"),
    ("deepspeed", "zero_optimization train_batch_size train_micro_batch_size_per_gpu"),
    ("axolotl", "base_model"),
    ("llamafactory", "finetuning_type model_name_or_path"),
    ("trainer", "fsdp fsdp_config per_device_train_batch_size output_dir deepspeed"),
)
"""By dialect, top-level keys of which it has one. The first row that a file meets names it."""
_TITAN = ("parallelism", "activation_checkpoint", "lr_scheduler", "training", "job")
_PRECISION = ("fp16", "bf16", "optimizer")
LAUNCH, WHOLE = "# zerosim: ", "# zerosim alone: "
"""Begin the line of a launch script (`writing.py`): options that no key of the file beside it says; or all of them,
beside a page of Python, which nobody here reads."""
NAMES = {
    "deepspeed": "DeepSpeed's JSON",
    "accelerate": "accelerate's YAML",
    "trainer": "TrainingArguments",
    "axolotl": "axolotl's YAML",
    "llamafactory": "LLaMA-Factory's YAML",
    "torchtitan": "torchtitan's TOML",
    "megatron": "Megatron-LM's command line",
}


def dialect_of(path: str, values: Any) -> str:
    """Return the dialect of a parsed file; '' for zerosim's own. Raises: InputError for an unknown one."""
    if isinstance(values, str):
        if re.search(rf"^({LAUNCH}|{WHOLE})", values, re.MULTILINE):
            return "launch"
        if re.search(r"--[a-z][a-z_-]*[_-]size\b", values):
            return "megatron"
        if path.endswith(".py"):
            raise InputError(f"{path}: Python is never executed; pass the .launch.sh beside it alone")
        raise InputError(f"{path}: {_unknown()}")
    if not isinstance(values, Mapping):
        raise InputError(f"{path}: holds no keys; {_unknown()}")
    if path.endswith(".toml"):
        return "torchtitan" if any(isinstance(values.get(name), Mapping) for name in _TITAN) else ""
    if "schema" in values and "config" in values:
        return ""
    if isinstance(values.get("MODEL_ARGS"), Mapping):
        return "megatron"
    for dialect, keys in _BY_KEY:
        if any(key in values for key in keys.split()):
            return dialect
    if "model_type" in values or "architectures" in values:
        raise InputError(f"{path}: is a model's config.json; pass it as --model {path}")
    if path.endswith(".json") and any(isinstance(values.get(name), Mapping) for name in _PRECISION):
        return "deepspeed"
    raise InputError(f"{path}: {_unknown()}")


def _unknown() -> str:
    return f"not a file that is read here: zerosim's own TOML and JSON, {', '.join(NAMES.values())}"
