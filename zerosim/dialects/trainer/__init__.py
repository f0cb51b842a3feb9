"""transformers' TrainingArguments, as 5.24 and 4.x read them. Their keys are in `keys.py`."""

from __future__ import annotations

from typing import Any

from zerosim.dialects import huggingface as hf
from zerosim.dialects.fsdp import HALVES, formats
from zerosim.dialects.huggingface import value
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.dialects.trainer import fsdp as trainer_fsdp
from zerosim.dialects.trainer.keys import REMOVED, TABLE
from zerosim.errors import did_you_mean

NEW, OLD = "transformers 5.24", "transformers 4"


def read(document: Document, context: Context) -> Reading:
    """Read the document, as transformers 4 where it has a key that 5.24 lacks, or the context says so."""
    notes = hf.notes_of(document, context, TABLE, {"fsdp_config": "fsdp_"})
    by = version_of(notes)
    unknown(notes, by)
    trained(notes, by, old=by == OLD)
    hf.walk_rest(notes)
    return notes.reading(by)


def version_of(notes: Notes) -> str:
    """Return whose rules hold, and refuse keys of transformers 4 where 5 was asked for."""
    removed = [key for key in notes.document.keys if key in REMOVED.key.split()]
    said = str(notes.document.keys.get("transformers_version", ""))
    notes.tell("transformers_version", "understood", "the version that wrote the file")
    if notes.context.older("transformers", 5) or ("transformers" not in notes.context.versions and said[:2] == "4."):
        return OLD
    if not removed:
        return NEW
    if "transformers" in notes.context.versions:
        for key in removed:
            why = f"TypeError: TrainingArguments.__init__() got an unexpected keyword argument '{key}'"
            notes.refuse(key, NEW, why, "leave it out, or read the file as transformers 4")
        return NEW
    notes.note(f"{', '.join(removed)}: gone in transformers 5.24 (TypeError), so the file is read as transformers 4")
    return OLD


def unknown(
    notes: Notes, by: str, error: str = "TypeError: TrainingArguments.__init__() got an unexpected argument"
) -> None:
    """Refuse unknown keys, except in sections that drop them."""
    for key in notes.document.keys:
        if key in notes.rows or key in notes.said:
            continue
        section, dot, name = key.partition(".")
        if key.startswith("_"):
            notes.tell(key, "ignored", "a comment")
        elif section == "fsdp_config" and dot:
            known = [one.partition(".")[2] for one in notes.rows if one.startswith("fsdp_config.")]
            hint = did_you_mean(name.removeprefix("fsdp_"), known, "no such key")
            if name.removeprefix("fsdp_") == "offload_params":
                hint = "the key is cpu_offload"
            notes.tell(key, "ignored", f"dropped without a word; {hint}")
        elif section == "deepspeed" and dot:
            notes.tell(key, "understood", "read as DeepSpeed's own file")
        elif (dot and section in notes.rows) or section.endswith("_kwargs"):
            notes.tell(key, "ignored", "its values change no step here")
        else:
            hint = did_you_mean(key, notes.rows, "leave it out")
            notes.refuse(key, by, f"{error} {key!r}", hint)


def trained(notes: Notes, by: str, *, old: bool, tuned: bool = False) -> None:
    """Read all that is the Trainer's. `old`: by the rules of transformers 4. `tuned`: there are adapters."""
    batch(notes, by)
    way = trainer_fsdp.way_of(notes)
    half = half_of(notes, by)
    if way == "fsdp":
        trainer_fsdp.fsdp(notes, by, half, tuned=tuned, old=old)
    elif way == "ddp":
        notes.sets("the Trainer without fsdp and deepspeed", stage=0, recipe="ddp")
        if (size := value(notes, "ddp_bucket_cap_mb", by)) is not None:
            notes.sets("ddp_bucket_cap_mb", bucket_bytes=size * 2**20)
    else:
        notes.sets("deepspeed", "understood", "DeepSpeed's own file says the rest", recipe="hf-deepspeed")
    key = half if half in notes.document.keys else "bf16"
    formats(notes, key or "bf16", half, way, tuned=tuned)
    for name in ("bf16", "fp16"):
        notes.tell(name, "understood", "off") if name not in notes.said else None
    tf32(notes, by)
    names = {**hf.OPTIMS, **(hf.OLD_OPTIMS if old else {})}
    hf.optimizer(notes, "optim", by, names, "adamw_torch" if old else "adamw_torch_fused")
    hf.clipping(notes, by)
    hf.schedule(notes, "lr_scheduler_type", by)
    checkpoints(notes, by, old=old)
    compiled(notes, by)
    liger(notes, by, "use_liger_kernel", loss_of(notes, old=old))
    if "flash_attn" not in notes.rows:
        hf.attention(notes, "", None)
    for key in ("eval_strategy", "logging_strategy", "save_strategy", "hub_strategy", "torch_empty_cache_steps"):
        value(notes, key, by)
    plateau = value(notes, "lr_scheduler_type", by) in ("reduce_lr_on_plateau", "greedy")
    if plateau and value(notes, "eval_strategy", by, "no") == "no" and "evaluation_strategy" not in notes.document.keys:
        name = notes.document.keys["lr_scheduler_type"]
        why = f"ValueError: lr_scheduler_type {name} requires an eval strategy"
        notes.refuse("lr_scheduler_type", by, why, "write another schedule, or eval_strategy: steps")
    if value(notes, "auto_find_batch_size", by, False):
        notes.refuse("auto_find_batch_size", "zerosim", "the batch may shrink until it fits: there is no one plan",
                     "leave it out, and let zerosim fit find the batch")  # fmt: skip


