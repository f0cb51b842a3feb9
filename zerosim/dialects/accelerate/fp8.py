"""mixed_precision: fp8 of accelerate's file, and its fp8_config: torchao or Transformer Engine.

Read in accelerate 1.15: commands/launch.py, accelerator.py, utils/dataclasses.py and utils/transformer_engine.py.
"""

from __future__ import annotations

from typing import Any

from zerosim.dialects.fp8 import RECIPES, gathers_codes, history_of, of_te
from zerosim.dialects.reading import Notes

BY = "accelerate 1.15"
BACKENDS = ("AO", "TE", "MSAMP")
_OF_TE = (
    "format", "margin", "interval", "amax_history_len", "amax_compute_algo", "override_linear_precision",
    "use_autocast_during_eval", "use_mxfp8_block_scaling",
)  # fmt: skip
_OF_AO = ("enable_fsdp_float8_all_gather", "pad_inner_dim")
_HISTORY, _ALGORITHM = 1024, "max"
"""Transformer Engine's own defaults. TERecipeKwargs.to_kwargs drops what equals accelerate's, so they hold then."""
SKIPPED = "accelerate leaves the first linear map, block 0's q_proj, in 16 bits; zerosim has it in 8 bits."
HEAD = "accelerate converts the head to Transformer Engine too; zerosim's head stays in 16 bits."


def eight_bits(notes: Notes, kind: str, trained: str | None) -> None:
    """Set the products of mixed_precision fp8. `kind`: the distributed type. `trained`: the half type that
    TrainingArguments said before."""
    keys = {key.partition(".")[2].removeprefix("fp8_"): key for key in notes.document.keys if "fp8_config." in key}
    backend = _backend(notes, keys)
    if kind == "MEGATRON_LM":
        notes.lacks("mixed_precision", "FP8 of accelerate's plugin for Megatron-LM", costs=True)
    elif backend == "MSAMP":
        notes.lacks(keys["backend"], "MS-AMP", costs=True, advice="write backend: TE")
    elif backend and trained is not None:
        _replaced(notes, keys, backend, trained)
    elif backend == "TE":
        _of_te(notes, keys)
    elif backend:
        _of_ao(notes, keys, kind)
    others = {"AO": ("TE", _OF_TE), "TE": ("AO", _OF_AO)}.get(backend)
    for name in others[1] if others else ():
        notes.tell(keys.get(name, ""), "ignored", f"only backend {others[0] if others else ''} reads it")
    notes.tell(keys.get("opt_level", ""), "ignored", "only backend MSAMP reads it")
    for name, key in keys.items():
        if name not in ("backend", "opt_level", *_OF_TE, *_OF_AO):
            notes.tell(key, "ignored", "the launcher passes it on, and accelerate reads no such key")


def _backend(notes: Notes, keys: dict[str, str]) -> str:
    """Return AO, TE or MSAMP; '' where accelerate refuses it."""
    if "backend" not in keys or notes.document.keys[keys["backend"]] is None:
        notes.note("without backend accelerate takes torchao where it is installed, else Transformer Engine")
        return "AO"
    name = str(notes.document.keys[keys["backend"]])
    if name in BACKENDS:
        notes.tell(keys["backend"], "understood", {"AO": "torchao", "TE": "Transformer Engine"}.get(name, name))
        return name
    why = f"ValueError: {name!r} is not a valid FP8BackendType"
    notes.refuse(keys["backend"], BY, why, f"write one of {', '.join(BACKENDS)}")
    return ""


def _replaced(notes: Notes, keys: dict[str, str], backend: str, trained: str) -> None:
    """Say what remains of fp8 behind TrainingArguments with a half type, which the Trainer passes to Accelerator."""
    if "backend" not in keys:
        notes.note(f"{trained} of the training arguments replaces mixed_precision fp8: no product is in 8 bits")
    elif backend == "AO":
        why = f"AttributeError: 'NoneType' object has no attribute 'config': {trained} in the training arguments"
        notes.refuse("mixed_precision", BY, f"{why} replaces fp8", f"leave {trained} out of the training arguments")
    else:
        notes.sets("mixed_precision", **of_te("delayed", "hybrid"), **history_of(_HISTORY, _ALGORITHM, 0))
        notes.note(f"{trained} of the training arguments leaves Transformer Engine's own numbers, without fp8_config's")
        for name in (*_OF_TE, *_OF_AO):
            notes.tell(keys.get(name, ""), "ignored", f"{trained} was said before it")


