"""A tiny config.json of each family, as transformers writes it, with the numbers that a family has of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

VOCAB, HIDDEN, TOKENS = 256, 48, 24
_SIZES: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=3, max_position_embeddings=64)
_IDS: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_HEADS: dict[str, Any] = _SIZES | _IDS | dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=80)
_GPT2: dict[str, Any] = _IDS | dict(
    vocab_size=VOCAB,
    n_embd=HIDDEN,
    n_layer=3,
    n_head=4,
    n_positions=64,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
)
_LATENT: dict[str, Any] = _HEADS | dict(
    num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
    n_shared_experts=2, routed_scaling_factor=2.5, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=10,
)  # fmt: skip
_YARN: dict[str, Any] = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
_LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16,
    rope_theta=500000.0,
)  # fmt: skip
_LONG: dict[str, Any] = dict(
    rope_type="longrope", short_factor=[1.0 + i / 10 for i in range(6)], long_factor=[2.0 + i for i in range(6)],
    rope_theta=10000.0,
)  # fmt: skip
_AUX: dict[str, Any] = dict(output_router_logits=False, router_aux_loss_coef=0.01)
_T5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=80, num_layers=3, num_heads=4, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip

CONFIGS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": _HEADS,
        "llama, biases": _HEADS | dict(attention_bias=True, mlp_bias=True, head_dim=20, tie_word_embeddings=True),
        "llama, llama3": _HEADS | dict(rope_parameters=_LLAMA3),
        "llama, linear": _HEADS | dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=10000.0)),
        "llama, dynamic": _HEADS | dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=10000.0)),
        "mistral": _HEADS | dict(sliding_window=8, head_dim=16),
        "qwen2": _HEADS | dict(rope_parameters=_YARN),
        "qwen3": _HEADS | dict(head_dim=20),
        "gemma": _HEADS | dict(head_dim=16),
        "gemma2": _HEADS | dict(
            head_dim=16, query_pre_attn_scalar=20, sliding_window=8, attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        "gemma3_text": _HEADS | dict(num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=20, sliding_window=8),
        "deepseek_v2": _LATENT | dict(
            q_lora_rank=None, rope_parameters=_YARN | dict(mscale=0.707, mscale_all_dim=0.707)
        ),
        "deepseek_v2, groups": _LATENT | dict(
            attention_bias=True, topk_method="group_limited_greedy", n_group=4, topk_group=2
        ),
        "deepseek_v3": _LATENT | dict(
            n_group=4, topk_group=2, rope_parameters=_YARN | dict(mscale=1.0, mscale_all_dim=0.5)
        ),
        "deepseek_v3, halves": _LATENT | dict(n_group=1, topk_group=1, rope_interleave=False),
        "glm4_moe_lite": _LATENT | dict(rms_norm_eps=1e-3, mlp_layer_types=["dense", "sparse", "sparse"]),
        "gpt_oss": _HEADS | dict(
            head_dim=12, num_hidden_layers=4, sliding_window=8, num_local_experts=6, num_experts_per_tok=2,
            intermediate_size=24, rope_parameters=_YARN | dict(truncate=False),
        ),
        "llama4_text": _HEADS | dict(
            head_dim=12, num_hidden_layers=4, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=6,
            num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=32, floor_scale=8,
        ),
        "llama4_text, chunks": _HEADS | dict(
            head_dim=12, num_hidden_layers=4, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2,
            no_rope_layer_interval=2, attention_chunk_size=8, use_qk_norm=False, attn_temperature_tuning=False,
        ),
        "olmo2": _HEADS,
        "granite": _HEADS | dict(
            embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.0
        ),
        "seed_oss": _HEADS | dict(head_dim=16),
        "glm4": _HEADS | dict(head_dim=16),
        "phi3": _HEADS | dict(rope_parameters=_LONG, original_max_position_embeddings=16, sliding_window=20),
        "smollm3": _HEADS | dict(num_hidden_layers=5, no_rope_layer_interval=4),
        "smollm3, windows": _HEADS | dict(
            num_hidden_layers=5, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8
        ),
        "cohere": _HEADS | dict(logit_scale=0.2),
        "cohere2, first": _HEADS | dict(
            layer_types=["full_attention", *["sliding_attention"] * 2], sliding_window=8
        ),
        "cohere, norms": _HEADS | dict(use_qk_norm=True),
        "starcoder2": _HEADS | dict(sliding_window=8),
        "phi": _HEADS | dict(partial_rotary_factor=0.5),
        "gptj": _GPT2 | dict(rotary_dim=6),
        "gpt_neox": _SIZES | _IDS | dict(num_attention_heads=4, intermediate_size=96, rotary_pct=0.5),
        "gpt_neox, one after the other": _SIZES | _IDS | dict(
            num_attention_heads=4, intermediate_size=96, rotary_pct=0.5, use_parallel_residual=False
        ),
        "bloom": _IDS | dict(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=3, n_head=6),
        "falcon": _SIZES | _IDS | dict(num_attention_heads=4),
        "falcon, new": _SIZES | _IDS | dict(num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True),
        "falcon, alibi": _SIZES | _IDS | dict(
            num_attention_heads=4, multi_query=False, parallel_attn=False, bias=True, alibi=True
        ),
        "opt": _SIZES | _IDS | dict(num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=HIDDEN, dropout=0.0),
        "gpt_bigcode": _GPT2,
        "mixtral": _HEADS | _AUX | dict(num_local_experts=6, num_experts_per_tok=2),
        "qwen2_moe": _HEADS | _AUX | dict(
            num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=48
        ),
        "qwen3_moe": _HEADS | _AUX | dict(
            head_dim=20, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2,
            norm_topk_prob=True,
        ),
        "olmoe": _HEADS | _AUX | dict(num_experts=6, num_experts_per_tok=3),
        "glm4_moe": _HEADS | dict(
            head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2,
            first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, attention_bias=True,
            use_qk_norm=True,
        ),
        "ernie4_5_moe": _HEADS | _AUX | dict(
            moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=2, moe_layer_start_index=1,
        ),
        "ernie4_5_moe, none shared": _HEADS | _AUX | dict(
            moe_num_experts=6, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=0, moe_layer_start_index=0,
            moe_layer_interval=2, tie_word_embeddings=False,
        ),
        "hunyuan_v1_moe": _HEADS | dict(
            head_dim=16, intermediate_size=24, num_experts=6, moe_topk=[3] * 3, attention_bias=True,
            rope_parameters=dict(rope_type="dynamic", alpha=1000.0, factor=1.0, rope_theta=10000.0),
        ),
        "granitemoe": _HEADS | _AUX | dict(
            intermediate_size=24, num_local_experts=6, num_experts_per_tok=3, embedding_multiplier=3.0,
            attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.0,
        ),
        "dots1": _HEADS | dict(
            n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2,
            first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, attention_bias=True,
            sliding_window=8, max_window_layers=1,
        ),
        "exaone_moe": _HEADS | dict(
            head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, num_shared_experts=2,
            sliding_window=8, sliding_window_pattern="LG", n_group=4, topk_group=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "minimax_m2": _HEADS | dict(
            head_dim=16, rotary_dim=8, num_local_experts=6, num_experts_per_tok=3, intermediate_size=24,
        ),
        "t5": _T5,
        "t5, v1.1": _T5 | dict(
            num_decoder_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
            relative_attention_num_buckets=8, relative_attention_max_distance=12,
        ),
    }
)  # fmt: skip
"""By model_type, and after a comma what is special."""


def written(name: str, folder: Path) -> str:
    """Write one of them to a folder, and return the file's path."""
    values = {"model_type": name.partition(",")[0], **CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder / "config.json")
