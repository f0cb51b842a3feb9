"""Exercise 43: what the Trainer makes of "auto"."""

from __future__ import annotations

from typing import Any


def my_auto(
    config: dict[str, Any],
    hidden: int,
    micro: int,
    accumulate: int,
    ranks: int,
) -> tuple[dict[str, Any], list[str]]:
    batch = {
        "train_batch_size": micro * accumulate * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate,
    }
    rules = {
        **batch,
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }

    def filled(section: dict[str, Any]) -> dict[str, Any]:
        return {key: rules[key] if value == "auto" else value for key, value in section.items()}

    zero = filled(config["zero_optimization"])
    unequal = [key for key in batch if config.get(key, "auto") not in ("auto", batch[key])]
    return {**filled(config), "zero_optimization": zero}, unequal
