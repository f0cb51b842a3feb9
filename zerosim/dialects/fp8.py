"""Products in 8 bits as files of other frameworks ask for them, and the gathers in 8 bits beside them.

A file's values leave out what is zerosim's own default, so a written file reads back as the same options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config import OPTIONS
from zerosim.config.parts.fp8 import EXCLUSIONS, Fp8Config
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dialects.reading import Notes

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "tensorwise": {"fp8": "tensorwise"},
    "rowwise": {"fp8": "rowwise"},
    "rowwise_with_gw_hp": {"fp8": "rowwise", "fp8_exact_wgrad": True},
}
"""torchao's recipes (0.18, float8/config.py) and what each one is here. torchao is our library for these scalings."""

_CODES = {
    "fp8_gather": ("FSDP gathers weights in 8 bits", "gathers them in 16 bits"),
    "fp8_param_gather": ("weights are kept and gathered in 8 bits", "keeps them in 16 bits"),
}
"""By option, what it does, and what happens without it."""
_MASTERS = ("bf16", "fp16")
"""Precisions with fp32 masters, from which codes are cast."""


def recipe_of(fp8: Fp8Config) -> str:
    """Return torchao's recipe of these products; '' if no recipe says them."""
    if not fp8.is_on or fp8.library != "torchao":
        return ""
    asked = {"fp8": fp8.kind} | ({"fp8_exact_wgrad": True} if fp8.exact_wgrad else {})
    return next((name for name, values in RECIPES.items() if values == asked), "")


def of_te(kind: str, form: str) -> dict[str, Any]:
    """Return the options of Transformer Engine's products with this scaling and this format, e4m3 or hybrid."""
    values: dict[str, Any] = {"fp8": kind}
    if Fp8Config(kind=kind).library != "te":
        values["fp8_library"] = "te"
    if Fp8Config(kind=kind, made_by="te").form != form:
        values["fp8_format"] = form
    return values


def history_of(length: int, algorithm: str, margin: int) -> dict[str, Any]:
    """Return the options of delayed scaling that differ from ours."""
    values: dict[str, Any] = {"fp8_amax_history": length, "fp8_amax_algo": algorithm, "fp8_margin": margin}
    usual = {"fp8_amax_history": 1, "fp8_amax_algo": "most_recent", "fp8_margin": 0}
    return {name: value for name, value in values.items() if value != usual[name]}


def gathers_codes(notes: Notes, key: str, *, is_on: bool) -> None:
    """Read torchao's enable_fsdp_float8_all_gather: FSDP gathers codes of weights in place of 16 bits.

    `key` may be words, such as a framework's default. A reader that calls this function calls `check_codes` last.
    """
    if not is_on:
        notes.tell(key, "understood", "weights are gathered in 16 bits")
        return
    notes.sets(key, fp8_gather=True)
    if key not in notes.document.keys:
        notes.note(f"{key}: {_CODES['fp8_gather'][0]}.")


def keeps_codes(notes: Notes, key: str) -> None:
    """Read Megatron's --fp8-param-gather: ranks keep and gather weights as codes, without a copy in 16 bits."""
    notes.sets(key, fp8_param_gather=True)


def check_codes(notes: Notes) -> None:
    """Refuse a key that stores weights as codes beside an option that excludes it, of the file or a flag. Of a
    framework's default, note it and take the option back."""
    for name, (what, instead) in _CODES.items():
        other = _excluding(name, {**notes.values, **notes.context.given}) if notes.values.get(name) else ""
        if not other:
            continue
        key = notes.sources.pop(name)
        del notes.values[name]
        if key in notes.document.keys:
            advice = f"--without {key.lstrip('-')} {instead}"
            notes.lacks(key, f"{what} beside --{other.replace('_', '-')}", costs=True, advice=advice)
        else:
            notes.texts.pop(f"{key}: {what}.", None)
            notes.note(f"{key}: {what}. Beside --{other.replace('_', '-')} zerosim {instead}.")


def _excluding(name: str, values: Mapping[str, Any]) -> str:
    """Return the option, with its value where that matters, beside which weights are not stored as codes; '' for
    none."""
    fp8, stage = Fp8Config(kind=values.get("fp8", "none"), made_by=values.get("fp8_library")), values.get("stage")
    if not values.get(name):  # a flag took it back
        return ""
    if fp8.kind == "mxfp8" or (name == "fp8_gather" and fp8.kind != "tensorwise"):
        return f"fp8 {fp8.kind}"
    if (fp8.library == "torchao") != (name == "fp8_gather"):
        return f"fp8_library {fp8.library}"
    if stage is not None and stage not in OPTIONS[name].stages:
        return f"stage {stage}"
    if (precision := values.get("precision", _MASTERS[0])) not in _MASTERS:
        return f"precision {precision}"
    optimizer = values.get("optimizer")
    if optimizer is not None and OPTIMIZERS[optimizer].cut == "matrices":  # whole matrices have an owner
        return f"optimizer {optimizer}"
    others = [one.second for one in EXCLUSIONS if one.first == name and not one.needs]
    return next((one for one in others if values.get(one, OPTIONS[one].default) != OPTIONS[one].default), "")
