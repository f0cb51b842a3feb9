"""A model as a config.json that transformers reads: the file's own where one was read, else made from row and sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerosim.config.huggingface.families import FAMILIES
from zerosim.config.inputs import read_json
from zerosim.config.parts.model import ModelConfig

_NEWER: Mapping[str, str] = MappingProxyType(
    {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "rope_base": "rope_theta",
    }
)
_OLDER: Mapping[str, str] = MappingProxyType(
    {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn": "n_inner",
        "positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop attn_pdrop embd_pdrop",
    }
)
_LIKE_NEOX = {"dropout": "attention_dropout hidden_dropout"}
_ENCODER = {**_NEWER, "norm_eps": "layer_norm_eps", "dropout": "hidden_dropout_prob attention_probs_dropout_prob"}
KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt": _OLDER,
        "gptj": _OLDER,
        "gpt_bigcode": _OLDER,
        "gpt_neox": {**_NEWER, **_LIKE_NEOX, "norm_eps": "layer_norm_eps", "rope_base": "rotary_emb_base"},
        "bloom": {**_OLDER, **_LIKE_NEOX, "hidden": "hidden_size", "ffn": "", "positions": ""},
        "falcon": {
            **_NEWER, "kv_heads": "num_kv_heads", "head_dim": "", "ffn": "ffn_hidden_size",
            "norm_eps": "layer_norm_epsilon",
        },
        "opt": {**_NEWER, "ffn": "ffn_dim", "norm_eps": "", "dropout": "dropout attention_dropout"},
        **dict.fromkeys(("bert", "roberta"), _ENCODER),
        "cohere": {**_NEWER, "norm_eps": "layer_norm_eps"},
        "phi": {**_NEWER, "norm_eps": "layer_norm_eps"},
        "starcoder2": {**_NEWER, "norm_eps": "norm_epsilon"},
    }
)  # fmt: skip
"""The keys of sizes in families that have others than Llama's; '' for none."""


_SAME: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("num_hidden_layers", "n_layer", "n_layers"),
        "hidden": ("hidden_size", "n_embd", "d_model"),
        "heads": ("num_attention_heads", "n_head", "n_heads"),
        "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
    }
)
"""Other names of sizes, which a file may have too."""


def config_json(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the values of a config.json, with weights stored as `dtype`: those of the file that was read, with the
    sizes that flags changed, or the family's for `model`."""
    keys = {**KEYS.get(model.family, _NEWER), "vocab": "vocab_size", "tie_embeddings": "tie_word_embeddings"}
    values, before = _read(model) if model.is_of_file else (_made(model), None)
    for size, names in keys.items():
        value = getattr(model, size)
        if size == "positions" and model.is_masked:
            value += model.decoder.first_position  # RoBERTa counts those of padding
        if before is None or getattr(before, size) != getattr(model, size):
            there = [name for name in _SAME.get(size, ()) if name in values]
            values |= dict.fromkeys(there or names.split(), value)
    if before is not None:
        values |= _changed(values, model, before)
    for name in [name for name in ("dtype", "torch_dtype") if name in values] or ["dtype"]:
        values[name] = dtype
    return values


def _changed(values: Mapping[str, Any], model: ModelConfig, before: ModelConfig) -> dict[str, Any]:
    """Return what else a file says about sizes that were changed: a list for all blocks, the base of rotary angles."""
    kinds, changed = [model.kind(number) for number in range(model.layers)], dict[str, Any]()
    if model.layers != before.layers and values.get("layer_types"):
        changed["layer_types"] = ["sliding_attention" if kind.window else "full_attention" for kind in kinds]
    if model.layers != before.layers and values.get("no_rope_layers"):
        changed["no_rope_layers"] = [int(kind.rotates) for kind in kinds]
    if model.rope_base != before.rope_base and values.get("rope_parameters"):
        changed["rope_parameters"] = {**values["rope_parameters"], "rope_theta": model.rope_base}
    return changed


def _read(model: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
    """Return the values of the file, and the model that it describes."""
    path = os.path.join(model.name, "config.json") if os.path.isdir(model.name) else model.name
    values = read_json(path)
    if "text_config" in values:  # a model of text and images is saved as one of text
        values = {key: value for key, value in values["text_config"].items() if key != "architectures"}
    values.pop("quantization_config", None)  # weights are written as numbers
    return values, ModelConfig(name=model.name)


def _made(model: ModelConfig) -> dict[str, Any]:
    """Return what a family's class would have otherwise: no windows, no caps, no factors, no special tokens."""
    head, layers = model.head_dim, model.layers
    full = {"layer_types": ["full_attention"] * layers}
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": head, **full}
    of_family: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": None},
        "gemma2": uncapped,
        "gemma3_text": {**uncapped, "rope_local_base_freq": model.rope_base},
        "granite": {"attention_multiplier": head**-0.5},
        "smollm3": {"no_rope_layers": [1] * layers, **full},
        "cohere": {"logit_scale": 1.0},
        "gptj": {"rotary_dim": head},
        "gpt_bigcode": {"multi_query": model.kv_heads == 1},
        "gpt_neox": {"rotary_pct": 1.0},
        "falcon": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": False},
        "opt": {"word_embed_proj_dim": model.hidden},
        "bert": {"type_vocab_size": model.numbers.token_types},
        "roberta": {"type_vocab_size": model.numbers.token_types},
    }
    kind = "gpt2" if model.family == "gpt" else model.family
    attention = model.decoder.block.attention
    of_row = {
        "attention_bias": attention.columns.bias,
        "attention_out_bias": attention.rows.bias,
        "partial_rotary_factor": model.numbers.rotary_part,
    }
    known = {key: value for key, value in of_row.items() if key in FAMILIES[kind].defaults}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if model.is_masked:
        tokens["pad_token_id"] = max(0, model.decoder.first_position - 1)
    return {"model_type": kind, **tokens, **known, **of_family.get(model.family, {})}