def _value(notes: Notes, keys: dict[str, str], name: str, otherwise: Any) -> Any:
    key = keys.get(name, "")
    found = notes.checked(key, BY) if notes.document.keys.get(key) is not None else None
    return otherwise if found is None else found


def _of_ao(notes: Notes, keys: dict[str, str], kind: str) -> None:
    notes.sets("mixed_precision", **RECIPES["tensorwise"])
    notes.note(SKIPPED)
    name, loads = "enable_fsdp_float8_all_gather", "fsdp_config.fsdp_cpu_ram_efficient_loading"
    notes.tell(keys.get("pad_inner_dim", ""), "ignored", "sizes here are multiples of 16")
    gathers, key = _value(notes, keys, name, True), keys.get(name, f"accelerate's default, {name} true")
    section = notes.document.section("fsdp_config")
    if kind != "FSDP":
        notes.tell(key, "ignored", "only FSDP2 gathers in 8 bits")
        return
    loaded = next((f"fsdp_config.{one}" for one in ("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading")
                   if one in section), "")  # fmt: skip
    if not loaded or notes.checked(loaded, BY):
        why = "ValueError: torchao with FSDP2 and cpu_ram_efficient_loading is not supported"
        advice = f"write {(loaded or loads).partition('.')[2]}: false"
        notes.refuse(loaded or "mixed_precision", BY, why, advice)
    version = next((section[one] for one in ("fsdp_version", "version") if one in section), 1)
    if str(version) == "2":
        gathers_codes(notes, key, is_on=gathers)
    else:
        notes.tell(key, "ignored", "only FSDP2 gathers in 8 bits")


def _of_te(notes: Notes, keys: dict[str, str]) -> None:
    form = _value(notes, keys, "format", "HYBRID")
    margin, length = _value(notes, keys, "margin", 0), _value(notes, keys, "amax_history_len", 1024)
    algorithm, exact = _value(notes, keys, "amax_compute_algo", "most_recent"), _exact(notes, keys)
    if form == "E5M2":
        why = "AssertionError of Transformer Engine: Pure E5M2 training is not supported."
        notes.refuse(keys["format"], "transformer-engine", why, "write HYBRID or E4M3")
    for name in ("format", "margin", "amax_history_len", "amax_compute_algo"):
        notes.tell(keys.get(name, ""), "understood", f"{notes.document.keys.get(keys.get(name, ''))}")
    notes.tell(keys.get("interval", ""), "ignored", "Transformer Engine reads it no more")
    notes.tell(keys.get("use_autocast_during_eval", ""), "ignored", "of evaluation, not of a training step")
    notes.note(HEAD)
    if _value(notes, keys, "use_mxfp8_block_scaling", False):
        notes.sets(keys["use_mxfp8_block_scaling"], **of_te("mxfp8", "e4m3"))
        for name, is_usual in (("amax_history_len", length == 1024), ("amax_compute_algo", algorithm == "most_recent")):
            if not is_usual:
                why = f"ValueError: `{name}` is not supported for MXFP8 block scaling."
                notes.refuse(keys[name], BY, why, "leave it out")
        return
    notes.tell(keys.get("use_mxfp8_block_scaling", ""), "understood", "delayed scaling")
    if algorithm == "most_recent":
        algorithm = _ALGORITHM
        notes.note("accelerate passes no amax_compute_algo most_recent on: Transformer Engine's own default is max")
    form = "e4m3" if form == "E4M3" else "hybrid"
    values = {**of_te("delayed", form), **history_of(length, algorithm, margin)}
    if exact:
        values["fp8_exact_wgrad"] = True
    notes.sets("mixed_precision", **values)


def _exact(notes: Notes, keys: dict[str, str]) -> bool:
    """Return whether override_linear_precision leaves the weights' gradients in 16 bits."""
    forward, inputs, weights = _value(notes, keys, "override_linear_precision", (False, False, False))
    key = keys.get("override_linear_precision", "")
    if forward or inputs:
        why = "AssertionError of Transformer Engine: Only wgrad GEMM override is currently supported."
        notes.refuse(key, "transformer-engine", why, "write [false, false, true]")
    notes.tell(key, "understood", "weights' gradients in 16 bits" if weights else "all products in 8 bits")
    return bool(weights)
