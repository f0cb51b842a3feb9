"""The families whose config.json is read: a row for each model_type.

A row has the keys of the sizes, the defaults of the family's class (a key without one may be missing only where the
reader derives it), and the rules for what else the keys say. A key with a default of None is known, and may be null.

Source: configuration_*.py of huggingface/transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.config.huggingface.blocks import plain_beside_windows, plain_where_full, read_plain, read_windows
from zerosim.config.huggingface.draft import Rule
from zerosim.config.huggingface.experts import experts, from_block, groups_of_experts, some_dense
from zerosim.config.huggingface.hunyuan import hunyuan_experts, stretched_rope
from zerosim.config.huggingface.latent import latent_attention, limited_groups, yarn_scores
from zerosim.config.huggingface.llama4 import llama4_attention, one_shared, some_experts
from zerosim.config.huggingface.minimax import as_m2
from zerosim.config.huggingface.rope import read_rope
from zerosim.config.huggingface.rows import (
    activation,
    biases,
    dropouts,
    falcon,
    only,
    padded_positions,
    read_numbers,
    rotary_columns,
    shared_by_all,
    t5_blocks,
    t5_head,
    token_types,
    unless,
    unscaled_scores,
    whole_embedding,
    without,
)

Names = Mapping[str, tuple[str, ...]]


class Family(NamedTuple):
    """How one family's file is read.

    names     the keys of each size of ModelConfig; the first is the one in errors
    defaults  by key, as the class has them
    rules     in their order
    row       the family of `placement.families`, '' if it is called as the model_type
    """

    names: Names
    defaults: Mapping[str, Any]
    rules: tuple[Rule, ...]
    row: str = ""


def _names(**changes: tuple[str, ...]) -> Names:
    return MappingProxyType(
        {
            "layers": ("num_hidden_layers",),
            "hidden": ("hidden_size",),
            "heads": ("num_attention_heads",),
            "kv_heads": ("num_key_value_heads",),
            "head_dim": ("head_dim",),
            "ffn": ("intermediate_size",),
            "positions": ("max_position_embeddings",),
            "vocab": ("vocab_size",),
            "norm_eps": ("rms_norm_eps",),
            "tie_embeddings": ("tie_word_embeddings",),
            **changes,
        }
    )


_COMMON = _names()
_ENCODER = _names(kv_heads=(), head_dim=(), norm_eps=("layer_norm_eps",))
_OLDER = _names(
    layers=("n_layer", "num_hidden_layers"),
    hidden=("n_embd", "hidden_size"),
    heads=("n_head", "num_attention_heads"),
    kv_heads=(),
    head_dim=(),
    ffn=("n_inner",),
    positions=("n_positions", "n_ctx", "max_position_embeddings"),
    norm_eps=("layer_norm_epsilon",),
)

_ROPE = {"rope_theta": 10000.0}
_LLAMA = {**_ROPE, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_SILU = activation("hidden_act"), dropouts("attention_dropout")
_BIAS = biases("attention_bias", "columns", "rows")
_BIASES = _BIAS, biases("mlp_bias", "mlp")
_SOME_SLIDE = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_SOME_DENSE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "layer_types": None,
    **_AUXILIARY,
}
_GRANITE = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0)
_COHERE = {**_ROPE, "layer_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "logit_scale": 0.0625}
_DEEPSEEK = {
    **_LLAMA,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
}
_V3 = {
    **_DEEPSEEK,
    "n_group": 8,
    "topk_group": 4,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_LATENT = _names(head_dim=("qk_nope_head_dim",), kv_heads=())


_OF_LATENTS = latent_attention, read_rope, yarn_scores
_OF_EXPERTS = (
    only("moe_layer_freq", 1),
    some_dense,
    experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts"),
)
_BALANCED = only("topk_method", "noaux_tc"), *_OF_EXPERTS, groups_of_experts
_V3_RULES = *_SILU, *_OF_LATENTS, only("scoring_func", "sigmoid"), *_BALANCED
_GEMMA = {**_ROPE, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA_RULES = dropouts("attention_dropout"), _BIAS, only("use_bidirectional_attention", False), read_rope
_PHI_DROPOUTS = dropouts("attention_dropout", "resid_pdrop", "embd_pdrop")
_PDROPS = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
_GPT2 = {
    **_PDROPS,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
}
_GPT2_RULES = activation("activation_function"), unscaled_scores, only("add_cross_attention", False)
_BERT = {
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
_BERT_RULES = (
    dropouts("hidden_dropout_prob", "attention_probs_dropout_prob"),
    only("position_embedding_type", "absolute"),
    only("is_decoder", False),
    only("add_cross_attention", False),
    token_types,
)

# fmt: off
FAMILIES: Mapping[str, Family] = MappingProxyType({
    "gpt2": Family(
        _OLDER, _GPT2, (*_GPT2_RULES, dropouts(*_PDROPS), only("scale_attn_by_inverse_layer_idx", False)), row="gpt"
    ),
    "gpt_bigcode": Family(
        _OLDER, {**_GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
        (*_GPT2_RULES, dropouts(*_PDROPS), shared_by_all),
    ),
    "gptj": Family(
        _OLDER, {**_GPT2, **dict.fromkeys(_PDROPS, 0.0), "tie_word_embeddings": False, "rotary_dim": 64},
        (activation("activation_function"), dropouts(*_PDROPS), rotary_columns, only("rotary", True)),
    ),
    "gpt_neox": Family(
        _names(kv_heads=(), head_dim=(), norm_eps=("layer_norm_eps",)),
        {"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "gelu", "attention_bias": True,
         "use_parallel_residual": True, "rotary_emb_base": 10000.0, "rotary_pct": 0.25},
        (activation("hidden_act"), _BIAS, unless("use_parallel_residual", True, parallel=False),
         dropouts("attention_dropout", "hidden_dropout"), read_rope),
    ),
    "bloom": Family(
        _names(layers=("n_layer", "num_hidden_layers"), hidden=("hidden_size", "n_embed"),
               heads=("n_head", "num_attention_heads"), kv_heads=(), head_dim=(), ffn=(), positions=("seq_length",),
               norm_eps=("layer_norm_epsilon",)),
        {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "seq_length": 2048},
        (only("apply_residual_connection_post_layernorm", False), dropouts("attention_dropout", "hidden_dropout")),
    ),
    "falcon": Family(
        _names(hidden=("hidden_size", "n_embed"), kv_heads=(), head_dim=(), ffn=("ffn_hidden_size",),
               norm_eps=("layer_norm_epsilon",)),
        {**_ROPE, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation": "gelu", "bias": False,
         "ffn_hidden_size": None, "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True,
         "new_decoder_architecture": False, "alibi": False},
        (activation("activation"), falcon, biases("bias", "columns", "rows", "mlp"),
         only("apply_residual_connection_post_layernorm", False),
         dropouts("attention_dropout", "hidden_dropout"), read_rope),
    ),
    "opt": Family(
        _names(kv_heads=(), head_dim=(), ffn=("ffn_dim",), norm_eps=()),
        {"tie_word_embeddings": True, "activation_function": "relu", "dropout": 0.1, "enable_bias": True},
        (activation("activation_function"), biases("enable_bias", "columns", "rows", "mlp"), whole_embedding,
         only("do_layer_norm_before", True), only("_remove_final_layer_norm", False),
         only("layer_norm_elementwise_affine", True), dropouts("dropout", "attention_dropout")),
    ),
    "llama": Family(_COMMON, _LLAMA, (*_SILU, *_BIASES, read_rope)),
    "mistral": Family(
        _COMMON, {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}, (*_SILU, read_rope, read_windows)
    ),
    "ministral": Family(
        _COMMON, {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        (*_SILU, read_rope, read_windows), row="mistral",
    ),
    "qwen2": Family(_COMMON, {**_LLAMA, **_SOME_SLIDE}, (*_SILU, read_rope, read_windows)),
    "qwen3": Family(_COMMON, {**_LLAMA, **_SOME_SLIDE, "head_dim": 128}, (*_SILU, _BIAS, read_rope, read_windows)),
    "smollm3": Family(
        _COMMON,
        {**_LLAMA, "rope_theta": 2000000.0, "tie_word_embeddings": True, "num_key_value_heads": 4,
         "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
         "no_rope_layer_interval": 4},
        (*_SILU, *_BIASES, read_rope, read_plain, read_windows),
    ),
    "olmo2": Family(_COMMON, {**_LLAMA, "rms_norm_eps": 1e-5}, (*_SILU, _BIAS, read_rope)),
    "granite": Family(
        _COMMON,
        {**_LLAMA, **_GRANITE},
        (*_SILU, *_BIASES, read_rope, read_numbers),
    ),
    "seed_oss": Family(
        _COMMON,
        {**_LLAMA, "head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "attention_out_bias": False},
        (activation("hidden_act"), dropouts("attention_dropout", "residual_dropout"),
         biases("attention_bias", "columns"), biases("attention_out_bias", "rows"), biases("mlp_bias", "mlp"),
         read_rope),
    ),
    "glm4": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1.5625e-07, "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True,
         "partial_rotary_factor": 0.5},
        (*_SILU, biases("attention_bias", "columns"), read_rope),
    ),
    "phi3": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
         "partial_rotary_factor": 1.0, "sliding_window": None},
        (activation("hidden_act"), _PHI_DROPOUTS, read_rope, read_windows),
    ),
    "phi": Family(
        _names(norm_eps=("layer_norm_eps",)),
        {**_ROPE, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": False,
         "partial_rotary_factor": 0.5, "qk_layernorm": False},
        (activation("hidden_act"), _PHI_DROPOUTS, only("qk_layernorm", False), read_rope),
    ),
    "starcoder2": Family(
        _names(norm_eps=("norm_epsilon",)),
        {**_ROPE, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
         "num_key_value_heads": 2, "use_bias": True, "sliding_window": None},
        (activation("hidden_act"), biases("use_bias", "columns", "rows", "mlp"),
         dropouts("attention_dropout", "residual_dropout", "embedding_dropout"), read_rope, read_windows),
    ),
    "cohere": Family(
        _names(norm_eps=("layer_norm_eps",)), {**_COHERE, "rope_theta": 500000.0, "use_qk_norm": False},
        (*_SILU, _BIAS, unless("use_qk_norm", False, qk_norm="heads"), read_rope, read_numbers),
    ),
    "cohere2": Family(
        _names(norm_eps=("layer_norm_eps",)),
        {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        (*_SILU, _BIAS, read_rope, read_windows, plain_where_full, read_numbers), row="cohere",
    ),
    "gemma": Family(  # its first files say gelu, and mean the approximation
        _COMMON, {**_GEMMA, "hidden_act": "gelu_pytorch_tanh"},
        (activation("hidden_act", gelu="geglu"), *_GEMMA_RULES),
    ),
    "gemma2": Family(
        _COMMON,
        {**_GEMMA2, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        (activation("hidden_activation"), *_GEMMA_RULES, read_windows, read_numbers),
    ),
    "gemma3_text": Family(
        _COMMON,
        {**_GEMMA2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
         "final_logit_softcapping": None, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
         "max_position_embeddings": 131072},
        (activation("hidden_activation"), only("attn_logit_softcapping", None), *_GEMMA_RULES, read_windows,
         read_numbers),
    ),
    "mixtral": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8, "sliding_window": None,
         "num_local_experts": 8, "num_experts_per_tok": 2, **_AUXILIARY, "router_jitter_noise": 0.0},
        (*_SILU, read_rope, read_windows, experts("num_local_experts", "intermediate_size", gate="")),
    ),
    "qwen2_moe": Family(
        _COMMON,
        {**_LLAMA, **_SOME_SLIDE, **_SOME_DENSE, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
        (*_SILU, biases("qkv_bias", "columns"), read_rope, read_windows, some_dense,
         experts("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", of_width=True)),
    ),
    "qwen3_moe": Family(
        _COMMON,
        {**_LLAMA, **_SOME_DENSE, "use_sliding_window": False, "sliding_window": 4096,
         "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        (*_SILU, _BIAS, read_rope, read_windows, some_dense, experts("num_experts", "moe_intermediate_size")),
    ),
    "olmoe": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
         **_AUXILIARY, "clip_qkv": None},
        (*_SILU, _BIAS, only("clip_qkv", None), read_rope, experts("num_experts", "intermediate_size")),
    ),
    "glm4_moe": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "attention_bias": False,
         "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
         "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False},
        (*_SILU, biases("attention_bias", "columns"), unless("use_qk_norm", False, qk_norm="head"), read_rope,
         some_dense, experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts"), groups_of_experts),
    ),
    "ernie4_5_moe": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "num_key_value_heads": 4,
         "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, **_AUXILIARY},
        (activation("hidden_act"), only("use_bias", False), read_rope, from_block, only("moe_norm_min", 1e-12),
         only("moe_gate", "topk"), only("moe_gate_act", "softmax"), only("moe_use_aux_free", True),
         without("moe_capacity"),
         experts("moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts", gate="", chosen="moe_k")),
    ),
    "hunyuan_v1_moe": Family(  # the second line of rules: keys of its first code, which transformers does not read
        _COMMON, {**_LLAMA, "rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        (*_SILU, _BIAS, stretched_rope, hunyuan_experts,
         only("use_qk_norm", True), only("use_mixed_mlp_moe", True), only("norm_topk_prob", True),
         only("use_cla", False), only("use_mla", False), only("position_embedding_xdrope", False)),
    ),
    "granitemoe": Family(
        _COMMON, {**_LLAMA, **_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, **_AUXILIARY},
        (*_SILU, _BIAS, read_rope, read_numbers, experts("num_local_experts", "intermediate_size", gate="")),
    ),
    "dots1": Family(
        _COMMON,
        {**_LLAMA, "num_key_value_heads": 32, "attention_bias": False, "sliding_window": 4096, "max_window_layers": 62,
         "layer_types": None, "n_routed_experts": None, "num_experts_per_tok": None, "n_shared_experts": None,
         "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 0, "norm_topk_prob": False},
        (*_SILU, _BIAS, read_rope, read_windows, only("scoring_func", "sigmoid", "noaux_tc"), *_BALANCED),
    ),
    "exaone_moe": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
         "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "num_experts": 64,
         "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
        (*_SILU, read_rope, read_windows, plain_beside_windows, only("scoring_func", "sigmoid"),
         only("topk_method", "noaux_tc"), some_dense,
         experts("num_experts", "moe_intermediate_size", "num_shared_experts"), groups_of_experts),
    ),
    "minimax_m2": Family(
        _COMMON,
        {**_LLAMA, "rope_theta": 5000000.0, "head_dim": 128, "num_key_value_heads": 8, "partial_rotary_factor": None,
         "rotary_dim": None, "num_local_experts": 256, "num_experts_per_tok": 8, **_AUXILIARY,
         "router_jitter_noise": 0.0},
        (*_SILU, read_rope, experts("num_local_experts", "intermediate_size", gate=""), as_m2),
    ),
    "deepseek_v2": Family(
        _LATENT,
        {**_DEEPSEEK, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
         "moe_intermediate_size": 1407, "num_experts_per_tok": None, "routed_scaling_factor": 1.0, "n_group": None,
         "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax",
         "mlp_bias": False},
        (*_SILU, only("mlp_bias", False), *_OF_LATENTS, only("scoring_func", "softmax"), only("norm_topk_prob", False),
         *_OF_EXPERTS, limited_groups),
    ),
    "deepseek_v3": Family(_LATENT, _V3, _V3_RULES),
    "kimi_k2": Family(_LATENT, _V3, _V3_RULES, row="deepseek_v3"),
    "glm4_moe_lite": Family(
        _LATENT,
        {**_V3, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
         "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_routed_experts": 64, "routed_scaling_factor": 1.8,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "mlp_layer_types": None},
        (*_V3_RULES, only("first_k_dense_replace", 1)), row="deepseek_v3",
    ),
    "gpt_oss": Family(
        _COMMON,
        {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8,
         "sliding_window": 128, "layer_types": None, "sliding_window_pattern": 2, "attention_bias": True,
         "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, **_AUXILIARY},
        (only("hidden_act", "silu"), dropouts("attention_dropout"), _BIAS, read_rope, read_windows,
         experts("num_local_experts", "intermediate_size", gate=""), only("swiglu_alpha", 1.702),
         only("swiglu_limit", 7.0)),
    ),
    "llama4_text": Family(
        _names(ffn=("intermediate_size_mlp",)),
        {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size_mlp": 16384, "intermediate_size": 8192, "attention_bias": False, "use_qk_norm": True,
         "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
         "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "moe_layers": None,
         "interleave_moe_layer_step": 1, "num_local_experts": 16, "num_experts_per_tok": 1, **_AUXILIARY,
         "router_jitter_noise": 0.0},
        (*_SILU, _BIAS, read_rope, llama4_attention, some_experts, one_shared,
         experts("num_local_experts", "intermediate_size", gate="")),
    ),
    "bert": Family(_ENCODER, _BERT, (activation("hidden_act"), *_BERT_RULES)),
    "roberta": Family(  # its head's function is gelu, whatever the blocks' is
        _ENCODER, {**_BERT, "vocab_size": 50265}, (only("hidden_act", "gelu"), *_BERT_RULES, padded_positions),
    ),
    "t5": Family(  # its class knows no longest row: 512 are those of its training
        _names(layers=("num_layers", "num_hidden_layers"), hidden=("d_model", "hidden_size"),
               heads=("num_heads", "num_attention_heads"), kv_heads=(), head_dim=("d_kv",), ffn=("d_ff",),
               positions=("n_positions",), norm_eps=("layer_norm_epsilon",)),
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "n_positions": 512, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": True, "dropout_rate": 0.1,
         "feed_forward_proj": "relu", "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
         "decoder_start_token_id": 0},
        (t5_blocks, t5_head, dropouts("dropout_rate"), only("is_encoder_decoder", True), only("is_decoder", False)),
    ),
})
# fmt: on
