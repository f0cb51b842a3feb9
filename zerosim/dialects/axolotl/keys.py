"""The keys of axolotl's YAML. Unknown keys pass there without a word."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.accelerate.keys import DICTS, POLICIES, STRATEGIES, auto_or, prefetch, upper, word_of
from zerosim.dialects.rows import Row, anything, boolean, integer, optional, real, word
from zerosim.dialects.trainer import keys as trainer_keys

_NO = {"says": "ignored", "changes": "none"}


def _or(kind: Any, *words: str) -> Any:
    """Return the kind that takes these words too."""
    return lambda value: value if value in words else kind(value)


OWN: tuple[Row, ...] = (
    Row("base_model", anything, None, "a folder, or a hub's name", "--model", "same", "all"),
    Row("micro_batch_size gradient_accumulation_steps", integer(1), 1, "rows and microbatches",
        "--micro-batch, --accumulate", "same", "bytes"),
    Row("batch_size", optional(integer(1)), None, "micro_batch_size x gradient_accumulation_steps", "--accumulate",
        "same",
        "bytes"),
    Row("sequence_len", integer(1), 512, "tokens of a row", "--seq", "same", "bytes"),
    Row("sample_packing pad_to_sequence_len", optional(boolean), None, "rows are full", "--seq", "same", "bytes"),
    Row("adapter", optional(anything), None, "adapters", "--lora-rank", "same", "bytes"),
    Row("lora_r", integer(1), None, "adapters' rank", "--lora-rank", "near", "bytes"),
    Row("lora_alpha", real(0), None, "adapters' scale", "--lora-alpha", "near", "bytes"),
    Row("lora_dropout", real(0, below=1), 0.0, "dropout of adapters' inputs", "--lora-dropout", "near", "bytes"),
    Row("lora_target_linear", boolean, False, "every linear map but the head has adapters", "--lora-target all-linear",
        "near", "bytes"),
    Row("lora_target_modules", optional(anything), None, "maps with adapters", "--lora-target", "near", "bytes"),
    Row("lora_modules_to_save", optional(anything), None, "copies of whole modules that are trained", "", "near",
        "bytes"),
    Row("peft_use_rslora", boolean, False, "another scale of adapters", "--lora-alpha", "near", "none"),
    Row("peft_use_dora", boolean, False, "DoRA", "", "near", "bytes"),
    Row("lora_mlp_kernel lora_qkv_kernel lora_o_kernel", boolean, False, "adapters fused with their maps",
        "--fused-lora for all three", "near", "bytes seconds"),
    Row("load_in_4bit", boolean, False, "a base in nf4", "--base nf4", "near", "bytes"),
    Row("load_in_8bit", boolean, False, "a base in int8", "", "near", "bytes"),
    Row("optimizer", anything, "adamw_torch_fused", "the optimizer", "--optimizer", "same", "bytes"),
    Row("lr_scheduler", trainer_keys.schedule, "cosine", "the schedule", "--schedule", "near", "none"),
    Row("bf16", _or(boolean, "auto", "full"), "auto", "the format of weights and compute; auto by the GPU",
        "--precision bf16, or bf16-pure without FSDP and DeepSpeed", "same", "bytes",
        myth="masters in fp32: without FSDP and DeepSpeed there are none"),
    Row("fp16", _or(boolean, "full"), False, "the format of compute", "--precision fp16", "same", "bytes"),
    Row("tf32", optional(auto_or(boolean)), None, "fp32 products in TF32", "", "missing", "seconds"),
    Row("gradient_checkpointing", optional(_or(boolean, "offload", "offload_disk", "unsloth")), None,
        "recompute each block", "--recompute full", "same", "bytes"),
    Row("activation_offloading", optional(_or(boolean, "legacy", "disk")), None, "kept activations wait on the host",
        "--cpu-checkpointing with --recompute full, else --offload-activations", "same", "bytes traffic"),
    Row("attn_implementation", anything, None, "attention; SDPA unless given", "--attention", "same", "bytes"),
    Row("flash_attention sdp_attention eager_attention flex_attention xformers_attention", optional(boolean), None,
        "older names of attn_implementation", "--attention", "same", "bytes"),
    Row("s2_attention", optional(boolean), None, "LongLoRA's attention", "", "same", "bytes"),
    Row("deepspeed", optional(anything), None, "DeepSpeed's file", "that file", "same", "-"),
    Row("fsdp", optional(anything), None, "FSDP, as a list; deprecated", "--stage 3", "same", "bytes"),
    Row("fsdp_config", anything, None, "FSDP's keys", "", "same", "bytes"),
    Row("fsdp_version fsdp_config.version", optional(upper("1", "2")), 1, "FSDP1 or FSDP2", "--recipe", "same", "bytes",
        myth="2 is the default: without it this is FSDP1"),
    Row("fsdp_config.sharding_strategy", upper(*STRATEGIES), "FULL_SHARD", "version 1: what is sharded", "--stage",
        "same",
        "bytes"),
    Row("fsdp_config.reshard_after_forward", optional(boolean), True, "version 2: free a unit after forward",
        "--reshard-after-forward", "same", "bytes"),
    Row("fsdp_config.offload_params", optional(boolean), False, "all states and the optimizer step on the CPU",
        "--offload optimizer=host,params=host", "same", "bytes"),
    Row("fsdp_config.cpu_offload_pin_memory", optional(boolean), True, "pinned", "--pin-memory", "same", "host"),
    Row("fsdp_config.activation_checkpointing", optional(boolean), False, "recompute each unit", "--recompute full",
        "same",
        "bytes"),
    Row("fsdp_config.auto_wrap_policy", optional(word_of(*POLICIES)), POLICIES[0], "which modules are units", "",
        "same",
        "bytes"),
    Row("fsdp_config.transformer_layer_cls_to_wrap", optional(anything), None, "the class of a unit", "", "same",
        "bytes"),
    Row("fsdp_config.min_num_params", optional(integer(1)), None, "elements of a unit", "", "same", "bytes"),
    Row("fsdp_config.backward_prefetch", optional(prefetch), "NO_PREFETCH",
        "version 1: what backward gathers early", "--prefetch 1", "same", "bytes seconds"),
    Row("fsdp_config.forward_prefetch", optional(boolean), False, "version 1: forward gathers early",
        "--forward-prefetch", "same", "seconds"),
    Row("fsdp_config.cpu_ram_efficient_loading", optional(boolean), False, "rank 0 alone loads", "--host-load first",
        "same", "load"),
    Row("fsdp_config.state_dict_type fsdp_final_state_dict_type fsdp_config.final_state_dict_type",
        optional(upper(*DICTS)),
        None, "the form of a checkpoint", "", "missing", "save"),
    Row("fsdp_config.limit_all_gathers fsdp_config.sync_module_states fsdp_config.use_orig_params "
        "fsdp_config.mixed_precision_policy", anything, None, "no bytes of a step", **_NO),
    Row("dp_shard_size", optional(integer(1)), None, "ranks of a replica", "--ranks / the other sizes", "near",
        "bytes"),
    Row("dp_replicate_size", optional(integer(1)), None, "replicas", "--dp-replicate", "near", "bytes"),
    Row("tensor_parallel_size", optional(integer(1)), None, "tensor parallelism", "--tp", "near", "bytes"),
    Row("context_parallel_size sequence_parallel_degree", optional(integer(1)), None, "context parallelism", "--cp",
        "near", "bytes"),
    Row("plugins", anything, None, "LigerPlugin, CutCrossEntropyPlugin and others", "--loss, --saves, --kernels",
        "same",
        "bytes seconds"),
    Row("liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu liger_cross_entropy "
        "liger_fused_linear_cross_entropy liger_use_token_scaling cut_cross_entropy", optional(boolean), None,
        "Liger's kernels, and another loss", "--loss liger --saves liger", "same", "bytes seconds"),
    Row("torch_compile", optional(auto_or(boolean)), False, "torch.compile", "--kernels compiled", "near",
        "bytes seconds"),
    Row("deepcompile", optional(boolean), False, "another compiler", "", "near", "bytes seconds"),
    Row("fp8", optional(boolean), False, "products in 8 bits by torchao", "--fp8 tensorwise or rowwise", "same",
        "seconds"),
    Row("fp8_config.recipe", word("tensorwise", "rowwise"), "tensorwise", "torchao's recipe",
        "--fp8 tensorwise or rowwise", "same", "seconds"),
    Row("fp8_enable_fsdp_float8_all_gather", optional(boolean), False, "FSDP2 gathers weights in 8 bits",
        "--fp8-gather", "same", "traffic seconds"),
    Row("tiled_mlp", optional(boolean), False, "feed-forwards in tiles of as many tokens as the model is wide",
        "--mlp-tile", "near", "bytes seconds"),
    Row("unfrozen_parameters", optional(anything), None, "patterns of trained parameters", "--freeze", "same", "bytes"),
    Row("rl", optional(anything), None, "preferences: another model or loss", "", "missing", "bytes"),
    Row("neftune_noise_alpha", optional(real()), None, "noise in embeddings", "", "missing", "bytes"),
    Row("auto_find_batch_size", optional(boolean), False, "halve the batch until it fits", "", "refuse", "bytes"),
    Row("gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant", anything, None,
        "how blocks are recomputed", "--use-reentrant", "ignored", "none"),
    Row("warmup_ratio", anything, None, "a share of all steps", "--warmup", "near", "none"),
    Row("optim_args optim_target_modules", optional(anything), None, "an optimizer's own numbers", "", "missing",
        "bytes"),
    Row("datasets output_dir val_set_size lora_model_dir dataset_prepared_path eval_sample_packing wandb_project "
        "wandb_entity wandb_watch wandb_name wandb_log_model logging_steps evals_per_epoch saves_per_epoch save_steps "
        "eval_steps save_total_limit resume_from_checkpoint special_tokens tokens chat_template train_on_inputs "
        "group_by_length early_stopping_patience local_rank debug seed hub_model_id model_type tokenizer_type "
        "strict trust_remote_code dataset_processes gradient_clipping ddp_timeout save_first_step", anything, None,
        "data, logging, saving and evaluating", **_NO),
)  # fmt: skip
TABLE: tuple[Row, ...] = (*OWN, *trainer_keys.NUMBERS)
