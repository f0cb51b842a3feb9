"""A model as a config.json that transformers reads: the file's own where one was read, else made from row and sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from zerosim.config.huggingface.families import FAMILIES
from zerosim.config.huggingface.read import OTHER_NAMES
from zerosim.config.inputs import read_json
from zerosim.config.parts.model import ModelConfig

_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "dots1")  # with DeepSeek's keys of experts
_LOCAL = ("mixtral", "minimax_m2", "gpt_oss", "llama4_text", "granitemoe")
_MIXED = ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "exaone_moe", *_LOCAL, *_DEEPSEEK)
_BY_RULES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kv_heads": {"falcon": ("num_kv_heads",)},
        "experts": {
            **dict.fromkeys(_LOCAL, ("num_local_experts",)),
            **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "hunyuan_v1_moe", "exaone_moe"), ("num_experts",)),
            **dict.fromkeys(("glm4_moe", *_DEEPSEEK), ("n_routed_experts",)),
            "ernie4_5_moe": ("moe_num_experts",),
        },
        "top_k": {
            **dict.fromkeys(_MIXED, ("num_experts_per_tok",)),
            "ernie4_5_moe": ("moe_k",),
            "hunyuan_v1_moe": ("moe_topk",),
        },
        "expert_ffn": {
            **dict.fromkeys(("ernie4_5_moe", *_MIXED), ("moe_intermediate_size",)),
            **dict.fromkeys(("olmoe", "hunyuan_v1_moe", *_LOCAL), ("intermediate_size",)),
        },
        "shared_experts": {
            **dict.fromkeys(("glm4_moe", *_DEEPSEEK), ("n_shared_experts",)),
            "ernie4_5_moe": ("moe_num_shared_experts",),
            "exaone_moe": ("num_shared_experts",),
        },
        "dropout": {
            **dict.fromkeys(("gpt", "gptj", "gpt_bigcode"), ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
            **dict.fromkeys(("gpt_neox", "bloom"), ("attention_dropout", "hidden_dropout")),
            "opt": ("dropout", "attention_dropout"),
            "t5": ("dropout_rate",),
            **dict.fromkeys(("bert", "roberta"), ("hidden_dropout_prob", "attention_probs_dropout_prob")),
        },
    }
)
"""The keys of sizes that a family's rules read, by family."""


