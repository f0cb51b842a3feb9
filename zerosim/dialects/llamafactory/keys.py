"""The keys of LLaMA-Factory's files beside TrainingArguments'."""

from __future__ import annotations

from zerosim.dialects.rows import Row, anything, boolean, integer, optional, real, word
from zerosim.dialects.trainer import keys as trainer_keys

_NO = {"says": "ignored", "changes": "none"}
OWN: tuple[Row, ...] = (
    Row("model_name_or_path", anything, None, "a folder, or a hub's name", "--model", "same", "all"),
    Row("stage", word("pt", "sft", "rm", "ppo", "dpo", "kto"), "sft", "the training stage", "", "refuse", "bytes",
        myth="ZeRO's stage"),
    Row("finetuning_type", word("lora", "oft", "freeze", "full"), "lora", "what is trained", "--lora-rank, --freeze",
        "same", "bytes"),
    Row("lora_rank", integer(1), 8, "adapters' rank", "--lora-rank", "same", "bytes"),
    Row("lora_alpha", optional(integer(0)), None, "adapters' scale, 2 x lora_rank unless given", "--lora-alpha", "same",
        "bytes"),
    Row("lora_dropout", real(0, below=1), 0.0, "dropout of adapters' inputs", "--lora-dropout", "same", "bytes"),
    Row("lora_target", anything, "all", "maps with adapters", "--lora-target", "same", "bytes"),
    Row("additional_target", optional(anything), None, "modules that are trained whole", "", "same", "bytes"),
    Row("use_rslora", boolean, False, "another scale of adapters", "--lora-alpha", "same", "none"),
    Row("use_dora", boolean, False, "DoRA", "", "missing", "bytes"),
    Row("freeze_trainable_layers", integer(), 2, "layers that freeze trains: the last, or the first if negative",
        "--freeze", "same", "bytes"),
    Row("freeze_trainable_modules freeze_extra_modules", optional(anything), None, "parts that freeze trains",
        "--freeze",
        "same", "bytes"),
    Row("quantization_bit", optional(integer(1)), None, "bits of the base", "--base nf4", "same", "bytes"),
    Row("quantization_method", anything, "bnb", "whose codes", "", "same", "bytes"),
    Row("quantization_type", word("nf4", "fp4"), "nf4", "codes of 4 bits", "--base nf4", "same", "bytes"),
    Row("double_quantization", boolean, True, "scales are codes too", "", "same", "bytes"),
    Row("cutoff_len", integer(1), 2048, "tokens of a row, at most", "--seq", "same", "bytes"),
    Row("packing neat_packing", optional(boolean), False, "rows are filled with several texts", "", "same", "bytes"),
    Row("disable_gradient_checkpointing", boolean, False, "keep all activations", "--recompute none", "same",
        "bytes seconds", myth="recompute is off by default: it is on"),
    Row("use_reentrant_gc", boolean, True, "reentrant checkpoints", "--use-reentrant", "same", "bytes"),
    Row("use_unsloth_gc", boolean, False, "unsloth's checkpoints, on the host", "--cpu-checkpointing", "missing",
        "bytes traffic"),
    Row("upcast_layernorm", boolean, False, "norms in fp32", "--prepare-kbit beside nf4", "missing", "bytes"),
    Row("upcast_lmhead_output", boolean, False, "logits in fp32", "", "missing", "bytes"),
    Row("pure_bf16", boolean, False, "weights, gradients and states in bf16", "--precision bf16-pure", "same", "bytes"),
    Row("enable_liger_kernel", boolean, False, "Liger's kernels", "--loss liger --saves liger --kernels fused", "same",
        "bytes"),
    Row("flash_attn", anything, "auto", "attention; auto is SDPA", "--attention", "same", "bytes"),
    Row("use_unsloth", boolean, False, "unsloth's model", "--loss chunked --kernels fused --fused-lora", "same",
        "bytes"),
    Row("shift_attn", boolean, False, "LongLoRA's attention", "", "same", "bytes"),
    Row("use_galore use_apollo use_badam use_adam_mini", boolean, False, "this optimizer", "", "near", "bytes"),
    Row("use_muon", boolean, False, "Muon", "--optimizer muon", "near", "bytes"),
    Row("fp8", boolean, False, "products in 8 bits, through accelerate", "--fp8 tensorwise or delayed", "same",
        "seconds"),
    Row("fp8_backend", word("auto", "torchao", "te", "msamp"), "auto", "auto is torchao (tensorwise); te is delayed",
        "--fp8 tensorwise or delayed", "same", "seconds"),
    Row("fp8_enable_fsdp_float8_all_gather", boolean, False, "FSDP2 gathers weights in 8 bits", "--fp8-gather",
        "same", "seconds"),
    Row("mixture_of_depths", optional(anything), None, "mixture of depths", "", "missing", "bytes"),
    Row("use_kt use_mca", boolean, False, "another engine", "", "missing", "bytes"),
    Row("use_llama_pro pissa_init use_dft_loss", boolean, False, "another way to train", "", "missing", "bytes"),
    Row("moe_aux_loss_coef", optional(real(0)), None, "the router's loss", "--aux-loss", "missing", "none"),
    Row("rope_scaling resize_vocab", anything, None, "the model's sizes or angles", "", "missing", "none"),
    Row("adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer split_special_tokens add_tokens "
        "add_special_tokens new_special_tokens_config init_special_tokens model_revision low_cpu_mem_usage "
        "train_from_scratch infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype hf_hub_token "
        "ms_hub_token om_hub_token print_param_status trust_remote_code quantization_device_map image_max_pixels "
        "image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps "
        "video_maxlen use_audio_in_video audio_sampling_rate export_dir export_size export_device "
        "export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen "
        "export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank "
        "vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend "
        "kt_optimize_rule cpu_infer chunk_size mode kt_maxlen kt_use_cuda_graph kt_mode kt_force_think", anything, None,
        "loading, exporting and inference", **_NO),
    Row("template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming buffer_size "
        "mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples "
        "eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset tool_format tokenized_path "
        "default_system enable_thinking", anything, None, "data", **_NO),
    Row("loraplus_lr_ratio loraplus_lr_embedding pissa_iter pissa_convert create_new_adapter module_dropout oft_rank "
        "oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight "
        "kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards "
        "ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters "
        "reward_model_quantization_bit reward_model_type ld_alpha galore_target galore_rank galore_update_interval "
        "galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode "
        "badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose "
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret freeze_vision_tower freeze_multi_modal_projector "
        "freeze_language_model compute_accuracy disable_shuffling early_stopping_steps plot_loss "
        "include_effective_tokens_per_second", anything, None, "other methods' numbers, and plots", **_NO),
    Row("ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers resources_per_worker placement_strategy "
        "ray_init_kwargs predict_with_generate generation_max_length generation_num_beams generation_config "
        "sortish_sampler do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty "
        "length_penalty skip_special_tokens", anything, None, "launching and generating", **_NO),
)  # fmt: skip
TABLE: tuple[Row, ...] = (*OWN, *trainer_keys.TABLE)
