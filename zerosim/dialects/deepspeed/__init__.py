"""Read DeepSpeed's JSON by the rules of DeepSpeed 0.19.8, and of the launcher that fills "auto" before it.

Facts: deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py and precision_config.py, run with each key; the
Trainer's and accelerate's rules of "auto" are in `auto.py`, the keys in `keys.py`.
"""

from __future__ import annotations

from typing import Any

from zerosim.dialects.deepspeed.auto import filled, how_of, reader_of
from zerosim.dialects.deepspeed.batch import read_batch
from zerosim.dialects.deepspeed.keys import REMOVED, ROWS, STRICT
from zerosim.dialects.deepspeed.optimizer import read_optimizer
from zerosim.dialects.deepspeed.precision import read_precision
from zerosim.dialects.deepspeed.zero import read_offload, read_zero, stage_of
from zerosim.dialects.reading import Context, Document, Notes, Reading
from zerosim.dialects.rows import row_of
from zerosim.errors import did_you_mean

_ZERO = "zero_optimization"
_STAGE_0 = (
    "stage 0 in bf16 keeps whole fp32 masters on every rank; BF16_Optimizer, which divides them, is stage 1 with "
    "data_types.grad_accum_dtype fp32"
)


def read(document: Document, context: Context) -> Reading:
    """Read a DeepSpeed file. Its launcher is the one that was given, or the Trainer if a value is "auto"."""
    notes = Notes(document, context, ROWS)
    launcher = reader_of(document, context)
    by = "deepspeed 0.19.6" if context.older("deepspeed", 0, 19, 7) else "deepspeed 0.19.8"
    values = _checked(notes, filled(notes, launcher), by)
    stage = stage_of(notes, values, by)
    notes.sets(_stage_key(document), stage=stage)
    read_precision(notes, values, launcher, stage, by)
    read_optimizer(notes, values, launcher, stage, by)
    read_batch(notes, values, by)
    read_zero(notes, values, stage)
    read_offload(notes, values, stage)
    _zenflow(notes, stage)
    _checkpointing(notes, values)
    _clipping(notes, values, by)
    _further(notes, values)
    if stage == 0 and notes.values.get("precision") == "bf16":
        notes.note(_STAGE_0)
    notes.walk_rows()
    _unknown(notes, by)
    version = "4" if context.older("transformers", 5) else "5.24"
    who = {"trainer": f", filled by transformers {version}'s Trainer", "accelerate": ", filled by accelerate 1.15"}
    return notes.reading(f"{by}{who.get(launcher, '')}")


def _stage_key(document: Document) -> str:
    return next((key for key in (f"{_ZERO}.stage", _ZERO) if key in document.keys), "DeepSpeed's default stage")


def _checked(notes: Notes, values: dict[str, Any], by: str) -> dict[str, Any]:
    """Return the values as DeepSpeed stores them. Refuse unknown keys of strict sections, wrong kinds and removed
    keys."""
    found: dict[str, Any] = {}
    is_old = notes.context.older("deepspeed", 0, 19, 7)
    for key, value in values.items():
        top = key.split(".")[0]
        section = next((one for one in sorted(STRICT, key=len, reverse=True) if key.startswith(f"{one}.")), "")
        removed = key if key in REMOVED else top if top in REMOVED else ""
        if removed and is_old:
            found[key] = value
        elif top == "bfloat16" and any(one.split(".")[0] == "bf16" for one in values):
            notes.tell(key, "ignored", "the section bf16 is there too, and wins")
        elif removed:
            if removed not in (one.key for one in notes.refusals):
                notes.refuse(removed, by, "removed in 0.19.7: DeepSpeedConfigError, even when it is off")
            notes.tell(key, "refused", "removed in 0.19.7")
        elif section and value == "auto" and section != f"{_ZERO}.zenflow":
            notes.tell(key, "auto", f"dropped by DeepSpeed: {ROWS[key].default if key in ROWS else 'the default'}")
        elif section and key not in ROWS:
            if section == "compile" and notes.context.older("deepspeed", 0, 19):
                notes.tell(key, "ignored", "an argument of engine.compile()")
                continue
            known = [one.rpartition(".")[2] for one in ROWS if one.startswith(f"{section}.")]
            name = key[len(section) + 1 :].split(".")[0]
            near = did_you_mean(name, known, "it has no such key")
            if f"{section}.{name}" not in (one.key for one in notes.refusals):
                why = f"ValidationError, extra inputs are not permitted in {section}: {near}"
                notes.refuse(f"{section}.{name}", by, why)
            notes.tell(key, "refused", "extra inputs are not permitted")
        elif key in ROWS:
            if (checked := notes.checked(key, by, value, "ValidationError, ")) is not None or value is None:
                found[key] = checked
        else:
            found[key] = value
    _twice(notes, by)
    kept = values.get("data_types.keep_in_fp32_modules", "auto")
    if kept != "auto" and not (isinstance(kept, list) and all(isinstance(one, str) for one in kept)):
        why = f'DeepSpeedConfigError: {kept!r} is neither "auto" nor a list of names'
        notes.refuse("data_types.keep_in_fp32_modules", by, why)
    tag = values.get("checkpoint.tag_validation", "warn")
    if str(tag).upper() not in ("WARN", "IGNORE", "FAIL"):
        notes.refuse("checkpoint.tag_validation", by, f"DeepSpeedConfigError: {tag!r} is none of warn, ignore and fail")
    for section in ("fp16", "bf16", "bfloat16", "zero_optimization", "compile", "optimizer", "scheduler"):
        if section in values and not isinstance(values[section], dict):
            if section == _ZERO and isinstance(values[section], bool):
                continue
            error = "AttributeError" if section in ("optimizer", "scheduler") else "TypeError"
            shown = "true" if values[section] is True else repr(values[section])
            notes.refuse(section, by, f"{error}: {shown} is no section; write {{...}}")
    return found