def batch(notes: Notes, by: str) -> None:
    """Set microbatch and accumulation. A flag wins, and so it also decides what follows from them."""
    micro = value(notes, "per_device_train_batch_size", by, 8)
    accumulate = value(notes, "gradient_accumulation_steps", by, 1)
    if value(notes, "accelerator_config.split_batches", by, False):
        ranks = notes.context.given.get("ranks")
        if ranks is None or micro % ranks:
            why = f"{micro} rows are divided by the ranks" + (
                "" if ranks is None else f", and {ranks} do not divide them"
            )
            notes.refuse(
                "accelerator_config.split_batches", "accelerate", why, "pass --ranks N, which divides the batch"
            )
        else:
            micro //= ranks
            notes.tell("accelerator_config.split_batches", "understood", f"{micro} rows a rank")
    for option, key, number in (("micro_batch", "per_device_train_batch_size", micro),
                                ("accumulate", "gradient_accumulation_steps", accumulate)):  # fmt: skip
        if (asked := notes.context.flag(option)) is not None:
            notes.tell(key, "understood", f"--{option.replace('_', '-')} {asked} replaces it")
        else:
            notes.sets(hf.source(notes, key, by), **{option: number})
        if isinstance(notes.document.keys.get(key), str):
            notes.note(f"{key} is text: a file's reader converts it, a dict passes it on as it is")


def half_of(notes: Notes, by: str) -> str | None:
    """Return the half type of compute, or that of --precision."""
    bf16, fp16 = value(notes, "bf16", by, False), value(notes, "fp16", by, False)
    if bf16 and fp16:
        notes.refuse("fp16", by, "ValueError: At most one of fp16 and bf16 can be True, but not both", "leave one out")
    asked = str(notes.context.flag("precision")).removesuffix("-pure")
    if not fp16 and "fp8" in notes.rows and value(notes, "fp8", by, False):  # accelerate's autocast beside fp8
        return "bf16"
    return "bf16" if bf16 else "fp16" if fp16 else asked if asked in HALVES else None


def tf32(notes: Notes, by: str) -> None:
    """Tell of TF32, which matters to fp32 products alone."""
    is_half = notes.values.get("autocast") or notes.values.get("precision", "fp32") != "fp32"
    if value(notes, "tf32", by) and not is_half:
        notes.lacks("tf32", "fp32 products in TF32", costs=True, advice="leave it out")
    else:
        notes.tell("tf32", "ignored", "no product is in fp32" if is_half else "off")


def checkpoints(notes: Notes, by: str, *, old: bool) -> None:
    """Read recomputation: in 5.24 activation_checkpointing wins over its older name, also when it is false."""
    name = "gradient_checkpointing"
    if not old and notes.document.keys.get("activation_checkpointing") is not None:
        if name in notes.document.keys:
            notes.tell(name, "ignored", "activation_checkpointing wins")
        name = "activation_checkpointing"
    said = value(notes, name, by, False)
    if (
        said
        and "fsdp_config.activation_checkpointing" in notes.document.keys
        and notes.values.get("recompute") == "full"
    ):
        why = f"ValueError: {name} in FSDP's config and in the training arguments can't both be true"
        notes.refuse(name, f"{by}, Trainer", why, "leave one of them out")
    hf.recompute(notes, name, said)
    if "use_reentrant_gc" in notes.rows:
        return
    kwargs = [key for key in notes.document.keys if key.endswith("_checkpointing_kwargs.use_reentrant")]
    is_reentrant = bool(notes.document.keys[kwargs[0]]) if kwargs else old
    hf.reentrant(notes, kwargs[0] if kwargs else f"{by}'s default", is_reentrant)


def compiled(notes: Notes, by: str) -> None:
    """Read torch_compile, which its backend or its mode switch on too."""
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    for key in (key for key in keys if key in notes.document.keys):
        if value(notes, key, by):
            notes.sets(key, kernels="compiled")
        else:
            notes.tell(key, "understood", "off")


def loss_of(notes: Notes, *, old: bool) -> str:
    """Return the loss of this version of transformers."""
    return "hf-4.45" if notes.context.older("transformers", 4, 46) else "hf-4.48" if old else "hf-5"


def liger(notes: Notes, by: str, key: str, loss: str) -> None:
    """Read Liger's switch, and which of its kernels are left out."""
    on, config = bool(value(notes, key, by, False)), notes.document.section("liger_kernel_config")
    plain = (("loss",) if config.get("fused_linear_cross_entropy") is False else ()) + (
        ("blocks",) if config.get("rms_norm") is False or config.get("swiglu") is False else ()
    )
    hf.kernels(notes, loss, liger=key if on else "", plain=plain)
    for name, said in config.items():
        notes.tell(f"liger_kernel_config.{name}", "understood" if on else "ignored", _switch(said))
    notes.tell("liger_kernel_config", "ignored", "Liger's own choice")
    if not on:
        notes.tell(key, "understood", "off")


def _switch(said: Any) -> str:
    return "on" if said else "off"
