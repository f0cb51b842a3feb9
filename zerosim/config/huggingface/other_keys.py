"""The rest of a config.json: keys that change nothing here, keys that are named in a note, other architectures."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

NOTHING = (
    # who wrote the file, for which library
    "_*", "architectures", "model_type", "transformers_version", "transformers.js_config", "unsloth_*", "name_or_path",
    "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tokenizer_class", "prefix", "finetuning_task",
    "task_specific_params",
    # tokens, generation
    "*_token_id", "*_token_ids", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beam*", "max_length",
    "min_length", "*_penalty", "*_ngram_size", "bad_words_ids", "*suppress_tokens", "early_stopping",
    "remove_invalid_values", "num_return_sequences", "exponential_decay*", "tf_legacy_loss", "cache_implementation",
    "use_cache", "pad_key_length", "pre_allocate_kv_cache", "max_batch_size", "max_sequence_length", "inference_runner",
    "validate_runner_input", "is_llama_config", "rope_interleaved",
    # what a forward returns, and heads for other tasks
    "output_*", "return_dict*", "use_return_dict", "id2label", "label2id", "num_labels", "problem_type", "summary_*",
    "classifier_dropout", "is_decoder", "chunk_size_feed_forward", "pruned_heads",
    # initialization, which weights from a file replace; precision and order of a sum
    "initializer_*", "init_std", "*_in_fp32", "reorder_and_upcast_attn", "slow_but_exact", "gradient_checkpointing",
    "attn_implementation", "*_fusion", "skip_bias_add*", "offset_alibi", "scale_attn_weights", "mlp_type", "norm_type",
    "rope_scaling_type", "layer_norm_epsilon", "activation_function", "hidden_activation", "hidden_act",
    "cross_attention_hidden_size", "original_max_position_embeddings", "max_window_layers", "model_max_length",
)  # fmt: skip
"""Keys that change no model here, as patterns: they count where the family has no rule for them."""

NOTED: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "planned without it: weights are those of --dtype, or of --base",
        "pretraining_tp": "the tensor parallelism of the first training; --tp is yours",
        "auto_map": "it names Python code, which is never run; the model_type decides",
        "sliding_window": "this family has no windows",
        "layer_types": "this family's blocks are all alike",
        "use_sliding_window": "this family has no windows",
        "num_nextn_predict_layers": "blocks of multi-token prediction are yours: --mtp-layers",
        "num_mtp_*": "blocks of multi-token prediction are yours: --mtp-layers",
        "aux_loss_alpha": "the auxiliary loss is yours: --aux-loss",
        "layerdrop": "planned with every block",
        "*drop*": "planned without it",
    }
)
"""Keys that are named in a note, as patterns."""

TOWERS: Mapping[str, str] = MappingProxyType({"vision_config": "vision tower", "audio_config": "audio tower"})
"""Objects beside text_config that are models of their own."""

OF_TOWERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("mm_*", "*image*", "boi_*", "eoi_*", "*vision*", "*projector*", "spatial_merge_size"), "towers")
)
"""Keys beside text_config that are of the towers, as patterns."""

NESTED: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"})
"""model_types whose text_config is a decoder that is read, with its model_type where it has none."""

_EXPERTS, _LATENT, _STATES = "experts", "latent attention", "blocks with a state instead of attention"
_STATE, _OTHER = "state", "inputs that are no text"
_TWO = "an encoder beside the decoder: cross-attention and rows of two lengths"
_ENCODER = "an encoder whose blocks are not BERT's"

LACKING: Mapping[str, str] = MappingProxyType(
    {
        "*moe*": _EXPERTS, "dbrx": _EXPERTS, "llama4*": _EXPERTS,
        "minimax*": _EXPERTS, "switch_transformers": _EXPERTS, "hy_v3": _EXPERTS,
        "deepseek_v*": f"{_LATENT}, experts", "kimi*": f"{_LATENT}, experts", "longcat*": f"{_LATENT}, experts",
        "glm_moe_dsa": f"{_LATENT}, experts", "minicpm3": _LATENT, "mimo*": _EXPERTS,
        "*mamba*": _STATES, "jamba": f"{_STATES}, experts", "bamba": _STATES, "zamba*": _STATES, "nemotron_h": _STATES,
        "falcon_h1": _STATES, "recurrent_gemma": _STATES, "rwkv": _STATES, "xlstm": _STATES, "lfm*": _STATES,
        "qwen3_next": f"{_STATES}, experts", "qwen3_5*": _STATES, "olmo_hybrid": _STATES,
        "*bert*": _ENCODER, "*roberta*": _ENCODER, "electra": _ENCODER, "deberta*": _ENCODER, "xlnet": _ENCODER,
        "*t5*": f"{_TWO}, which are not T5's",
        "*bart": _TWO, "pegasus*": _TWO, "marian": _TWO, "m2m_100": _TWO, "nllb*": _TWO,
        "whisper": _TWO, "*vit*": _OTHER, "clip*": _OTHER, "siglip*": _OTHER, "*_vl*": _OTHER, "llava*": _OTHER,
        "idefics*": _OTHER, "mllama": _OTHER, "paligemma": _OTHER, "*vision*": _OTHER, "*audio*": _OTHER,
        "gemma3n*": "a table for each block", "gemma4*": "heads of two widths",
        "gpt_neo": "local attention without scaled scores", "mpt": "its own names of sizes",
    }
)  # fmt: skip
"""What zerosim's decoders lack for a model_type, by pattern; the first one that fits counts."""

FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "*expert*": "such experts",
        "moe_*": "such experts",
        "scoring_func": "such a router",
        "topk_method": "such a router",
        "*_lora_rank": _LATENT,
        "qk_nope_head_dim": _LATENT,
        "qk_rope_head_dim": _LATENT,
        "v_head_dim": _LATENT,
        "mamba_*": _STATE,
        "ssm_*": _STATE,
        "state_size": _STATE,
        "is_encoder_decoder": "encoder beside a decoder",
        "encoder_*": "encoder",
        "decoder_*": "encoder",
        "use_mrope": "positions of images",
        "*_bias": "biases there",
        "per_layer_config": "blocks of different sizes",
    }
)
"""Keys of other architectures: with one of them the model is another one, whatever its model_type."""


def find(key: str, patterns: Mapping[str, str]) -> str:
    """Return the words of the first pattern that fits the key, '' for none."""
    return next((words for pattern, words in patterns.items() if fnmatchcase(key, pattern)), "")


def changes_nothing(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in NOTHING)