def _twice(notes: Notes, by: str) -> None:
    """Refuse a key of zero_optimization that is given by two of its names."""
    keys = notes.document.section(_ZERO)
    old = "stage3_gather_fp16_weights_on_model_save"
    pairs = [(key, key.removeprefix("stage3_")) for key in keys if key.startswith("stage3_") and key != old]
    pairs += [(old, key) for key in (old.replace("fp16", "16bit"), "gather_16bit_weights_on_model_save")]
    for one, other in pairs:
        if one in keys and other in keys:
            why = f"{other} is the same key: ValidationError or AssertionError, whatever the values"
            notes.refuse(f"{_ZERO}.{one}", by, why)


def _further(notes: Notes, values: dict[str, Any]) -> None:
    """Read the meshes that a file may say, and sections without effect here."""
    if (tp := values.get("tensor_parallel.autotp_size")) and tp > 1:
        notes.sets("tensor_parallel.autotp_size", tp=tp)
    if isinstance(cp := values.get("sequence_parallel_size"), int) and cp > 1:
        notes.sets("sequence_parallel_size", cp=cp, context="ulysses")
    for name in ("partition", "activation_checkpoint_interval"):
        notes.lacks(
            f"pipeline.{name}", "PipelineModule's own argument: --stage-layers and --recompute say it", costs=False
        )
    stages = values.get("pipeline.stages")
    if isinstance(stages, int) and not isinstance(stages, bool):
        notes.sets("pipeline.stages", pp=stages)
    if "nvme" not in notes.document.keys.values():
        for key in notes.document.section("aio"):
            notes.tell(f"aio.{key}", "ignored", "nothing is on NVMe")
    for key in notes.document.section("scheduler.params"):
        if f"scheduler.params.{key}" not in notes.said:
            notes.tell(f"scheduler.params.{key}", "ignored", "the learning rate's course; a plan has one step")


def _clipping(notes: Notes, values: dict[str, Any], by: str) -> None:
    key, usual = "gradient_clipping", 0.0 if notes.context.older("deepspeed", 0, 19, 7) else 1.0
    clip = values.get(key, usual)
    if clip == "auto":
        why = 'TypeError: without a launcher "auto" stays text'
        notes.refuse(key, f"{by}, at the first step", why, "pass --launcher trainer or accelerate, or write a number")
    elif not isinstance(clip, int | float):
        notes.refuse(key, f"{by}, at the first step", f"TypeError: {clip!r} is no number")
    else:
        how = how_of(notes, key)
        notes.sets(key if key in notes.document.keys else "DeepSpeed's gradient_clipping", how, clip_norm=float(clip))


def _checkpointing(notes: Notes, values: dict[str, Any]) -> None:
    """Read activation_checkpointing, which does not switch recompute on."""
    given, section = notes.context.given, "activation_checkpointing"
    recomputes = str(given.get("recompute", "")).startswith("full")
    if recomputes and values.get(f"{section}.partition_activations") and given.get("tp", 1) > 1:
        notes.sets(f"{section}.partition_activations", partition_activations=True)
    if recomputes and values.get(f"{section}.cpu_checkpointing"):
        notes.sets(f"{section}.cpu_checkpointing", cpu_checkpointing=True)
    why = "works only where the model's code calls deepspeed.checkpointing, and does not switch recompute on"
    for key in notes.document.section(section):
        if f"{section}.{key}" not in notes.said:
            more = "; with --recompute full it is read" if "partition" in key or "cpu" in key else ""
            notes.tell(f"{section}.{key}", "ignored", why + more)


def _zenflow(notes: Notes, stage: int) -> None:
    section = f"{_ZERO}.zenflow"
    keys = [key for key in notes.document.keys if key.startswith(section)]
    for key in keys:
        notes.tell(key, "lacking" if stage else "ignored", "ZenFlow: the hot share of gradients is applied at once")
    if keys and stage:
        notes.refuse(section, "zerosim", "ZenFlow is not modelled, and it changes bytes, traffic and seconds")


def _unknown(notes: Notes, by: str) -> None:
    known = {key.split(".")[0] for key in ROWS}
    for key in notes.document.keys:
        if key not in notes.said:
            top = key.split(".")[0]
            if row_of(ROWS, key) is None:
                near = did_you_mean(top, known, "no key is near")
                notes.tell(key, "ignored", f"{by} takes any key at the top without a word; {near}")
