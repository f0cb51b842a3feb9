"""Dtypes of a DeepSpeed file: parameters, masters, stored and sent gradients."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.deepspeed.auto import how_of
from zerosim.dialects.reading import Notes

_DTYPES = ("fp32", "fp16", "bf16")


def read_precision(notes: Notes, values: dict[str, Any], launcher: str, stage: int, by: str) -> None:
    """Set the parameters' dtype, and those of gradients. Without a section accelerate adds its mixed_precision's."""
    bf16 = "bf16" if any(key.split(".")[0] == "bf16" for key in values) else "bfloat16"
    is_bf16, is_fp16 = bool(values.get(f"{bf16}.enabled")), bool(values.get("fp16.enabled"))
    if is_bf16 and is_fp16:
        notes.refuse("fp16.enabled", by, "AssertionError: bf16 and fp16 cannot both be on")
    if is_fp16 and values.get("fp16.loss_scale", 0) == 0:
        for name in ("loss_scale_window", "min_loss_scale"):
            if values.get(f"fp16.{name}", 1) <= 0:
                notes.refuse(f"fp16.{name}", by, "ValidationError: must be above 0 with a dynamic loss scale")
    for key in (f"{bf16}.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"):
        if values.get(key) and stage == 0:
            notes.refuse(key, by, "AssertionError: works only with stages 1 to 3")
    if values.get(f"{bf16}.bf16_optimizer_states") and not values.get(f"{bf16}.bf16_master_weights_and_grads"):
        notes.refuse(f"{bf16}.bf16_optimizer_states", by, "AssertionError: needs bf16_master_weights_and_grads")
    if is_bf16:
        pure = bool(values.get(f"{bf16}.bf16_master_weights_and_grads"))
        notes.sets(f"{bf16}.enabled", how_of(notes, f"{bf16}.enabled"), precision="bf16-pure" if pure else "bf16")
        if pure:
            states = values.get(f"{bf16}.bf16_optimizer_states")
            why = "" if states else "; DeepSpeed's moments stay fp32 without bf16_optimizer_states, here they are bf16"
            notes.tell(f"{bf16}.bf16_master_weights_and_grads", "understood", f"precision bf16-pure is near{why}")
            notes.tell(f"{bf16}.bf16_optimizer_states", "understood", "precision bf16-pure: moments in bf16")
    elif is_fp16:
        scale = values.get("fp16.loss_scale") or "dynamic"
        notes.sets("fp16.enabled", how_of(notes, "fp16.enabled"), precision="fp16", loss_scale=scale)
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            if scale == "dynamic" and f"fp16.{name}" in values:
                value = values[f"fp16.{name}"]
                scaling: dict[str, Any] = {name: float(value) if name == "min_loss_scale" else value}
                notes.sets(f"fp16.{name}", **scaling)
        notes.tell("fp16.loss_scale", "understood", f"loss_scale {scale}")
    elif values.get("torch_autocast.enabled"):
        dtype = str(values.get("torch_autocast.dtype") or "bfloat16").removeprefix("torch.")
        short = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(dtype, dtype)
        if short not in ("bf16", "fp16"):
            notes.refuse("torch_autocast.dtype", by, f"ValueError: {dtype!r} is no dtype of autocast")
        else:
            notes.sets("torch_autocast.enabled", precision="fp32", autocast=short)
            notes.tell("torch_autocast.dtype", "understood", f"autocast {short}")
    elif launcher != "deepspeed" and (half := _launchers(notes, values)):
        notes.usually("no section of its format: accelerate adds the launcher's", precision=half)
    else:
        notes.usually("no precision section: DeepSpeed's fp32", precision="fp32")
    for key in notes.document.keys:
        if key.startswith("fp16.") and not is_fp16:
            notes.tell(key, "ignored", "disabled: bf16 is on" if is_bf16 else "disabled")
    _gradients(notes, values, stage, by, is_bf16=is_bf16)


def _launchers(notes: Notes, values: dict[str, Any]) -> str | None:
    """Return the format whose section accelerate adds; None where the file has one. An `auto` fp16 alone that is not
    fp16=True is off, and bf16=True then adds bf16."""
    precision: str | None = notes.context.given.get("precision")
    sections = {key.split(".")[0] for key in values} & {"bf16", "bfloat16", "fp16"}
    if sections == {"fp16"} and precision is None and notes.document.keys.get("fp16.enabled") == "auto":
        notes.note("fp16.enabled is auto, and off: bf16=True is assumed, which adds bf16; else pass --precision fp16")
        return "bf16"
    if sections == {"fp16"}:
        return precision if precision == "bf16" else None
    return None if sections else precision or "bf16"


def _gradients(notes: Notes, values: dict[str, Any], stage: int, by: str, *, is_bf16: bool) -> None:
    """Set the dtypes in which gradients are stored and sent."""
    stored, key = values.get("data_types.grad_accum_dtype"), "data_types.grad_accum_dtype"
    if stored is not None and stored not in _DTYPES:
        notes.refuse(key, f"{by}, when the engine is built", f"{stored!r} is no dtype")
    elif stored == "fp32" and stage == 0 and is_bf16:
        why = "NotImplementedError: stage 0 in bf16 does not accumulate in fp32"
        notes.refuse(key, f"{by}, when the engine is built", why)
    elif stored is not None:
        held: dict[str, Any] = {"persistent_grads": True} if stage == 1 and stored == "fp32" and is_bf16 else {}
        notes.sets(key, grad_dtype=stored, **held)
    for name in ("communication_data_type", "seq_parallel_communication_data_type"):
        sent = values.get(name)
        if sent is not None and (not isinstance(sent, str) or sent.lower() not in _DTYPES):
            error = "ValueError: expected fp16, bf16 or fp32" if isinstance(sent, str) else "AttributeError"
            notes.refuse(name, by, f"{error}; it is {sent!r}")
    sent = str(values.get("communication_data_type")).lower()
    if sent == notes.values.get("precision"):
        notes.tell("communication_data_type", "understood", "the parameters' dtype, as without it")
    elif sent == "fp32":
        notes.sets("communication_data_type", grad_dtype="fp32")
    elif sent in _DTYPES:
        notes.sets("communication_data_type", compress=sent, grad_dtype="fp32")
