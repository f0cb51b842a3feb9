"""axolotl's adapters, and the format of the base beside them."""

from __future__ import annotations

from zerosim.dialects.huggingface import value
from zerosim.dialects.peft import adapters, targets
from zerosim.dialects.reading import Notes


def adapter(notes: Notes, by: str) -> bool:
    """Read adapters and the format of their base. Return whether there are any."""
    keys, kind = notes.document.keys, notes.document.keys.get("adapter")
    four, eight = value(notes, "load_in_4bit", by, False), value(notes, "load_in_8bit", by, False)
    for name, on in (("load_in_4bit", four), ("load_in_8bit", eight)):
        if on and kind is None:
            why = f"ValueError: {name} is not supported without setting an adapter for training"
            notes.refuse(name, by, why, "write adapter: qlora, or leave it out")
        elif not on:
            notes.tell(name, "understood", "off")
    if kind is None:
        for key in keys:
            if key.startswith(("lora_", "peft_")):
                notes.tell(key, "ignored", "there is no adapter")
        notes.tell("adapter", "understood", "all parameters are trained")
        return False
    if kind not in ("lora", "qlora"):
        notes.lacks("adapter", f"{kind}: this adapter", costs=True, advice="write lora or qlora")
        return False
    notes.tell("adapter", "understood", "adapters beside a frozen base")
    if kind == "qlora" and not four:
        why = "ValueError: Require cfg.load_in_4bit to be True for qlora"
        notes.refuse("load_in_4bit" if "load_in_4bit" in keys else "adapter", by, why, "write load_in_4bit: true")
    if eight:
        notes.lacks("load_in_8bit", "a base in int8", costs=True, advice="write adapter: qlora and load_in_4bit: true")
    rank = value(notes, "lora_r", by)
    if rank is None:
        notes.refuse(
            "lora_r" if "lora_r" in keys else "adapter", by, "PEFT's LoraConfig needs a rank", "write lora_r: 8"
        )
        return True
    everything = value(notes, "lora_target_linear", by, False)
    said = keys.get("lora_target_modules")
    found = None
    if everything:
        found = "all-linear"
        notes.note("lora_target_linear: every linear map but the head")
    elif said is not None:
        found = targets(notes, "lora_target_modules", said)
    adapters(
        notes, rank=("lora_r", rank), alpha=("lora_alpha", value(notes, "lora_alpha", by, 8.0)),
        dropout=("lora_dropout", value(notes, "lora_dropout", by, 0.0)),
        target=("lora_target_linear" if everything else "lora_target_modules", found),
        rslora=value(notes, "peft_use_rslora", by, False),
    )  # fmt: skip
    if everything and said is not None:
        notes.tell("lora_target_modules", "understood", "of every linear map there are adapters")
    if four:
        notes.sets("load_in_4bit", base="nf4")
    if value(notes, "lora_modules_to_save", by):
        notes.lacks("lora_modules_to_save", "copies of whole modules that are trained")
    fused = [value(notes, f"lora_{name}_kernel", by, False) for name in ("mlp", "qkv", "o")]
    for name, on in zip(("mlp", "qkv", "o"), fused, strict=True):
        key = f"lora_{name}_kernel"
        if all(fused):
            notes.sets(key, fused_lora=True)
        elif on:
            notes.lacks(key, "adapters that are fused for some maps only", advice="switch on all three, or none")
        else:
            notes.tell(key, "understood", "off")
    return True
