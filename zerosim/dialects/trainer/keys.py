"""The keys of transformers' TrainingArguments: 5.24's, and those of 4.x that it no longer has."""

from __future__ import annotations

from typing import Any

from zerosim.dialects.accelerate.keys import DICTS, POLICIES, prefetch, upper
from zerosim.dialects.rows import Row, anything, boolean, integer, optional, real, word

_NO = {"says": "ignored", "changes": "none"}
_SCHEDULES = (
    "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt reduce_lr_on_plateau "
    "cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay greedy"
)


def schedule(value: Any) -> str:
    known = _SCHEDULES.split()
    if value not in known:
        raise ValueError(f"ValueError: not a valid SchedulerType; expected one of {', '.join(known)}")
    return str(value)


BATCH: tuple[Row, ...] = (
    Row(
        "per_device_train_batch_size", integer(1), 8, "rows of a rank and microbatch", "--micro-batch", "same", "bytes"
    ),
    Row("gradient_accumulation_steps", integer(1), 1, "microbatches of a step", "--accumulate", "same", "traffic"),
)
NUMBERS: tuple[Row, ...] = (
    Row("max_grad_norm", real(0), 1.0, "the norm that gradients are clipped to; 0 turns it off", "--clip-norm", "same",
        "seconds"),
    Row("learning_rate", real(above=0), 5e-5, "the learning rate", "--lr", "same", "none"),
    Row("adam_beta1 adam_beta2", real(0, below=1), None, "Adam's averages", "--betas", "same", "none"),
    Row("adam_epsilon", real(above=0), 1e-8, "Adam's epsilon", "--eps", "same", "none"),
    Row("weight_decay", real(0), 0.0, "decay of matrices; biases and norms have none",
        "--weight-decay, --decay matrices",
        "same", "none"),
    Row("warmup_steps", real(0), 0, "steps of warm-up; below 1 a share of all", "--warmup", "near", "none"),
    Row("max_steps num_train_epochs num_epochs", anything, None, "the length of training", "--steps", "near", "none"),
)  # fmt: skip
HALF: tuple[Row, ...] = (
    Row("bf16 fp16", boolean, False, "the format of compute: DDP autocasts fp32 weights",
        "--precision bf16 under FSDP and DeepSpeed, else --precision fp32 --autocast bf16", "near", "bytes",
        myth="bf16 weights: under DDP they stay fp32"),
    Row("tf32", optional(boolean), None, "fp32 products in TF32", "", "missing", "seconds"),
)  # fmt: skip
KERNELS: tuple[Row, ...] = (
    Row("activation_checkpointing gradient_checkpointing", optional(boolean), None, "recompute each block",
        "--recompute full", "same", "bytes seconds"),
    Row("activation_checkpointing_kwargs gradient_checkpointing_kwargs activation_checkpointing_kwargs.use_reentrant "
        "gradient_checkpointing_kwargs.use_reentrant", anything, None, "how blocks are recomputed", "--use-reentrant",
        "ignored", "none"),
    Row("torch_compile", boolean, False, "torch.compile", "--kernels compiled", "same", "seconds bytes"),
    Row("torch_compile_backend torch_compile_mode", optional(anything), None, "either switches torch.compile on",
        "--kernels compiled", "same", "seconds bytes", myth="torch_compile must be on too"),
    Row("use_liger_kernel", boolean, False, "Liger's norms, SwiGLU, RoPE and loss",
        "--loss liger --saves liger --kernels fused", "same", "bytes seconds"),
    Row("liger_kernel_config liger_kernel_config.rope liger_kernel_config.swiglu liger_kernel_config.rms_norm "
        "liger_kernel_config.cross_entropy liger_kernel_config.fused_linear_cross_entropy "
        "liger_kernel_config.geglu liger_kernel_config.layer_norm", anything, None, "which of Liger's kernels",
        "--loss, --saves", "same", "bytes seconds"),
    Row("torch_empty_cache_steps", optional(integer(1)), None, "free cached memory every so many steps", "", "missing",
        "bytes"),
    Row("neftune_noise_alpha", optional(real()), None, "noise in embeddings", "", "missing", "bytes"),
    Row("label_smoothing_factor", real(0), 0.0, "a second term of the loss", "", "missing", "bytes"),
)  # fmt: skip
FSDP: tuple[Row, ...] = (
    Row("fsdp", anything, None, "FSDP; as text or a list deprecated, gone in 5.20", "--stage 3 --recipe fsdp2", "same",
        "bytes"),
    Row("fsdp_config", anything, None, "FSDP's keys, or a file with them", "", "same", "bytes"),
    Row("fsdp_config.version", upper("1", "2"), 2, "FSDP1 or FSDP2", "--recipe", "same", "bytes",
        myth="1 is the default: it is in accelerate's file, here it is 2"),
    Row("fsdp_config.reshard_after_forward", anything, True,
        "version 2: free a unit after forward; in version 1 FULL_SHARD wins", "--reshard-after-forward", "same",
        "bytes traffic"),
    Row("fsdp_config.cpu_offload", boolean, False, "all states and the optimizer step on the CPU",
        "--offload optimizer=host,params=host --pin-memory", "same", "bytes",
        myth="offload_params (fsdp_offload_params) does it: that is accelerate's key, dropped here without a word"),
    Row("fsdp_config.activation_checkpointing", boolean, False, "recompute each unit", "--recompute full", "same",
        "bytes"),
    Row("fsdp_config.activation_checkpointing_offload", anything, None, "dropped without a word", "", "warn", "none"),
    Row("fsdp_config.auto_wrap_policy", optional(word(*POLICIES)), POLICIES[0], "which modules are units", "units "
        "are blocks", "same", "bytes"),
    Row("fsdp_config.transformer_layer_cls_to_wrap", optional(anything), None, "the class of a unit",
        "units are blocks",
        "same", "bytes"),
    Row("fsdp_config.min_num_params", integer(0), 0, "elements of a unit of SIZE_BASED_WRAP", "", "same", "bytes"),
    Row("fsdp_config.cpu_ram_efficient_loading", boolean, False, "rank 0 alone loads the weights", "--host-load first",
        "same", "load"),
    Row("fsdp_config.state_dict_type", optional(upper(*DICTS)), "FULL_STATE_DICT", "the form of a checkpoint", "",
        "missing", "save"),
    Row("fsdp_config.backward_prefetch", optional(prefetch), "NO_PREFETCH",
        "version 1: what backward gathers early", "--prefetch 1", "same", "bytes seconds"),
    Row("fsdp_config.forward_prefetch", boolean, False, "version 1: forward gathers early", "--forward-prefetch",
        "same", "seconds"),
    Row("fsdp_config.limit_all_gathers fsdp_config.use_orig_params fsdp_config.sync_module_states", boolean, True,
        "version 1: no bytes of a step", "", "missing", "load"),
    Row("fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt fsdp_config.xla_fsdp_settings",
        anything,
        False, "XLA's", **_NO),
)  # fmt: skip
OTHERS: tuple[Row, ...] = (
    Row("deepspeed", optional(anything), None, "DeepSpeed's file", "that file", "same", "-"),
    Row("ddp_bucket_cap_mb", optional(integer(1)), None, "DDP's largest call, 25 MiB", "--bucket-bytes", "same",
        "traffic"),
    Row("ddp_static_graph ddp_find_unused_parameters ddp_broadcast_buffers ddp_backend ddp_timeout", anything, None,
        "how DDP starts; no bytes of a step", "", "same", "none"),
    Row("auto_find_batch_size", boolean, False, "halve the batch until it fits", "", "refuse", "bytes"),
    Row("parallelism_config", optional(anything), None, "accelerate's sizes of a mesh, an object",
        "--dp-replicate, --tp",
        "same", "bytes"),
    Row("accelerator_config accelerator_config.gradient_accumulation_kwargs", anything, None, "accelerate's", "",
        "same",
        "none"),
    Row("accelerator_config.split_batches", optional(boolean), False, "a batch is divided by the ranks",
        "--micro-batch",
        "same", "batch"),
    Row("optim", anything, "adamw_torch_fused", "the optimizer", "--optimizer, --foreach, --paged-states", "same",
        "bytes seconds"),
    Row("optim_args optim_target_modules", optional(anything), None, "an optimizer's own numbers, or its modules", "",
        "missing", "bytes"),
    Row("lr_scheduler_type", schedule, "linear", "the schedule", "--schedule", "near", "none"),
    Row("eval_strategy logging_strategy", word("no", "steps", "epoch"), None, "when to evaluate and log", **_NO),
    Row("save_strategy", word("no", "steps", "epoch", "best"), "steps", "when to save", **_NO),
    Row("hub_strategy", word("end", "every_save", "checkpoint", "all_checkpoints"), "every_save", "what to push",
        **_NO),
    Row("output_dir lr_scheduler_kwargs average_tokens_across_devices bf16_full_eval fp16_full_eval use_cache "
        "logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id eval_steps eval_delay "
        "per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_steps "
        "save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id "
        "hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better "
        "ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu "
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
        "label_names train_sampling_strategy length_column_name debug skip_memory_metrics do_train do_eval do_predict "
        "resume_from_checkpoint local_rank", anything, None, "data, logging, saving and evaluating", **_NO),
)  # fmt: skip
REMOVED = Row(
    "warmup_ratio evaluation_strategy no_cuda overwrite_output_dir group_by_length half_precision_backend "
    "fp16_opt_level "
    "torchdynamo save_safetensors logging_dir adafactor per_gpu_train_batch_size per_gpu_eval_batch_size sharded_ddp "
    "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap dispatch_batches split_batches tpu_num_cores "
    "tpu_metrics_debug past_index use_mps_device jit_mode_eval use_ipex mp_parameters fp16_backend ray_scope "
    "include_inputs_for_metrics include_tokens_per_second use_legacy_prediction_loop push_to_hub_token "
    "push_to_hub_model_id push_to_hub_organization xpu_backend",
    anything, None, "a key of transformers 4: a TypeError in 5.24", "", "same", "none",
)  # fmt: skip
TABLE: tuple[Row, ...] = (*BATCH, *NUMBERS, *HALF, *KERNELS, *FSDP, *OTHERS, REMOVED)
