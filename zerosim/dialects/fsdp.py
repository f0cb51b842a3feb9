"""FSDP as accelerate sets it up, and the formats under it, DDP and DeepSpeed: what accelerate, TrainingArguments,
axolotl and LLaMA-Factory share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.dialects.reading import Context, Notes

HALVES = ("bf16", "fp16")
REDUCED = (
    "accelerate sends gradients in {half}, the format of the parameters, and stores their shards in fp32; "
    "torchtitan sends fp32"
)
REPLICAS = "FSDP averages replicas in the format that it reduces in; zerosim counts fp32, twice the bytes of half types"
UPCAST = "accelerate casts trained parameters to fp32 before it shards them"
NO_SYNC = (
    "accelerate accumulates under no_sync: every rank holds whole gradients between microbatches "
    "(--grad-sync reduces each of them)"
)
BLOCKS = "without fsdp_transformer_layer_cls_to_wrap, units are the model's _no_split_modules: its blocks"


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """What a file says of FSDP, after its framework's own rules.

    strategy  of version 1: FULL_SHARD and the others
    reshard   of version 2: whether a unit is freed after forward
    early     of version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH
    forward   of version 1: whether forward prefetches
    first     whether rank 0 alone loads the weights; None where the file does not say
    """

    version: int
    strategy: str = "FULL_SHARD"
    reshard: bool = True
    wrap: str = "TRANSFORMER_BASED_WRAP"
    offload: bool = False
    early: str = "NO_PREFETCH"
    forward: bool = False
    recompute: bool = False
    recompute_offload: bool = False
    first: bool | None = None


def half_of(context: Context) -> str | None:
    """Return the half type that a file read before, or a flag, computes in."""
    before = {} if context.before is None else context.before.values
    for one in (context.given.get("precision"), before.get("autocast"), before.get("precision")):
        name = str(one).removesuffix("-pure")
        if name in HALVES:
            return name
    return None


def formats(notes: Notes, key: str, half: str | None, way: str, *, tuned: bool, pure: bool = False) -> None:
    """Set the formats of weights, gradients and adapters. `way`: ddp, fsdp or deepspeed. `pure`: DDP's weights are in
    the half type too, not only its products."""
    asked, values = notes.context.flag("precision"), dict[str, Any]()
    wide = tuned and way != "deepspeed"
    stored = half if half and (tuned or way != "ddp") else f"{half}-pure" if half == "bf16" and pure else "fp32"
    values["precision"] = asked or stored
    casts = half if wide or (way == "ddp" and half and stored == "fp32") else None
    if casts and asked in (None, stored):
        values["autocast"] = casts
    elif notes.context.given.get("autocast"):
        values["autocast"] = None
    if wide or (tuned and half):
        values["adapter_dtype"] = "fp32" if wide else half
    if casts == "fp16" and not tuned:
        values |= {"loss_scale": "dynamic", "skip_nonfinite": True}
    if asked is not None:
        del values["precision"]
    words = f"autocast over {values.get('precision', asked)} weights" if values.get("autocast") else ""
    notes.sets(key, "understood", words, **values)
    if values.get("autocast") and way == "ddp" and not tuned:
        notes.note(
            f"mixed precision without FSDP or DeepSpeed is autocast: fp32 weights, cast to {half} for each product. "
            "If the script loads bf16 weights: --precision bf16-pure"
        )


def shard(notes: Notes, keys: Mapping[str, str], fsdp: Fsdp, half: str | None, *, tuned: bool) -> None:
    """Set ZeRO stage, recipe and all that accelerate's FSDP implies. `keys`: the spelling in this file, by name
    without prefix."""

    asked = notes.context.flag("precision")
    half = half if asked is None or asked.removesuffix("-pure") in HALVES else None

    def key(name: str) -> str:
        return keys.get(name, "accelerate's FSDP")

    notes.sets(key("version"), recipe="fsdp1" if fsdp.version == 1 else "fsdp2")
    if fsdp.version == 1:
        _of_version_1(notes, keys, fsdp)
    else:
        notes.sets(key("reshard_after_forward"), stage=3)
        if not fsdp.reshard:
            notes.sets(key("reshard_after_forward"), reshard_after_forward=False)
    if notes.values.get("stage") == 0:
        return
    if half and fsdp.version == 2 and not tuned:
        notes.sets(keys.get("half", "accelerate's FSDP"), compress=half)
    if half and not tuned:
        notes.note(REDUCED.format(half=half))
        notes.note(UPCAST)
    if fsdp.offload:
        where = "optimizer=host,params=host" if notes.values.get("stage") == 3 else "optimizer=host"
        notes.sets(key("offload"), offload=where, pin_memory=True)
    if fsdp.recompute:
        notes.sets(key("activation_checkpointing"), recompute="full")
        if fsdp.version == 1:
            notes.sets("FSDP's own checkpoints", use_reentrant=False)
    if fsdp.recompute_offload:
        notes.sets(key("activation_checkpointing_offload"), cpu_checkpointing=True)
    if fsdp.first is not None:
        notes.sets(key("cpu_ram_efficient_loading"), host_load="first" if fsdp.first else "every")
    _units(notes, key("auto_wrap_policy"), fsdp.wrap, key("transformer_layer_cls_to_wrap"))
    if (notes.values.get("accumulate") or notes.context.given.get("accumulate") or 1) > 1:
        notes.sets("accelerate's no_sync", grad_sync=False)
        notes.note(NO_SYNC)
    notes.usually("PyTorch makes states in the first step", lazy_states=True)


def _of_version_1(notes: Notes, keys: Mapping[str, str], fsdp: Fsdp) -> None:
    name = keys.get("sharding_strategy", "accelerate's FSDP")
    if fsdp.strategy == "NO_SHARD":
        notes.sets(name, "understood", "all is whole on every rank, as under DDP", stage=0, recipe="ddp")
        return
    stage = 2 if fsdp.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else 3
    notes.sets(name, stage=stage)
    if fsdp.strategy.startswith("HYBRID"):
        ranks, node = (notes.values.get(one) or notes.context.given.get(one) for one in ("ranks", "ranks_per_node"))
        machines = ranks // node if ranks and node else 1
        notes.sets(name, "understood", "a replica a machine", dp_replicate=machines)
        notes.note(REPLICAS)
    if stage == 3:
        prefetches = fsdp.early == "BACKWARD_PRE"
        notes.sets(keys.get("backward_prefetch", "accelerate's FSDP"), prefetch=int(prefetches))
        if prefetches and fsdp.forward:
            notes.sets(keys.get("forward_prefetch", ""), forward_prefetch=True)
        if fsdp.early == "BACKWARD_POST":
            notes.note("BACKWARD_POST gathers a unit when the one before it is freed: read as no prefetch")
    else:
        words = "a unit stays gathered after forward, so backward gathers none"
        notes.tell(keys.get("backward_prefetch", ""), "ignored", words)
    notes.note("FSDP1 leaves transformers in 5.20")


def _units(notes: Notes, key: str, wrap: str, of_class: str) -> None:
    """Refuse units other than blocks."""
    named = key in notes.document.keys
    if wrap == "TRANSFORMER_BASED_WRAP":
        notes.tell(key, "understood", "units are blocks")
        notes.tell(of_class, "understood", "units are blocks")
        if of_class not in notes.document.keys:
            notes.note(BLOCKS)
        return
    why = "the whole model is one unit, gathered whole" if wrap == "NO_WRAP" else "units by their number of elements"
    notes.refuse(
        key if named else "fsdp_config.fsdp_auto_wrap_policy", "zerosim",
        f"{why}: not modelled, and it changes bytes, traffic" + ("" if named else " (accelerate's default is NO_WRAP)"),
        "write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    )  # fmt: skip
