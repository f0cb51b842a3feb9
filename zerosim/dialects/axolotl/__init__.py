"""axolotl's YAML, as 067b021 reads it: the Trainer's numbers under its own names. Its keys are in `keys.py`."""

from __future__ import annotations

from typing import Any

from zerosim.dialects import huggingface as hf
from zerosim.dialects import trainer
from zerosim.dialects.accelerate.fp8 import SKIPPED
from zerosim.dialects.accelerate.keys import STRATEGIES
from zerosim.dialects.axolotl import loss as axolotl_loss
from zerosim.dialects.axolotl.adapters import adapter
from zerosim.dialects.axolotl.keys import TABLE
from zerosim.dialects.fp8 import RECIPES, check_codes, gathers_codes
from zerosim.dialects.fsdp import Fsdp, formats, shard
from zerosim.dialects.huggingface import value
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.errors import did_you_mean

BY = "axolotl 067b021"
READ_AS = f"{BY} with transformers 5.14.1 and accelerate 1.13.0"


def read(document: Document, context: Context) -> Reading:
    """Read the document."""
    notes = hf.notes_of(document, context, TABLE, {"fsdp_config": "fsdp_"})
    hf.model(notes, "base_model")
    _batch(notes)
    tuned = adapter(notes, BY)
    way = _way(notes)
    half = _half(notes)
    _eight_bits(notes, way)
    formats(notes, "fp16" if half == "fp16" else "bf16", half, way, tuned=tuned, pure=not tuned)
    if way == "fsdp":
        _fsdp(notes, half, tuned=tuned)
    elif way == "ddp":
        notes.sets("axolotl without fsdp and deepspeed", stage=0, recipe="ddp")
    else:
        notes.sets("deepspeed", "understood", "DeepSpeed's own file says the rest", recipe="hf-deepspeed")
    trainer.tf32(notes, BY)
    names = {**hf.OPTIMS, **hf.OLD_OPTIMS, "muon": {"optimizer": "muon", "foreach": False}}
    hf.optimizer(notes, "optimizer", BY, names, "adamw_torch_fused")
    _check_optimizer(notes, way)
    hf.clipping(notes, BY)
    hf.schedule(notes, "lr_scheduler", BY)
    _activations(notes)
    _mesh(notes, way)
    axolotl_loss.losses(notes, BY)
    _unknown(notes)
    check_codes(notes)
    hf.walk_rest(notes)
    return notes.reading(READ_AS)


