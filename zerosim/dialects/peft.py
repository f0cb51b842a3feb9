"""Adapters as PEFT makes them, and a quantized base: what axolotl and LLaMA-Factory share."""

from __future__ import annotations

import math
from typing import Any

from zerosim.config import RunConfig
from zerosim.dialects.reading import Notes
from zerosim.errors import InputError
from zerosim.placement.block import ALL_LINEAR, ALL_MODULES

_MAPS = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}
_MAPS |= {"gate": "router", "w1": "gate", "w2": "down", "w3": "up"}  # of models with experts


def targets(notes: Notes, key: str, said: Any) -> str | None:
    """Return PEFT's target modules as patterns of zerosim; None where they are refused."""
    if said in (ALL_MODULES, ALL_LINEAR, [ALL_MODULES], [ALL_LINEAR]):
        return ALL_LINEAR
    words = [word.strip() for word in said.split(",")] if isinstance(said, str) else list(said or ())
    if not words or not all(isinstance(word, str) and word for word in words):
        notes.refuse(key, "zerosim", f"{said!r}: expected names of linear maps", "write all, or names such as q_proj")
        return None
    for word in words:
        if word in ("embed_tokens", "lm_head") or any(sign in word for sign in "^$()|*\\["):
            notes.lacks(key, f"{word}: adapters of the table, the head, or of a regular expression", costs=True)
            return None
    return ",".join(dict.fromkeys(_MAPS.get(word, word) for word in words))


def adapters(
    notes: Notes, *, rank: tuple[str, int], alpha: tuple[str, float], dropout: tuple[str, float],
    target: tuple[str, str | None], rslora: bool = False,
) -> None:  # fmt: skip
    """Set adapters. Each argument: its key, and its value."""
    scale = alpha[1] * (math.sqrt(rank[1]) if rslora else 1.0)
    notes.sets(rank[0], lora_rank=rank[1])
    words = "rsLoRA's scale" if rslora else ""
    notes.sets(alpha[0], "understood", words, lora_alpha=float(scale))
    notes.sets(dropout[0], lora_dropout=float(dropout[1]))
    if target[1] is not None:
        is_all = target[1] == ALL_LINEAR
        words = "every linear map of a block, not the head" if is_all else ""
        found = ALL_MODULES if is_all and _renames(notes) else target[1]
        notes.sets(target[0], "understood", words, lora_target=found)


def _renames(notes: Notes) -> bool:
    """Return whether PEFT renames maps of the model; False if it is not known."""
    model = notes.context.given.get("model", notes.values.get("model"))
    try:
        return model is not None and RunConfig(model=model, ranks=1).model.decoder.block.renames
    except InputError:
        return False