def config_json(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the values of a config.json, with weights stored as `dtype`: those of the file that was read, with the
    sizes that flags changed, or the family's for `model`."""
    values, before = _read(model) if model.is_of_file else (_made(model), None)
    for size, names in _keys(model):
        value = getattr(model, size)
        if size == "positions" and model.is_masked:
            value += model.decoder.first_position  # RoBERTa counts those of padding
        if before is None or getattr(before, size) != getattr(model, size):
            there = [name for name in values if name in names or OTHER_NAMES.get(name) == size]
            values |= dict.fromkeys(there or names[:1], value)
    if before is not None:
        values |= _changed(values, model, before)
    for name in [name for name in ("dtype", "torch_dtype") if name in values] or ["dtype"]:
        values[name] = dtype
    return values


def _keys(model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each size with its keys in the family's files."""
    family = FAMILIES[_model_type(model)]
    yield from ((size, names) for size, names in family.names.items() if names)
    yield from (("rope_base", (key,)) for key in ("rotary_emb_base", "rope_theta") if key in family.defaults)
    yield from ((size, (key,)) for size, keys in _BY_RULES.items() for key in keys.get(model.family, ()))


def _model_type(model: ModelConfig) -> str:
    return "gpt2" if model.family == "gpt" else model.family


def _changed(values: Mapping[str, Any], model: ModelConfig, before: ModelConfig) -> dict[str, Any]:
    """Return what else a file says about sizes that were changed: a list for all blocks, the base of rotary angles."""
    kinds, changed = [model.kind(number) for number in range(model.layers)], dict[str, Any]()
    if model.layers != before.layers and values.get("layer_types"):
        changed["layer_types"] = ["sliding_attention" if kind.window else "full_attention" for kind in kinds]
    if model.layers != before.layers and values.get("mlp_layer_types"):
        changed["mlp_layer_types"] = ["sparse" if kind.has_experts else "dense" for kind in kinds]
    if model.layers != before.layers and values.get("no_rope_layers"):
        changed["no_rope_layers"] = [int(kind.rotates) for kind in kinds]
    if model.layers != before.layers and values.get("num_decoder_layers"):
        changed["num_decoder_layers"] = model.depths[-1]
    if model.width("shared") != before.width("shared") and "shared_expert_intermediate_size" in values:
        changed["shared_expert_intermediate_size"] = model.width("shared")
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
    head, layers, block = model.head_dim, model.layers, model.decoder.block
    gated = block.is_gated
    full = {"layer_types": ["full_attention"] * layers}
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": head, **full}
    numbers = model.numbers
    groups = {"n_group": numbers.expert_groups, "topk_group": numbers.chosen_groups}
    scaled = {"first_k_dense_replace": numbers.dense_first, "routed_scaling_factor": numbers.expert_scale}
    latent = _of_latents(model) | groups | scaled
    of_family: dict[str, dict[str, Any]] = {
        "deepseek_v2": latent | {"topk_method": "group_limited_greedy" if numbers.expert_groups > 1 else "greedy"},
        "deepseek_v3": latent | {"rope_interleave": model.decoder.interleaved},
        "gpt_oss": {
            "sliding_window": numbers.window or model.positions,  # its class has a mask of it in any case
            "layer_types": [
                "sliding_attention" if model.kind(number).window else "full_attention" for number in range(layers)
            ],
            "rope_parameters": _rope(model),
        },
        "llama4_text": {
            "no_rope_layers": [int(model.kind(number).rotates) for number in range(layers)],
            "attention_chunk_size": numbers.chunk or None,
            "use_qk_norm": bool(block.qk_norm),
            "attn_temperature_tuning": numbers.temper > 0,
            **({"attn_scale": numbers.temper, "floor_scale": numbers.temper_every} if numbers.temper else {}),
            "interleave_moe_layer_step": numbers.experts_every,
            "rope_parameters": _rope(model),
        },
        "mistral": {"sliding_window": None},
        "gemma2": uncapped,
        "gemma3_text": {**uncapped, "rope_local_base_freq": model.rope_base},
        "granite": {"attention_multiplier": head**-0.5},
        "granitemoe": {"attention_multiplier": head**-0.5},
        "hunyuan_v1_moe": {"head_dim": head},
        "ernie4_5_moe": {
            "moe_layer_start_index": numbers.dense_first,
            "moe_layer_interval": numbers.experts_every,
        },
        "smollm3": {"no_rope_layers": [1] * layers, **full},
        "cohere": {"logit_scale": 1.0},
        "gptj": {"rotary_dim": head},
        "gpt_bigcode": {"multi_query": model.kv_heads == 1},
        "gpt_neox": {"rotary_pct": 1.0},
        "falcon": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": False},
        "opt": {"word_embed_proj_dim": model.hidden},
        "bert": {"type_vocab_size": model.numbers.token_types},
        "roberta": {"type_vocab_size": model.numbers.token_types},
        "qwen2_moe": {
            "shared_expert_intermediate_size": model.width("shared"),
            "qkv_bias": block.attention.columns.bias,
        },
        "dots1": {"sliding_window": None, **groups, **scaled},
        "exaone_moe": {
            "sliding_window": numbers.window or model.positions,  # blocks without one rotate nothing
            "layer_types": [
                "sliding_attention" if model.kind(number).rotates else "full_attention" for number in range(layers)
            ],
            **groups,
            **scaled,
        },
        "glm4_moe": {
            "use_qk_norm": bool(block.qk_norm),
            **groups,
            **scaled,
        },
        "t5": {
            "feed_forward_proj": "gated-gelu" if gated else {"gelu_tanh": "gelu_new"}.get(block.between, block.between),
            "num_decoder_layers": model.depths[-1],
            "decoder_start_token_id": model.numbers.decoder_start,
            "relative_attention_num_buckets": model.numbers.bias_buckets,
            "relative_attention_max_distance": model.numbers.bias_largest,
            "is_encoder_decoder": True,
        },
    }
    kind = _model_type(model)
    attention = block.attention
    of_row = {
        "attention_bias": attention.columns.bias,
        "attention_out_bias": attention.rows.bias,
        "partial_rotary_factor": model.numbers.rotary_part,
        "norm_topk_prob": block.mlp.experts is not None and block.mlp.experts.normed,
        "head_dim": head,
    }
    known = {key: value for key, value in of_row.items() if key in FAMILIES[kind].defaults}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if model.is_masked:
        tokens["pad_token_id"] = max(0, model.decoder.first_position - 1)
    return {"model_type": kind, **tokens, **known, **of_family.get(model.family, {})}


def _rope(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary angles as transformers 5 has them."""
    scaling = model.numbers.scaling
    return {"rope_type": scaling.kind, **dict(scaling.values), "rope_theta": model.rope_base}


def _of_latents(model: ModelConfig) -> dict[str, Any]:
    """Return the widths of latent attention, and yarn's numbers."""
    row = model.decoder.block.attention.latent
    if row is None:
        return {}
    columns = model.latents
    return {
        "q_lora_rank": None if row.q is None else columns.q,
        "kv_lora_rank": columns.kv,
        "qk_nope_head_dim": columns.plain,
        "qk_rope_head_dim": columns.turned,
        "v_head_dim": columns.value,
        "num_key_value_heads": model.heads,
        "rope_parameters": _rope(model),
    }