def _batch(notes: Notes) -> None:
    names = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    micro, accumulate, whole = (value(notes, name, BY) for name in names)
    asked = {name: notes.context.flag(name) for name in ("micro_batch", "accumulate")}
    if sum(one is not None for one in (micro, accumulate, whole)) < 2 and None in asked.values():
        why = "ValueError: At least two of [micro_batch_size, gradient_accumulation_steps, batch_size] must be set"
        notes.refuse(
            next((name for name in names if name in notes.document.keys), names[0]), BY, why, f"add {names[1]}"
        )
    if accumulate is not None and whole is not None:
        why = "ValueError: please set only one of gradient_accumulation_steps or batch_size"
        notes.refuse("batch_size", BY, why, "leave one of them out")
    elif whole is not None and micro is None:
        micro = max(1, whole // (accumulate or 1))
    elif whole is not None:
        accumulate = max(1, whole // micro)
        notes.tell("batch_size", "understood", f"accumulate {accumulate}: batch_size // micro_batch_size")
    for option, key, number in (("micro_batch", names[0], micro), ("accumulate", names[1], accumulate)):
        if asked[option] is not None:
            notes.tell(key, "understood", f"--{option.replace('_', '-')} {asked[option]} replaces it")
        else:
            notes.sets(key if key in notes.document.keys else "batch_size", "understood", "", **{option: number or 1})
    if "seq" in notes.context.given:
        notes.tell("sequence_len", "understood", "--seq replaces it")
    else:
        notes.sets(hf.source(notes, "sequence_len", BY), seq=value(notes, "sequence_len", BY, 512))
    packs = value(notes, "sample_packing", BY, False)
    for name in ("sample_packing", "pad_to_sequence_len"):
        notes.tell(name, "understood", "rows are full" if packs else "rows are padded to the longest: seq is the limit")
    if packs:
        notes.note("micro_batch_size counts rows of sequence_len tokens, packed full")


def _way(notes: Notes) -> str:
    keys = notes.document.keys
    on = bool(keys.get("fsdp")) or bool(keys.get("fsdp_config")) or any(key.startswith("fsdp_config.") for key in keys)
    has_deepspeed = keys.get("deepspeed") not in (None, "") or bool(notes.document.section("deepspeed"))
    if on and has_deepspeed:
        notes.refuse("deepspeed", BY, "ValueError: deepspeed and fsdp cannot be used together", "leave one of them out")
    return "deepspeed" if has_deepspeed else "fsdp" if on else "ddp"


def _half(notes: Notes) -> str | None:
    bf16, fp16 = value(notes, "bf16", BY, "auto"), value(notes, "fp16", BY, False)
    notes.tell("fp16", "understood", "off") if not fp16 else None
    if fp16:
        notes.tell("bf16", "understood", "fp16 is on")
        return "fp16"
    notes.tell("bf16", "understood", "off") if not bf16 else None
    if bf16 == "auto":
        notes.note("bf16: auto is bf16 on GPUs that have it, Ampere and newer")
    return "bf16" if bf16 or value(notes, "fp8", BY, False) else None


def _eight_bits(notes: Notes, way: str) -> None:
    """Set torchao's products, which axolotl passes to the Accelerator (core/trainers/base.py)."""
    gather, recipe = "fp8_enable_fsdp_float8_all_gather", value(notes, "fp8_config.recipe", BY, "tensorwise")
    gathers = value(notes, gather, BY, False)
    if gathers and (way != "fsdp" or str(notes.document.keys.get("fsdp_version")) != "2"):
        why = "ValueError: fp8_enable_fsdp_float8_all_gather requires FSDP2 (fsdp_version: 2) to be used."
        notes.refuse(gather, BY, why, "write fsdp_version: 2, or leave it out")
    if not value(notes, "fp8", BY, False):
        notes.tell("fp8", "understood", "off")
        for key in ("fp8_config.recipe", gather):
            notes.tell(key, "ignored", "without fp8")
        return
    notes.sets("fp8", **RECIPES[recipe])
    notes.tell("fp8_config.recipe", "understood", recipe)
    if gathers and recipe != "tensorwise":
        why = "ValueError: fp8_enable_fsdp_float8_all_gather only supports the tensorwise recipe"
        notes.refuse(gather, BY, why, "leave it out beside rowwise")
    elif way == "fsdp" and gather not in notes.said:
        gathers_codes(notes, gather, is_on=gathers)
    notes.note(SKIPPED)


def _fsdp(notes: Notes, half: str | None, *, tuned: bool) -> None:
    keys = {key.partition(".")[2].removeprefix("fsdp_"): key for key in notes.document.keys if "fsdp_config." in key}
    if notes.document.keys.get("fsdp_version") is not None:
        keys["version"] = "fsdp_version"

    def said(name: str, otherwise: Any) -> Any:
        return value(notes, keys.get(name, ""), BY, otherwise)

    listed = notes.document.keys.get("fsdp") or []
    words = listed.split() if isinstance(listed, str) else [str(word) for word in listed]
    notes.tell("fsdp", "understood", " ".join(words))
    if "version" not in keys:
        notes.note("without fsdp_version this is FSDP1")
    if words or any("fsdp_config.fsdp_" in key for key in keys.values()):
        notes.note("axolotl deprecates the list fsdp, and the prefix fsdp_ in fsdp_config")
    version = int(said("version", 1))
    strategy = next((word.upper() for word in words if word.upper() in STRATEGIES), "FULL_SHARD")
    if version == 2:
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch"):
            notes.tell(keys.get(name, ""), "ignored", "only version 1 reads it")
    else:
        notes.tell(keys.get("reshard_after_forward", ""), "ignored", "in version 1 the sharding strategy wins")
    read = Fsdp(
        version=version, strategy=said("sharding_strategy", strategy) if version == 1 else "",
        reshard=said("reshard_after_forward", True) if version == 2 else True,
        wrap=said("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"), offload=said("offload_params", "offload" in words),
        early=said("backward_prefetch", "NO_PREFETCH") if version == 1 else "NO_PREFETCH",
        forward=version == 1 and said("forward_prefetch", False), recompute=said("activation_checkpointing", False),
        first=said("cpu_ram_efficient_loading", None),
    )  # fmt: skip
    spelled = {**keys, "offload": keys.get("offload_params", "fsdp"), "half": half or "bf16"}
    spelled.setdefault("sharding_strategy", "fsdp")
    shard(notes, spelled, read, half, tuned=tuned)
    if read.offload and not said("cpu_offload_pin_memory", True):
        notes.sets(keys["cpu_offload_pin_memory"], pin_memory=False)
    if notes.values.get("base") == "nf4":
        notes.note("under FSDP the 4-bit codes are stored as bf16, so that they can be sharded")
    for name in ("offload_params", "activation_checkpointing", "forward_prefetch", "min_num_params",
                 "cpu_offload_pin_memory"):  # fmt: skip
        if keys.get(name, "") not in notes.said:
            notes.tell(keys.get(name, ""), "understood", "off")


def _check_optimizer(notes: Notes, way: str) -> None:
    name, values = str(notes.document.keys.get("optimizer") or ""), notes.values
    if way == "fsdp" and values.get("offload") and "8bit" in name:
        why = "ValueError: FSDP offload is not compatible with an 8-bit optimizer"
        notes.refuse("optimizer", BY, why, "write adamw_torch_fused")
    elif values.get("recipe") == "fsdp2" and name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        why = f"ValueError: FSDP2 is not compatible with {name}, use adamw_torch_8bit instead"
        notes.refuse("optimizer", BY, why, "write adamw_torch_8bit")
    elif name == "muon" and (way == "deepspeed" or values.get("recipe") == "fsdp1"):
        notes.refuse("optimizer", BY, "ValueError: Muon optimizer is not compatible with DeepSpeed and FSDP1",
                     "write fsdp_version: 2")  # fmt: skip


def _activations(notes: Notes) -> None:
    form = value(notes, "gradient_checkpointing", BY, False)
    moved = value(notes, "activation_offloading", BY, False)
    if form in ("offload_disk",) or moved == "disk":
        name = "gradient_checkpointing" if form == "offload_disk" else "activation_offloading"
        notes.lacks(name, "activations on a drive", costs=True, advice="write activation_offloading: true")
        return
    hf.recompute(notes, "gradient_checkpointing", bool(form))
    if moved or form in ("offload", "unsloth"):
        name = "activation_offloading" if moved else "gradient_checkpointing"
        again = notes.values.get("recompute") == "full"
        notes.sets(name, "understood", "", **({"cpu_checkpointing": True} if again else {"offload_activations": True}))
    else:
        notes.tell("activation_offloading", "understood", "off")
    key = "gradient_checkpointing_kwargs.use_reentrant"
    hf.reentrant(notes, key, bool(notes.document.keys.get(key, False)))


def _mesh(notes: Notes, way: str) -> None:
    tp, replicas = value(notes, "tensor_parallel_size", BY), value(notes, "dp_replicate_size", BY)
    name = "context_parallel_size" if "context_parallel_size" in notes.document.keys else "sequence_parallel_degree"
    cp = value(notes, name, BY)
    if tp is not None:
        notes.sets("tensor_parallel_size", tp=tp)
    if replicas is not None and way == "fsdp":
        notes.sets("dp_replicate_size", dp_replicate=replicas)
    notes.tell("dp_replicate_size", "understood", "replicas")
    notes.tell("dp_shard_size", "understood", "what the other sizes leave of the ranks")
    if cp is None or cp == 1:
        notes.tell(name, "understood", "rows are whole")
        return
    micro = notes.context.given.get("micro_batch", notes.values.get("micro_batch", 1))
    if micro != 1:
        notes.refuse(name, BY, f"ValueError: micro_batch_size must be set to 1 with {name}, but is {micro}",
                     "write micro_batch_size: 1")  # fmt: skip
    packs = value(notes, "sample_packing", BY, False)
    notes.sets(name, "understood", "ring-flash-attn", cp=cp, context="allgather" if packs else "ring")


def _unknown(notes: Notes) -> None:
    for key in notes.document.keys:
        section = key.partition(".")[0]
        if key in notes.rows or key in notes.said:
            continue
        if section in notes.rows or (section != "fsdp_config" and key != section):
            notes.tell(key, "ignored", "changes no step")
        else:
            hint = did_you_mean(key, notes.rows, "not known here")
            notes.tell(key, "ignored", f"axolotl passes unknown keys without a word; {hint}")
