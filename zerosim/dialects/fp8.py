"""Products in 8 bits as files of other frameworks ask for them, and the gathers in 8 bits beside them.

A file's values leave out what is zerosim's own default, so a written file reads back as the same options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config.parts.fp8 import Fp8Config
from zerosim.dialects.reading import Notes

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "tensorwise": {"fp8": "tensorwise"},
    "rowwise": {"fp8": "rowwise"},
    "rowwise_with_gw_hp": {"fp8": "rowwise", "fp8_exact_wgrad": True},
}
"""torchao's recipes (0.18, float8/config.py) and what each one is here. torchao is our library for these scalings."""


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

    `key` may be words, such as a framework's default. All readers of this key call this function.
    """
    if not is_on:
        notes.tell(key, "understood", "weights are gathered in 16 bits")
    elif key in notes.document.keys:
        notes.lacks(key, "FSDP gathers weights in 8 bits", costs=True, advice=_without(key, "gathers them in 16 bits"))
    else:
        notes.note(f"{key}: FSDP gathers weights in 8 bits; zerosim gathers them in 16 bits.")


def keeps_codes(notes: Notes, key: str) -> None:
    """Read Megatron's --fp8-param-gather: ranks keep and gather weights as codes, without a copy in 16 bits."""
    notes.lacks(
        key, "weights are kept and gathered in 8 bits", costs=True, advice=_without(key, "keeps them in 16 bits")
    )


def _without(key: str, instead: str) -> str:
    return f"--without {key.lstrip('-')} {instead}"
