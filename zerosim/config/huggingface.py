"""A Hugging Face config.json as a model: GPT-2's family and Llama's.

The keys, their aliases and the library's defaults. For features that are not modelled, a value that would change the
parameters or the function is refused, and a value that changes no count is noted.

Source: configuration_gpt2.py and configuration_llama.py of huggingface/transformers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zerosim.config.inputs import read_json
from zerosim.config.presets.models import ModelPreset, Size, family_sizes
from zerosim.errors import InputError, printable

HIDDEN = ("hidden_size", "d_model", "n_embd")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
LONGEST_ROW = 4096
"""The most tokens per row if none are given: a file's positions are a limit, not the length of your rows."""

NOT_MODELLED: Mapping[str, str] = MappingProxyType(
    {
        "gemma": "heads wider than hidden / heads, scaled embeddings",
        "gemma2": "soft-capped logits, norms after the branches",
        "gpt_neo": "local attention",
        "gpt_neox": "branches side by side, partly rotary heads",
        "mixtral": "experts",
        "opt": "ReLU, offset positions",
        "phi3": "partly rotary heads, sliding windows",
        "qwen2": "biases of q, k and v",
        "qwen3": "norms of q and k",
    }
)
"""Families that are often asked for, and what zerosim's models lack for each."""

REFUSED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": {
            "add_cross_attention": True,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
        "llama": {"attention_bias": True, "mlp_bias": True},
    }
)
"""Values of keys that make a different model."""


def read_config_json(path: str | Path) -> ModelPreset:
    """Return the model that a local config.json describes; `notes` lists its features that are not modelled.

    Raises: InputError, in one line, for a file that cannot be read or is not JSON, a family that is not modelled, a
    missing key, and a value of the wrong type or one that contradicts others.
    """
    name = str(path)
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory: pass the file, {Path(path) / 'config.json'}")
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a JSON {type(values).__name__}: expected an object, {{'model_type': ...}}")
    config = _Config(name, values)
    model_type = config.values.get("model_type")
    if model_type == "gpt2":
        return _gpt2(config)
    if model_type in ("llama", "mistral"):
        return _llama(config, str(model_type))
    known = "gpt2 and llama are modelled, and mistral without a sliding window"
    if model_type is None:
        raise InputError(f"{name}: model_type is missing; {known}")
    lacking = NOT_MODELLED.get(model_type) if isinstance(model_type, str) else None
    because = f" ({lacking})" if lacking else ""
    raise InputError(f"{name}: model_type {model_type!r} is not modelled{because}; {known}")


