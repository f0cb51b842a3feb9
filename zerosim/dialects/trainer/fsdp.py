"""FSDP and DeepSpeed in TrainingArguments."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.accelerate.keys import STRATEGIES
from zerosim.dialects.fsdp import Fsdp, shard
from zerosim.dialects.reading import Notes
from zerosim.dialects.rows import boolean

DEPRECATED = "fsdp as text or a list is deprecated, and gone in transformers 5.20: write fsdp: true and fsdp_config"
PREFIX = "fsdp_config drops accelerate's names, such as offload_params and sharding_strategy, without a word"


def way_of(notes: Notes) -> str:
    """Return what wraps the model: fsdp, deepspeed or ddp. Both are refused."""
    keys = notes.document.keys
    has_deepspeed = keys.get("deepspeed") not in (None, "", {}) or bool(notes.document.section("deepspeed"))
    on = bool(keys.get("fsdp")) and str(keys["fsdp"]).lower() not in ("false", "")
    if on and has_deepspeed:
        why = "ValueError: Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags"
        notes.refuse("deepspeed" if "deepspeed" in keys else "fsdp", "transformers 5.24", why, "leave one of them out")
    if not on:
        for key in keys:
            if key == "fsdp" or key.startswith("fsdp_config"):
                notes.tell(key, "ignored", "fsdp is off")
    return "deepspeed" if has_deepspeed else "fsdp" if on else "ddp"


def fsdp(notes: Notes, by: str, half: str | None, *, tuned: bool, old: bool) -> None:
    """Read `fsdp` and `fsdp_config`."""
    keys = {key.partition(".")[2].removeprefix("fsdp_"): key for key in notes.document.keys if "fsdp_config." in key}

    def value(name: str, otherwise: Any) -> Any:
        key = keys.get(name, "")
        found = notes.checked(key, by) if notes.document.keys.get(key) is not None else None
        return otherwise if found is None else found

    if isinstance(notes.document.keys.get("fsdp_config"), str):
        notes.refuse("fsdp_config", "zerosim", "names a file: not read", "write its keys under fsdp_config")
    version = int(value("version", 1 if old else 2))
    words = _words(notes, by, version, old=old)
    offload = value("cpu_offload", "offload" in words)
    strategy = next((word.upper() for word in words if word.upper() in STRATEGIES), "FULL_SHARD")
    reshard = notes.document.keys.get(keys.get("reshard_after_forward", ""), strategy != "SHARD_GRAD_OP")
    if version == 2:
        try:
            reshard = boolean(reshard)
        except ValueError:
            why = f"ValueError: invalid truth value {str(reshard).lower()}"
            notes.refuse(keys["reshard_after_forward"], by, why, "write true or false")
            reshard = True
    elif not old:
        if strategy != "FULL_SHARD" or "reshard_after_forward" in keys:
            lost = keys.get("reshard_after_forward", "fsdp")
            notes.note(f"{lost}: in version 1 accelerate's FULL_SHARD wins, unless FSDP_SHARDING_STRATEGY is in the "
                       "environment")  # fmt: skip
            if lost != "fsdp":
                notes.tell(lost, "ignored", "FULL_SHARD wins in version 1")
        strategy = "FULL_SHARD"
    for name in ("sharding_strategy", "offload_params"):
        if name in keys:
            notes.note(PREFIX)
    if version == 2:
        for name in ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params",
                     "limit_all_gathers"):  # fmt: skip
            notes.tell(keys.get(name, ""), "ignored", "only version 1 reads it")
    else:
        for name in ("sync_module_states", "use_orig_params", "limit_all_gathers"):
            value(name, True)
    first = value("cpu_ram_efficient_loading", False)
    early = value("backward_prefetch", "NO_PREFETCH") if version == 1 else "NO_PREFETCH"
    read = Fsdp(
        version=version, strategy=strategy, reshard=bool(reshard), offload=offload, early=early,
        wrap=value("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        forward=version == 1 and value("forward_prefetch", False), recompute=value("activation_checkpointing", False),
        first=first if "cpu_ram_efficient_loading" in keys else None,
    )  # fmt: skip
    spelled = {**keys, "offload": keys.get("cpu_offload", "fsdp"), "half": half or "bf16"}
    spelled.setdefault("sharding_strategy", "fsdp")
    spelled.setdefault("reshard_after_forward", "fsdp")
    shard(notes, spelled, read, half, tuned=tuned)
    for name, words_ in (("cpu_offload", "off"), ("activation_checkpointing", "off"), ("forward_prefetch", "off"),
                         ("min_num_params", "only SIZE_BASED_WRAP reads it")):  # fmt: skip
        if keys.get(name, "") not in notes.said:
            notes.tell(keys.get(name, ""), "understood", words_)


def _words(notes: Notes, by: str, version: int, *, old: bool) -> list[str]:
    """Return the words of an `fsdp` that is text or a list."""
    said = notes.document.keys["fsdp"]
    if not isinstance(said, str | list) or str(said).lower() in ("true", "1", "yes"):
        notes.tell("fsdp", "understood", "on")
        return []
    words = said.split() if isinstance(said, str) else [str(word) for word in said]
    if not old:
        notes.note(DEPRECATED)
    for word in words:
        if word.upper() in STRATEGIES:
            if version == 2 and word not in ("full_shard", "shard_grad_op"):
                why = f"ValueError: `fsdp={word}` is only available with FSDP1"
                notes.refuse("fsdp", by, why, "set fsdp_config.version: 1")
        elif word not in ("offload", "auto_wrap"):
            notes.refuse("fsdp", by, f"ValueError: Unknown `fsdp` option: {word}", "write full_shard auto_wrap")
    notes.tell("fsdp", "understood", " ".join(words))
    return words
