"""Adapters by name (LoRA): separate them from the base's weights, or merge them into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config.tuning import TuningConfig, is_adapter

_FUSED = ("q", "k", "v")


def adapters_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters alone, by the same names."""
    return {name: values for name, values in weights.items() if is_adapter(name)}


def merged(weights: Mapping[str, Any], tuning: TuningConfig) -> dict[str, Any]:
    """Return the base's weights, W + s B A in each map with adapters: a model without adapters that computes the same.

    Added in float64, rounded once. Shapes: A (r, I), B (O, r); W as its map has it, (I, O) in GPT, (O, I) in Llama.
    """
    import numpy as np

    base = {name: np.array(values) for name, values in weights.items() if not is_adapter(name)}
    for name, a in weights.items():
        map_name, found, _ = name.partition(".lora_A.")
        if not found:
            continue
        b = weights[f"{map_name}.lora_B.weight"]
        delta = tuning.scale * (b.astype(np.float64) @ a.astype(np.float64))  # (O, I)
        module, _, last = map_name.rpartition(".")
        if f"{map_name}.weight" in base:
            own = base[f"{map_name}.weight"]
            window = own if _is_llama(name) else own.T
        else:  # columns of GPT's fused map, viewed as rows
            width = delta.shape[0]
            at = _FUSED.index(last) * width
            own = base[f"{module}.c_attn.weight"]
            window = own.T[at : at + width]
        window[...] = (window.astype(np.float64) + delta).astype(own.dtype)
    return base


def _is_llama(name: str) -> bool:
    """Return whether a map has the layout (out, in), as Llama's maps."""
    return "_proj." in name and ".c_proj." not in name
