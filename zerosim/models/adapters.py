"""Adapters by name (LoRA): separate them from the base's weights, or merge them into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter


def adapters_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters alone, by the same names."""
    return {name: values for name, values in weights.items() if is_adapter(name)}


def merged(weights: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the base's weights, W + s B A in each map with adapters: a model without adapters that computes the same.

    Added in float64, rounded once. Shapes: A (r, I), B (O, r); W in its map's layout, (I, O) or (O, I). Of experts
    A (E r, I), B (O, r E), as PEFT has them; of a router as if E were 1.
    """
    import numpy as np

    model = config.model
    base = {name: np.array(values) for name, values in weights.items() if not is_adapter(name)}
    targets = model.targets() if model.has_blocks else {}
    for name, a in weights.items():
        map_name, found, _ = name.partition(".lora_A.")
        if not found:
            continue
        target, b = targets[map_name], weights[f"{map_name}.lora_B.weight"]
        own = base[target.weight]
        if target.is_bare:
            experts, wide = len(own) if own.ndim == 3 else 1, len(b)
            each = (
                b.reshape(wide, -1, experts).astype(np.float64),
                a.reshape(experts, -1, a.shape[1]).astype(np.float64),
            )
            of = "ore,eri->eoi" if target.map.layout == "out_in" else "ore,eri->eio"
            delta = np.einsum(of, *each).reshape(own.shape)
            own[...] = (own + config.tuning.scale * delta).astype(own.dtype)
            continue
        delta = config.tuning.scale * (b.astype(np.float64) @ a.astype(np.float64))  # (O, I)
        window = own if target.map.layout == "out_in" else own.T
        if target.columns is not None:
            before = target.map.outs[: target.map.outs.index(target.columns)]
            first = sum(model.width(out.wide) for out in before)
            window = window[first : first + len(delta)]
        window[...] = (window.astype(np.float64) + delta).astype(own.dtype)
    return base
