"""LLaMA-Factory's YAML: TrainingArguments, and its own keys (`keys.py`)."""

from __future__ import annotations

from zerosim.dialects import huggingface as hf
from zerosim.dialects import trainer
from zerosim.dialects.fp8 import check_codes
from zerosim.dialects.huggingface import value
from zerosim.dialects.llamafactory.fp8 import eight_bits
from zerosim.dialects.llamafactory.keys import TABLE
from zerosim.dialects.peft import adapters, targets
from zerosim.dialects.reading import Context, Document, Notes, Reading

BY = "LLaMA-Factory ff6d4d1"
READ_AS = f"{BY} with transformers <= 5.8 and accelerate <= 1.11"


def read(document: Document, context: Context) -> Reading:
    """Read the document."""
    notes = hf.notes_of(document, context, TABLE, {"fsdp_config": "fsdp_"})
    trainer.unknown(notes, BY, "ValueError: Some keys are not used by the HfArgumentParser:")
    hf.model(notes, "model_name_or_path")
    _training_stage(notes)
    way = "" if document.keys.get("finetuning_type") is None else str(document.keys["finetuning_type"])
    kind = way or "lora"
    if kind == "lora":
        _lora(notes)
    elif kind == "freeze":
        _freeze(notes)
    elif kind == "full":
        notes.tell("finetuning_type", "understood", "all parameters are trained")
    else:
        notes.lacks("finetuning_type", f"{kind}: this method", costs=True, advice="write lora, full or freeze")
    _base(notes, kind)
    trainer.trained(notes, BY, old=False, tuned=kind == "lora")
    _pure(notes, kind)
    eight_bits(notes)
    _activations(notes, kind)
    _optimizers(notes, kind)
    _length(notes)
    check_codes(notes)
    hf.walk_rest(notes)
    return notes.reading(READ_AS)


def _training_stage(notes: Notes) -> None:
    stage = value(notes, "stage", BY, "sft")
    if stage in ("rm", "ppo", "dpo", "kto"):
        why = f"{stage} trains with further models or another loss: not modelled, and it changes bytes, seconds"
        notes.refuse("stage", "zerosim", why, "write sft or pt")
    else:
        notes.tell("stage", "understood", f"{stage} is the training stage, never ZeRO's")


def _lora(notes: Notes) -> None:
    source = "finetuning_type" if notes.document.keys.get("finetuning_type") else f"{BY}'s default lora"
    rank = value(notes, "lora_rank", BY, 8)
    alpha = value(notes, "lora_alpha", BY) or 2 * rank
    if "lora_alpha" not in notes.document.keys:
        notes.note("without lora_alpha it is 2 x lora_rank")
    adapters(
        notes, rank=(hf.source(notes, "lora_rank", BY), rank), alpha=(hf.source(notes, "lora_alpha", BY), alpha),
        dropout=(hf.source(notes, "lora_dropout", BY), value(notes, "lora_dropout", BY, 0.0)),
        target=("lora_target", targets(notes, "lora_target", notes.document.keys.get("lora_target", "all"))),
        rslora=value(notes, "use_rslora", BY, False),
    )  # fmt: skip
    notes.tell("use_rslora", "understood", "the scale of adapters")
    notes.tell(source, "understood", "adapters")
    if value(notes, "additional_target", BY):
        notes.lacks("additional_target", "copies of other modules that are trained whole")


def _freeze(notes: Notes) -> None:
    """Freeze all but the last layers, or the first ones where the number is negative."""
    number = value(notes, "freeze_trainable_layers", BY, 2)
    for key, usual in (("freeze_trainable_modules", "all"), ("freeze_extra_modules", None)):
        if value(notes, key, BY, usual) != usual:
            notes.lacks(key, "trained parts of blocks, or beside them", advice="pass --freeze PATTERN,...")
        else:
            notes.tell(key, "understood", "whole blocks")
    sizes = notes.context.sizes
    if sizes is None and "model" in notes.values:
        from zerosim.config import RunConfig

        sizes = RunConfig(model=notes.values["model"], ranks=1)
    if sizes is None:
        notes.refuse("finetuning_type", "zerosim", "freeze counts layers from the model's end", "pass --model")
        return
    layers = sizes.model.layers
    blocks = range(max(0, layers - number), layers) if number > 0 else range(min(layers, -number))
    stack = "h" if sizes.model.family == "gpt" else "layers"
    notes.sets("finetuning_type", freeze=",".join(("*", *(f"!{stack}.{block}" for block in blocks))))
    notes.tell("freeze_trainable_layers", "understood", f"{len(blocks)} blocks are trained")


