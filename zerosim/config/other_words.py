"""Words that people type from other frameworks, and what they are here.

The command line takes a flag that means one thing here, and answers any other with zerosim's own. The words are those
of Hugging Face's Trainer, accelerate, LLaMA-Factory, axolotl, DeepSpeed, Megatron-LM and torchtitan (with dots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

TAKEN: Mapping[str, str] = MappingProxyType(
    {
        "micro_batch": "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
        "global_batch": "global_batch_size",  # of a search; elsewhere answered
        "seq": "seq_length sequence_len cutoff_len max_length max_seq_length model_max_length block_size "
        "training.seq_len",
        "layers": "num_layers num_hidden_layers n_layer n_layers",
        "hidden": "hidden_size n_embd d_model",
        "heads": "num_attention_heads num_heads n_head n_heads",
        "kv_heads": "num_key_value_heads num_kv_heads n_kv_heads num_query_groups",
        "head_dim": "kv_channels",
        "ffn": "ffn_hidden_size intermediate_size d_ff",
        "vocab": "vocab_size",
        "positions": "max_position_embeddings",
        "rope_base": "rope_theta rotary_base",
        "norm_eps": "norm_epsilon rms_norm_eps layer_norm_epsilon",
        "model": "model_name_or_path base_model",
        "ranks": "num_processes gpus n_gpus",
        "ranks_per_node": "gpus_per_node",
        "dp_replicate": "dp_replicate_size data_parallel_replicate_degree parallelism.data_parallel_replicate_degree",
        "tp": "tensor_parallel_size tp_size tensor_parallel_degree model_parallel_size",
        "pp": "pipeline_parallel_size pp_size pipeline_parallel_degree parallelism.pipeline_parallel_degree",
        "recompute": "recompute_granularity",
        "steps": "max_steps train_iters training.steps",
        "lr": "learning_rate optimizer.lr",
        "eps": "adam_epsilon adam_eps optimizer.eps",
        "weight_decay": "optimizer.weight_decay",
        "clip_norm": "max_grad_norm clip_grad gradient_clipping training.max_norm",
        "schedule": "lr_scheduler_type lr_decay_style",
        "gpu": "gpu_name gpu_type",
        "warmup": "warmup_steps lr_warmup_iters lr_scheduler.warmup_steps",
    }
)
"""By option, the words that have the same value."""
SWITCHES: Mapping[str, tuple[str, str | bool]] = MappingProxyType(
    {
        "gradient_checkpointing": ("recompute", "full"),
        "activation_checkpointing": ("recompute", "full"),
        "recompute_activations": ("recompute", "selective"),
        "use_flash_attn": ("attention", "flash"),
        "load_in_4bit": ("base", "nf4"),
        "pure_bf16": ("precision", "bf16-pure"),
        "grad_reduce_in_bf16": ("grad_dtype", "bf16"),
        "accumulate_allreduce_grads_in_fp32": ("grad_dtype", "fp32"),
        "cross_entropy_loss_fusion": ("loss", "megatron-fused"),
        "untie_embeddings_and_output_weights": ("tie_embeddings", False),
        "torch_compile": ("kernels", "compiled"),
        "compile.enable": ("kernels", "compiled"),
        "zero_quantized_weights": ("quantized_weights", True),
        "zero_quantized_gradients": ("quantized_gradients", True),
        "gradient_as_bucket_view": ("grad_buckets", "views"),
    }
)
"""Switches that mean one value of one option."""
CALLED = (
    # batches, ranks and rows
    (
        "global_batch_size train_batch_size total_batch_size training.global_batch_size",
        "--accumulate A, which is the global batch / (--micro-batch x data ranks)",
    ),
    ("batch_size", "--micro-batch B, the rows of a rank and microbatch, and --accumulate A microbatches"),
    (
        "training.local_batch_size",
        "--micro-batch B. In a pipeline these rows are microbatches: --micro-batch 1 --accumulate B",
    ),
    ("parallelism.pipeline_parallel_microbatch_size", "--micro-batch B, with the microbatches in --accumulate"),
    ("nnodes num_nodes num_machines devices", "--ranks N, the GPUs of all nodes, with --ranks-per-node R"),
    (
        "parallelism.data_parallel_shard_degree data_parallel_shard_degree dp_shard* data_parallel_size",
        "--ranks N. The ranks that --dp-replicate, --tp and --pp leave divide the model states",
    ),
    ("parallelism.tensor_parallel_degree", "--tp T --sequence-parallel"),
    ("*sequence_parallel_size", "--sequence-parallel, over the ranks of --tp"),
    ("num_distributed_optimizer_instances", "--dp-replicate R with --stage 1"),
    ("mics_shard_size", "--dp-replicate R, for groups of N / R ranks"),
    ("mics_hierarchical*", "--hierarchical-gather, with --ranks-per-node R"),
    ("num_train_epochs epochs train_samples", "--steps S"),
    ("*packing pad_to_sequence_len", "--seq T: every row is full"),
    # ZeRO
    ("*use_distributed_optimizer distributed_optimizer", "--stage 1 --recipe megatron"),
    ("zero3 zero2 zero1 zero", "--stage 3, 2 or 1"),
    (
        "deepspeed deepspeed_config* ds_config",
        "--stage S --recipe deepspeed, with values of its JSON as flags, such as --reduce-bucket-size",
    ),
    ("fsdp use_fsdp fsdp2 fsdp_version use_torch_fsdp2 fsdp_config", "--stage 3 --recipe fsdp2"),
    (
        "*sharding_strategy use_megatron_fsdp",
        "--stage: 3 is FULL_SHARD or optim_grads_params, 2 SHARD_GRAD_OP or optim_grads, 1 optim, 0 NO_SHARD; "
        "--dp-replicate makes it HYBRID",
    ),
    (
        "*fsdp_reshard_after_forward torch_fsdp2_no_reshard_after_forward",
        "--reshard-after-forward or --no-reshard-after-forward, with --stage 3",
    ),
    ("*backward_prefetch *forward_prefetch", "--prefetch 1"),
    (
        "*param_persistence_threshold",
        "--persistent-numel COUNT, with --gather module",
    ),
    ("zero_hpz* hpz", "--secondary-shard G, for G ranks of a node"),
    ("zeropp zero_plus_plus", "--secondary-shard G --quantized-weights --quantized-gradients"),
    ("*bucket_cap_mb", "--bucket-bytes SIZE, such as 25MiB"),
    ("ddp_bucket_size ddp_num_buckets", "--bucket-bytes SIZE, in bytes"),
    # offload
    (
        "*optimizer_offload *offload_optimizer* *optimizer_cpu_offload zero_offload",
        "--offload optimizer=host, or optimizer=nvme",
    ),
    ("*offload_param *offload_param_* *offload_param.* *cpu_offload_param", "--offload params=host, or params=nvme"),
    (
        "*offload_params *cpu_offload *enable_cpu_offload",
        "--offload optimizer=host,params=host at stage 3, optimizer=host below it",
    ),
    ("zero_infinity *nvme_path", "--offload optimizer=nvme,params=nvme, with --nvme DIR in a run"),
    (
        "activation_offloading *activation_checkpointing_offload cpu_offloading* fine_grained_activation_offloading",
        "--cpu-checkpointing with --recompute full, or --offload-activations",
    ),
    # pipelines
    ("vpp virtual_pipeline* num_virtual_stages*", "--pipeline interleaved --virtual-stages V"),
    (
        "num_layers_per_virtual_pipeline_stage",
        "--pipeline interleaved --virtual-stages V, for layers / (pp V) each",
    ),
    ("*pipeline_parallel_schedule", "--pipeline 1f1b, gpipe, interleaved, zb-h1 or zb-v"),
    (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "--balance-ends, for both",
    ),
    (
        "decoder_*_pipeline_num_layers pipeline_model_parallel_layout parallelism.pipeline_parallel_*_layers "
        "parallelism.pipeline_parallel_layers_per_stage",
        "--stage-layers L,L,...",
    ),
    # the model
    (
        "swiglu normalization position_embedding_type use_rotary_position_embeddings disable_bias_linear "
        "group_query_attention",
        "--model llama, with RMSNorm, rotary positions, SwiGLU, --kv-heads and no biases, or --model gpt without them",
    ),
    ("hidden_dropout attention_dropout resid_pdrop attn_pdrop embd_pdrop", "--dropout P, one rate for all"),
    ("make_vocab_size_divisible_by", "--pad-vocab, with --tp: to a multiple of 128 T"),
    ("model.name model.flavor", "--model NAME, such as llama3-8b (zerosim zoo lists them)"),
    # activations and kernels
    ("recompute_modules", "--recompute selective:PART,... with names such as core_attn, layernorm, mlp"),
    ("recompute_method recompute_num_layers", "--recompute full for uniform with 1 layer"),
    ("*checkpoint_activations activations_checkpoint*", "--recompute full"),
    (
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        "--recompute full or none. Mode selective is --recompute selective:op with option op, full:K with option K",
    ),
    ("disable_gradient_checkpointing", "--recompute none, the default"),
    (
        "flash_attn* use_flash_attention* flash_attention* attn_implementation attention_backend sdp_attention",
        "--attention flash or eager; the clock's kernel is --flash-kernel",
    ),
    ("use_liger_kernel enable_liger_kernel liger_* use_unsloth", "--loss chunked, with --kernels fused for the clock"),
    ("transformer_impl", "--transformer-engine or --no-transformer-engine"),
    ("no_masked_softmax_fusion", "--fp32-softmax, with --attention eager"),
    ("*async_tp *enable_async_tensor_parallel* tp_comm_overlap_*", "--tp-comm-overlap, with --sequence-parallel"),
    ("*enable_cuda_graph* cuda_graph cuda_graph_* disable_cuda_graphs", "--cuda-graphs"),
    # precision and the optimizer
    (
        "bf16 bf16.enabled bfloat16",
        "--precision bf16, the default: bf16 parameters and fp32 masters. The Trainer's autocast "
        "over fp32 parameters, its bf16 without DeepSpeed and FSDP, is not modelled",
    ),
    ("fp16 fp16.enabled", "--precision fp16: fp16 parameters, fp32 masters and a loss scale. Autocast is not modelled"),
    (
        "mixed_precision torch_dtype params_dtype training.dtype training.mixed_precision_param",
        "--precision bf16, fp16 or fp32, or bf16-pure without fp32 masters",
    ),
    ("training.mixed_precision_reduce main_grads_dtype *grad_accum_dtype", "--grad-dtype fp32 or bf16"),
    ("communication_data_type", "--compress bf16 or fp16, with --grad-dtype fp32"),
    ("initial_loss_scale", "--initial-scale-power P, for 2^P"),
    (
        "optim optimizer.name optimizer.type",
        "--optimizer adamw for adamw_torch, adam8bit for adamw_bnb_8bit, adafactor-hf for adafactor, ...",
    ),
    ("optimizer.implementation", "--foreach or --no-foreach; fused is --no-foreach"),
    ("adam_beta1 adam_beta2 optimizer.beta1 optimizer.beta2", "--betas B1 B2"),
    ("warmup_ratio lr_warmup_fraction", "--warmup STEPS"),
    ("lr_scheduler.decay_type", "--schedule cosine or constant"),
    # fine-tuning
    ("qlora", "--lora-rank R --base nf4"),
    ("lora use_lora use_peft adapter finetuning_type", "--lora-rank R for LoRA, with --base nf4 for QLoRA"),
    ("quantization quantization_* bnb_4bit_* double_quantization", "--base nf4 for 4 bits, with --lora-rank R"),
    ("lora_target_linear", "--lora-target all-linear"),
    ("freeze_* unfrozen_parameters", "--freeze PATTERN,..., where !PATTERN is trained"),
)
"""Names in underscores, with shell wildcards, and their equivalent here."""


def taken(name: str) -> tuple[str, str | bool | None]:
    """Return the option that another framework's flag or key sets, and a switch's value: None if the value follows.

    The option is '' for a word that does not mean one thing here.
    """
    plain = plain_word(name)
    option = next((option for option, words in TAKEN.items() if plain in words.split()), "")
    return (option, None) if option else SWITCHES.get(plain, ("", None))


def called(name: str) -> str:
    """Return, in words, the flags that another framework's flag or key is here; '' for other names."""
    if (here := row_of(name, CALLED)) is not None:
        return here[0]
    option, value = taken(name)
    if not option:
        return ""
    return f"--{'no-' if value is False else ''}{option.replace('_', '-')}" + (f" {value}" * isinstance(value, str))


def row_of(name: str, rows: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the rest of the first row that names this flag or key; None if none does."""
    plain = plain_word(name)
    return next((row[1:] for row in rows if any(fnmatchcase(plain, pattern) for pattern in row[0].split())), None)


def plain_word(name: str) -> str:
    """Return a flag or key as the tables spell it: '--num-layers' is num_layers."""
    return name.lstrip("-").replace("-", "_").lower()