class _Config:
    """The keys of one file, read with their aliases and checked; null counts as missing."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def fail(self, text: str) -> InputError:
        return InputError(f"{self.name}: {text}")

    def find(self, keys: Sequence[str], default: Any = None) -> tuple[str, Any]:
        """Return the key that the file has, and its value. Raises: InputError if it has none, or if two disagree."""
        there = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        if not there:
            if default is None:
                others = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
                raise self.fail(f"{keys[0]}{others} is missing")
            return keys[0], default
        for key, value in there[1:]:
            if value != there[0][1]:
                raise self.fail(f"{there[0][0]} {there[0][1]!r} and {key} {value!r} name the same size: keep one")
        return there[0]

    def whole(self, *keys: str, default: int | None = None) -> int:
        key, value = self.find(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} {value!r}: expected a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        _, value = self.find((key,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(f"{key} {value!r}: expected a number more than 0")
        return float(value)

    def chance(self, key: str, default: float) -> float:
        _, value = self.find((key,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.fail(f"{key} {value!r}: expected a chance in [0, 1)")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        _, value = self.find((key,), default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} {value!r}: expected true or false")
        return value

    def one_of(self, key: str, choices: Sequence[str]) -> None:
        _, value = self.find((key,), choices[0])
        if value not in choices:
            raise self.fail(f"{key} {value!r} is not modelled: expected {' or '.join(choices)}")

    def refuse(self, family: str) -> None:
        for key, value in REFUSED[family].items():
            if self.values.get(key) == value:
                raise self.fail(f"{key} {json.dumps(value)} is not modelled")

    def sizes_of_both(self) -> dict[str, int]:
        """Check the sizes. Raises: InputError if heads do not divide the width."""
        sizes = {"layers": self.whole(*LAYERS), "hidden": self.whole(*HIDDEN), "heads": self.whole(*HEADS)}
        if sizes["hidden"] % sizes["heads"]:
            raise self.fail(f"{sizes['heads']} heads do not divide hidden size {sizes['hidden']}")
        positions = self.whole(*POSITIONS)
        return {**sizes, "seq": min(positions, LONGEST_ROW), "positions": positions, "vocab": self.whole("vocab_size")}


def _gpt2(config: _Config) -> ModelPreset:
    config.refuse("gpt2")
    config.one_of("activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    sizes: dict[str, Size] = dict(config.sizes_of_both())
    rates = {key: config.chance(key, 0.1) for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop")}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        raise config.fail(f"{listed}: zerosim models one rate for all three; make them equal")
    sizes["ffn"] = config.whole("n_inner", "intermediate_size", default=4 * int(sizes["hidden"]))
    sizes["dropout"] = rates["resid_pdrop"]
    sizes["norm_eps"] = config.number("layer_norm_epsilon", 1e-5)
    sizes["tie_embeddings"] = config.flag("tie_word_embeddings", True)
    return _preset(config, "gpt", sizes, [])


def _llama(config: _Config, model_type: str) -> ModelPreset:
    config.refuse("llama")
    config.one_of("hidden_act", ("silu",))
    notes = []
    if model_type == "mistral":
        window = config.values.get("sliding_window", 4096)  # the library's default if the key is missing
        if window is not None:
            raise config.fail(f"sliding_window {window!r} is not modelled: for a mistral it must be null")
        notes.append("a mistral without a sliding window is a llama")
    sizes: dict[str, Size] = dict(config.sizes_of_both())
    heads, head_dim = int(sizes["heads"]), int(sizes["hidden"]) // int(sizes["heads"])
    kv_heads = config.whole("num_key_value_heads", default=heads if model_type == "llama" else 8)
    if heads % kv_heads:
        raise config.fail(f"num_key_value_heads {kv_heads} do not divide {heads} heads")
    if config.whole("head_dim", default=head_dim) != head_dim:
        raise config.fail(f"head_dim {config.values['head_dim']}: only hidden / heads = {head_dim} is modelled")
    if head_dim % 2:
        raise config.fail(f"heads of {head_dim} columns cannot be rotated in pairs: expected an even number")
    sizes["kv_heads"], sizes["ffn"] = kv_heads, config.whole("intermediate_size")
    sizes["norm_eps"] = config.number("rms_norm_eps", 1e-6)
    sizes["tie_embeddings"] = config.flag("tie_word_embeddings", False)
    sizes["rope_base"], scaled = _rope(config)
    if scaled:
        notes.append(f"{scaled}: scaled rotary angles are not modelled; they change no byte count")
    if config.chance("attention_dropout", 0.0):
        notes.append(
            f"attention_dropout {config.values['attention_dropout']}: not modelled; zerosim's llama has no dropout"
        )
    return _preset(config, "llama", sizes, notes)


def _rope(config: _Config) -> tuple[float, str]:
    """Return the base, and a note on scaling ('' for none); newer files keep both in rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        inner = config.values.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise config.fail(f"{key} {inner!r}: expected an object")
        kind = inner.get("rope_type", inner.get("type", "default"))
        outer = config.number("rope_theta", 10000.0)
        base = _Config(f"{config.name}: {key}", inner).number("rope_theta", outer)
        if not isinstance(kind, str):
            raise config.fail(f"{key}: rope_type {kind!r}: expected text")
        return base, "" if kind == "default" else f"{key} {printable(kind[:40])}"
    return config.number("rope_theta", 10000.0), ""


def _preset(config: _Config, family: str, sizes: Mapping[str, Size], notes: Sequence[str]) -> ModelPreset:
    complete = MappingProxyType(family_sizes(family, sizes))
    return ModelPreset(config.name, family, complete, "", None, config.name, tuple(notes))
