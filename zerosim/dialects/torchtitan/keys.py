"""Every key of torchtitan 0.2's TOML. torchtitan is strict about names, and takes any value without a look.

Read in torchtitan 0.2.2, config/job_config.py.
"""

from __future__ import annotations

import math
from typing import Any

from zerosim.dialects.rows import Kind, Row, anything, text, word


def whole(low: int) -> Kind:
    """Return the kind of whole numbers of at least `low`; "4", 4.5 and true are none."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"expected a whole number of at least {low}")
        return value

    return read


def number(low: float, below: float = math.inf) -> Kind:
    """Return the kind of numbers of at least `low` and below `below`."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < below:
            raise ValueError(f"expected a number of at least {low:g}" + (f" and below {below:g}" * (below < math.inf)))
        return value

    return read


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("expected a list of texts")
    return value


def _all(value: Any) -> int:
    if value != -1 or isinstance(value, bool):
        return int(whole(1)(value))
    return -1


def _part(value: Any) -> list[list[str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of lists of modules' names")
    return [texts(one) for one in value]


_NO_STEP = "nothing of a step's bytes or seconds"
_DEGREE = whole(1)

TABLE: tuple[Row, ...] = (
    Row("model.name", text, "llama3", "the family; with the flavor it names sizes in Python tables", "--model",
        changes="all", myth="the file holds the model's sizes; they are in torchtitan's code"),
    Row("model.flavor", text, "debugmodel", "the row of the family's table, such as 8B", "--model", changes="all"),
    Row("model.converters", texts, [], "quantize.linear.float8 or quantize.linear.mx, older float8 or mx: switches on "
        "[quantize]; without it those sections do nothing", "--fp8", changes="traffic seconds",
        myth="[quantize.linear.float8] alone trains in float8"),
    Row("optimizer.name", word("AdamW", "Adam"), "AdamW", "the optimizer", "--optimizer", changes="none"),
    Row("optimizer.lr", number(0), 8e-4, "the learning rate", "--lr", changes="none", option="lr"),
    Row("optimizer.beta1", number(0, 1), 0.9, "the first moment's rate", "--betas", changes="none"),
    Row("optimizer.beta2", number(0, 1), 0.95, "the second moment's rate", "--betas", changes="none"),
    Row("optimizer.eps", number(0), 1e-8, "added to the root", "--eps", changes="none", option="eps"),
    Row("optimizer.weight_decay", number(0), 0.1, "of every parameter, norms too", "--weight-decay", changes="none",
        option="weight_decay"),
    Row("optimizer.implementation", word("for-loop", "foreach", "fused"), "fused", "which of PyTorch's kernels",
        "--foreach, --no-foreach for fused, --for-loop", changes="bytes seconds"),
    Row("optimizer.early_step_in_backward", flag, False, "each parameter's step as soon as its gradient is reduced; "
        "nothing is left to clip", "--optimizer-in-backward", changes="bytes"),
    Row("lr_scheduler.warmup_steps", whole(0), 200, "linear warm-up", "--warmup", changes="none", option="warmup"),
    Row("lr_scheduler.total_steps", whole(1), None, "the schedule's length, if it is not training.steps", "--steps",
        changes="none"),
    Row("lr_scheduler.decay_ratio", number(0), None, "the share of steps in which the rate falls; before, it stays",
        changes="none"),
    Row("lr_scheduler.decay_type", word("linear", "sqrt", "cosine"), "linear", "how the rate falls",
        "--schedule cosine", changes="none"),
    Row("lr_scheduler.min_lr_factor", number(0), 0.0, "the rate at the end, as a part of lr", "--min-lr",
        changes="none"),
    Row("training.local_batch_size", whole(1), 8, "rows of a data-parallel rank", "--micro-batch", changes="bytes",
        myth="it is a microbatch; with a pipeline it is divided by pipeline_parallel_microbatch_size"),
    Row("training.global_batch_size", _all, -1, "rows of a step; the rest is gradient accumulation", "--accumulate",
        changes="traffic"),
    Row("training.seq_len", whole(1), 2048, "tokens of a row", "--seq", changes="bytes", option="seq"),
    Row("training.max_norm", number(0), 1.0, "clips gradients to this norm", "--clip-norm", changes="seconds"),
    Row("training.steps", whole(1), 10000, "steps of the job", "--steps", changes="none"),
    Row("training.enable_cpu_offload", flag, False, "FSDP's CPUOffloadPolicy: shards, gradients and states in pinned "
        "host memory", "--offload optimizer=host,params=host --pin-memory", changes="bytes traffic"),
    Row("training.dtype", word("bfloat16", "float32"), "float32", "the dtype of stored weights and states; bfloat16 "
        "has no masters", "--precision bf16-pure", changes="bytes",
        myth="bfloat16 is mixed precision, which is mixed_precision_param"),
    Row("training.mixed_precision_param", word("bfloat16", "float32"), "bfloat16", "the dtype of compute: FSDP's "
        "param_dtype, or autocast's without FSDP", "--precision bf16 or fp32", changes="bytes traffic"),
    Row("training.mixed_precision_reduce", word("float32", "bfloat16"), "float32", "the dtype in which FSDP reduces "
        "gradients; bfloat16 is no documented value, and works", "--compress bf16", changes="traffic"),
    Row("parallelism.data_parallel_replicate_degree", _DEGREE, 1, "replicas; with shard 1 it is DDP, beside no other "
        "axis", "--dp-replicate, or --stage 0 --recipe ddp", changes="bytes"),
    Row("parallelism.data_parallel_shard_degree", _all, -1, "FSDP's shards; -1 is what the other degrees leave",
        "--ranks over the other degrees", changes="bytes"),
    Row("parallelism.fsdp_reshard_after_forward", word("default", "always", "never"), "default", "default frees a "
        "block after forward unless there is a pipeline, and keeps norm and head", "--reshard-after-forward, "
        "--keep-last-unit", changes="bytes traffic"),
    Row("parallelism.tensor_parallel_degree", _DEGREE, 1, "tensor parallelism, always with sequence parallelism and a "
        "loss over parts of the vocabulary", "--tp, --sequence-parallel", changes="bytes traffic"),
    Row("parallelism.disable_loss_parallel", flag, False, "gathers the logits of all ranks before the loss",
        says="missing", changes="bytes"),
    Row("parallelism.enable_async_tensor_parallel", flag, False, "overlaps tensor parallelism's collectives; needs "
        "compile", "--tp-comm-overlap", changes="seconds"),
    Row("parallelism.pipeline_parallel_degree", _DEGREE, 1, "pipeline stages", "--pp", changes="bytes"),
    Row("parallelism.pipeline_parallel_schedule", text, "1F1B", "the order of microbatches, by PyTorch's names",
        "--pipeline", "near", "bytes seconds"),
    Row("parallelism.pipeline_parallel_schedule_csv", text, "", "a schedule from a file", says="missing",
        changes="bytes seconds"),
    Row("parallelism.pipeline_parallel_microbatch_size", whole(1), 1, "rows of a pipeline's microbatch",
        "--micro-batch, --accumulate", changes="bytes"),
    Row("parallelism.pipeline_parallel_expert_parallel_overlap", flag, True, "overlaps under DualPipeV alone",
        says="ignored"),
    Row("parallelism.pipeline_parallel_layers_per_stage", whole(1), None, "blocks of a chunk; it says how many chunks "
        "a rank has", "--virtual-stages, --stage-layers", changes="bytes"),
    Row("parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers",
        whole(0), 1, "blocks less in the first and the last chunk, for the table and the head",
        "--balance-ends, --stage-layers", changes="bytes"),
    Row("parallelism.module_fqns_per_model_part", _part, None, "the modules of each chunk", "--stage-layers",
        changes="bytes"),
    Row("parallelism.context_parallel_degree", _DEGREE, 1, "ranks that share a row; FSDP shards over them too", "--cp",
        changes="bytes traffic"),
    Row("parallelism.context_parallel_load_balancer", word("headtail", "ptrr"), "headtail", "which tokens of a row a "
        "rank has", "--context-order zigzag for headtail", changes="bytes traffic"),
    Row("parallelism.context_parallel_rotate_method", word("allgather", "alltoall"), "allgather", "keys and values are "
        "gathered, or go round", "--context allgather, or ring for alltoall", changes="bytes traffic"),
    Row("parallelism.expert_parallel_degree", _DEGREE, 1, "ranks that share a layer's experts, of those of FSDP and tp",
        "--ep", changes="bytes traffic"),
    Row("parallelism.expert_tensor_parallel_degree", _DEGREE, 1, "ranks that share an expert's maps: 1 or tp", "--etp",
        changes="bytes traffic"),
    Row("parallelism.expert_parallel_comm_backend", word("standard", "deepep"), "standard", "all-to-all, or DeepEP",
        "--dispatcher", changes="bytes traffic"),
    Row("activation_checkpoint.mode", text, "selective", "what backward recomputes", "--recompute",
        changes="bytes seconds"),
    Row("activation_checkpoint.selective_ac_option", anything, "2", "\"op\": results of every second matmul and of "
        "attention stay; \"K\": every K-th block is recomputed", "--recompute selective:op or full:K", changes="bytes",
        myth="\"2\" is a level; it is every second block"),
    Row("activation_checkpoint.memory_budget", number(0), 0.5, "the compiler's share of activations", says="missing",
        changes="bytes"),
    Row("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", texts, ["moe.router.gate"],
        "further matmuls that op recomputes", says="missing", changes="bytes seconds"),
    Row("activation_checkpoint.early_stop activation_checkpoint.visualize_memory_budget_pareto "
        "activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check activation_checkpoint.debug",
        anything, None, _NO_STEP, says="ignored"),
    Row("compile.enable", flag, False, "compiles each block, and the loss", "--kernels compiled, --loss lean",
        changes="bytes seconds"),
    Row("compile.components", texts, ["model", "loss"], "model is the blocks; loss alone leaves them eager",
        "--kernels, --loss", changes="bytes seconds", myth="[\"loss\"] compiles the model"),
    Row("compile.backend", text, "inductor", "TorchDynamo's backend; others than inductor fuse nothing",
        "--kernels eager", changes="bytes seconds"),
    Row("quantize.linear.float8.recipe_name", anything, None, "torchao's recipe: tensorwise, rowwise or "
        "rowwise_with_gw_hp; tensorwise without it", "--fp8 tensorwise or rowwise, --fp8-exact-wgrad",
        changes="traffic seconds"),
    Row("quantize.linear.float8.filter_fqns", texts, [], "parts of names; maps with one of them stay in 16 bits",
        "--fp8-exact-first, --fp8-exact-last for whole blocks", changes="traffic seconds"),
    Row("quantize.linear.float8.enable_fsdp_float8_all_gather", flag, False, "FSDP gathers weights in 8 bits",
        "--fp8-gather", changes="traffic seconds"),
    Row("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", flag, False,
        "one all-reduce for all scales of those gathers", "one for each unit", "near", "traffic seconds"),
    Row("quantize.linear.float8.emulate", flag, False, "the same values without 8-bit products, for tests",
        says="missing", changes="traffic seconds"),
    Row("quantize.linear.mx.recipe_name", text, "mxfp8_cublas", "mxfp8_cublas, mxfp8_cublas_rceil or mxfp8_emulated",
        "--fp8 mxfp8 --fp8-library torchao, --mx-rounding", changes="traffic seconds"),
    Row("quantize.linear.mx.filter_fqns", texts, ["output"], "parts of names; maps with one of them stay in 16 bits",
        "--fp8-exact-first, --fp8-exact-last for whole blocks", changes="traffic seconds"),
    Row("quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", anything, "triton", "whose kernel casts",
        says="ignored", changes="traffic seconds"),
    Row("quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.recipe_name quantize.grouped_mm.mx.fqns",
        anything, None, "experts' maps in 8 bits, with their own converters", says="missing",
        changes="traffic seconds"),
    Row("fault_tolerance.enable", flag, False, "torchft's replicas, which come and go", says="missing",
        changes="traffic"),
    Row("fault_tolerance.process_group fault_tolerance.process_group_timeout_ms fault_tolerance.replica_id "
        "fault_tolerance.group_size fault_tolerance.min_replica_size fault_tolerance.semi_sync_method",
        anything, None, "torchft's, without effect unless it is enabled", says="missing", changes="traffic"),
    Row("job.custom_config_module", text, "", "imports a Python module while the file is parsed", says="refuse"),
    Row("experimental.custom_args_module", text, "", "the same, deprecated", says="refuse"),
    Row("experimental.custom_import", text, "", "imports a Python module", says="refuse"),
    Row("validation.enable", flag, False, "validates between training steps; they are not a training step's",
        says="ignored", changes="save"),
    Row("debug.moe_force_load_balance", flag, False, "gives every expert as many tokens", "--routing even",
        says="ignored", changes="save"),
    *(
        Row(" ".join(f"{section}.{name}" for name in names.split()), anything, None, does, says="ignored",
            changes="save")
        for section, names, does in (
            ("job", "config_file dump_folder description print_config save_config_file", _NO_STEP),
            ("model", "hf_assets_path tokenizer_path print_after_conversion", "the tokenizer, and what is printed"),
            ("training", "dataset dataset_path gc_freq gc_debug", "what the rows hold; " + _NO_STEP),
            ("training.dataloader", "num_workers persistent_workers pin_memory prefetch_factor", "loads the next rows"),
            ("profiling", "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
             "enable_memory_snapshot save_memory_snapshot_folder", "writes traces"),
            ("metrics", "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks "
             "enable_wandb", "writes numbers"),
            ("checkpoint", "enable enable_ft_dataloader_checkpoints folder interval initial_load_path "
             "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized last_save_model_only "
             "last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading "
             "enable_first_step_checkpoint create_seed_checkpoint load_only", "saves between steps"),
            ("comm", "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
             "save_traces_file_prefix mode", "time limits and logs of collectives"),
            ("memory_estimation", "enable disable_fake_mode", "torchtitan's own estimate, for FSDP"),
            ("validation", "dataset dataset_path local_batch_size seq_len freq steps", "validation's own"),
            ("validation.dataloader", "num_workers persistent_workers pin_memory prefetch_factor", "validation's own"),
            ("debug", "seed deterministic deterministic_warn_only", "which numbers are drawn"),
        )
    ),
)  # fmt: skip
OLD = {
    "quantize.dense": "[quantize.linear]",
    "quantize.moe": "[quantize.grouped_mm]",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.enabled": "validation.enable",
    "job.print_args": "job.print_config",
    "debug.ac_preserve_rng_state": "activation_checkpoint.preserve_rng_state",
    "debug.ac_determinism_check": "activation_checkpoint.determinism_check",
    "debug.ac_debug": "activation_checkpoint.debug",
    "float8": "[quantize.linear.float8]",
    "mx": "[quantize.linear.mx]",
    "activation_offload": "no section",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "[compile] enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "optimizer.fused": "optimizer.implementation",
    "optimizer.foreach": "optimizer.implementation",
    "model.norm_type": "nothing: the flavor has it",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Names of earlier versions, and those that 0.2.2 has in their place."""