def _base(notes: Notes, kind: str) -> None:
    bits = value(notes, "quantization_bit", BY)
    method = str(notes.document.keys.get("quantization_method") or "bnb").lower()
    if bits is None:
        return
    if kind not in ("lora", "oft"):
        why = "ValueError: Quantization is only compatible with the LoRA or OFT method"
        notes.refuse("quantization_bit", BY, why, "write finetuning_type: lora")
    elif bits == 4 and method in ("bnb", "bitsandbytes") and value(notes, "quantization_type", BY, "nf4") == "nf4":
        notes.sets("quantization_bit", base="nf4")
    else:
        notes.lacks("quantization_bit", f"a base of {bits} bits by {method}", costs=True, advice="write 4, with nf4")
    for key in ("quantization_method", "quantization_type", "double_quantization"):
        notes.tell(key, "understood", "the base's codes")


def _pure(notes: Notes, kind: str) -> None:
    if not value(notes, "pure_bf16", BY, False):
        notes.tell("pure_bf16", "understood", "trained parameters are fp32")
        return
    if notes.values.get("recipe") == "hf-deepspeed":
        notes.lacks("pure_bf16", "bf16 without masters under DeepSpeed (a ValueError with ZeRO-3)")
        return
    if value(notes, "bf16", BY, False) or value(notes, "fp16", BY, False):
        notes.note("pure_bf16 beside bf16 or fp16: weights and states are bf16, and products are autocast")
    notes.sets("pure_bf16", precision="bf16-pure", **({"adapter_dtype": "bf16"} if kind == "lora" else {}))
    for name in ("autocast", "compress", "loss_scale", "skip_nonfinite"):
        notes.values.pop(name, None)


def _activations(notes: Notes, kind: str) -> None:
    off = value(notes, "disable_gradient_checkpointing", BY, False)
    if not off and "recompute" not in notes.values:
        notes.sets(hf.source(notes, "disable_gradient_checkpointing", BY), recompute="full")
        notes.note("LLaMA-Factory recomputes blocks unless disable_gradient_checkpointing is true")
    notes.tell(
        "disable_gradient_checkpointing", "understood", "nothing is recomputed" if off else "blocks are recomputed"
    )
    hf.reentrant(notes, "use_reentrant_gc", value(notes, "use_reentrant_gc", BY, True))
    trainer.liger(notes, BY, "enable_liger_kernel", "hf-5")
    hf.attention(notes, "flash_attn", notes.document.keys.get("flash_attn"))
    if value(notes, "use_unsloth", BY, False):
        lora = {"fused_lora": True} if kind == "lora" else {}
        notes.sets("use_unsloth", "understood", "the nearest", loss="chunked", kernels="fused", **lora)
    elif "use_unsloth" in notes.document.keys:
        notes.tell("use_unsloth", "understood", "off")
    if value(notes, "upcast_layernorm", BY, False):
        if notes.values.get("base") and notes.values.get("autocast"):
            notes.sets("upcast_layernorm", prepare_kbit=True)
        else:
            notes.lacks("upcast_layernorm", "norms in fp32 beside blocks in a half type")


def _optimizers(notes: Notes, kind: str) -> None:
    layerwise = [key for key in ("use_galore", "use_apollo", "use_badam") if value(notes, key, BY, False)]
    if kind == "lora" and layerwise:
        why = "ValueError: Cannot use LoRA with GaLore, APOLLO or BAdam together."
        notes.refuse(layerwise[0], BY, why, "write finetuning_type: full, or leave it out")
    if value(notes, "use_muon", BY, False):
        notes.sets("use_muon", optimizer="muon", foreach=False)
    else:
        notes.tell("use_muon", "understood", "off")


def _length(notes: Notes) -> None:
    packs = value(notes, "packing", BY, notes.document.keys.get("stage") == "pt") or value(
        notes, "neat_packing", BY, False
    )
    if "seq" not in notes.context.given:
        notes.sets(hf.source(notes, "cutoff_len", BY), seq=value(notes, "cutoff_len", BY, 2048))
    else:
        notes.tell("cutoff_len", "understood", "--seq replaces it")
    for key in ("packing", "neat_packing"):
        notes.tell(key, "understood", "rows are full" if packs else "rows are padded to the longest: seq is the limit")
    if not packs:
        notes.note("rows are not packed: a batch is as long as its longest row, and seq is the limit (cutoff_len)")
