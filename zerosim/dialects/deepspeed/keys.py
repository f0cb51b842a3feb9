"""The keys of DeepSpeed's JSON, as DeepSpeed 0.19.8 takes them: what each does there and here."""

from __future__ import annotations

import sys

from zerosim.dialects.rows import Kind, Row, anything, boolean, by_key, integer, not_boolean, optional, real, text, word

_Z, _OO, _OP = "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_DEVICE = word("none", "cpu", "nvme")


def stage(value: object) -> int:
    """Read a ZeRO stage: 3, "3", 3.0, and true, which is 1."""
    number = int(integer()(value))
    if number not in range(4):
        raise ValueError("expected a stage, 0 to 3")
    return number


_LOSS_SCALE, _COUNT = not_boolean(real(0, sys.float_info.max)), not_boolean(integer())


def leaves(value: object) -> object:
    """Read names of classes: one text, or several."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return value
    raise ValueError("expected names")


def _interval(low: int | None = None) -> Kind:
    """Return the kind of ZenFlow's intervals: "auto", or a number."""
    number = integer(low)

    def read(value: object) -> object:
        if isinstance(value, str) and value != "auto":
            raise ValueError('expected "auto" or a whole number')
        return value if value == "auto" else number(value)

    return read


def _passes(value: object) -> object:
    known = ("z1", "z3", "autosp", "autotp")
    if not isinstance(value, list) or any(one not in known for one in value):
        raise ValueError(f"expected some of {', '.join(known)}, in brackets")
    return value


def _names(section: str, *names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names)


TABLE = (
    # the batch
    Row("train_batch_size", anything, None, "rows of a step over all data-parallel ranks",
        "micro batch x accumulation x data ranks", "same", "batch"),
    Row("train_micro_batch_size_per_gpu", anything, None, "rows of a rank in a microbatch",
        "--micro-batch", "same", "bytes seconds", myth="the batch of a step"),
    Row("gradient_accumulation_steps", anything, None, "microbatches of a step", "--accumulate", "same",
        "traffic seconds", myth="saves model states; it saves activations, and only against one larger batch"),
    Row("gradient_clipping", anything, 1.0, "clips gradients to this global norm; 0 is off (0 was the default before "
        "June 2026)", "--clip-norm", "same", "seconds"),
    # zero_optimization
    Row(_Z, anything, None, "true means stage 1, a deprecated form", "--stage", "same", "bytes"),
    Row(f"{_Z}.stage", stage, 0, "what is divided over the data ranks", "--stage", "same", "bytes traffic"),
    Row(f"{_Z}.contiguous_gradients", boolean, True, "copies gradients into the bucket as they come",
        "always on here", "missing", "bytes"),
    Row(f"{_Z}.reduce_scatter", boolean, True, "with use_multi_rank_bucket_allreduce, its default, stages 1 and 2 "
        "all-reduce whatever this says", "--grad-reduction all_reduce", "same", "traffic",
        myth="gradients are reduce-scattered, half the traffic of an all-reduce"),
    Row(f"{_Z}.use_multi_rank_bucket_allreduce", boolean, True, "false: one reduce for each owner in a bucket",
        "--grad-reduction reduce_scatter is near", "near", "traffic"),
    Row(f"{_Z}.reduce_bucket_size", integer(1), 500_000_000, "elements in the buffer that gradients are reduced from",
        "--reduce-bucket", "same", "bytes traffic"),
    Row(f"{_Z}.allgather_partitions", boolean, True, "nothing that was seen", "", "ignored", "none"),
    Row(f"{_Z}.allgather_bucket_size", integer(0), 500_000_000, "nothing where PyTorch has all_gather_into_tensor; an "
        "odd number fails when the optimizer is built", "", "ignored", "none", myth="a smaller bucket saves memory"),
    Row(f"{_Z}.overlap_comm", optional(boolean), None, "stages 1 and 2: a second bucket and a side stream; stage 3, "
        "where it is on by default: the side stream", "--reduce-buffers 2, --overlap-comm", "same", "bytes seconds",
        myth="costs nothing; at stages 1 and 2 it costs a second bucket"),
    Row(f"{_Z}.compute_grad_norm", boolean, True, "false leaves the norm out at stages 1 and 2", "", "missing",
        "seconds"),
    Row(_names(_Z, "load_from_fp32_weights", "elastic_checkpoint", "ignore_unused_parameters", "override_module_apply",
        "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks"), boolean, None,
        "checkpoints and checks", "", "ignored", "none"),
    Row(_OO, anything, None, "masters, moments and the step in host memory or on NVMe", "--offload", "same", "bytes"),
    Row(f"{_OO}.device", _DEVICE, "none", "where masters, moments and the step are; stage 0 ignores it",
        "--offload optimizer=host, or optimizer=nvme", "same", "bytes traffic seconds"),
    Row(f"{_OO}.pin_memory", boolean, True, "page-locked host memory", "--pin-memory", "same", "host bytes"),
    Row(f"{_OO}.nvme_path", optional(text), None, "the drive's folder", "--nvme of a run", "same", "none"),
    Row(f"{_OO}.buffer_count", integer(0), 4, "host buffers before NVMe", "", "missing", "host bytes"),
    Row(_names(_OO, "pipeline_read", "pipeline_write"), boolean, False, "overlaps the drive with the CPU's step", "",
        "missing", "seconds"),
    Row(f"{_OO}.fast_init", boolean, False, "the start alone", "", "ignored", "none"),
    Row(f"{_OO}.ratio", real(0, 1), 1.0, "share that is updated on the CPU; below 1 at stage 3 alone", "", "missing",
        "bytes seconds"),
    Row(f"{_OO}.super_offload", boolean, False, "stage 3 alone; nothing at stage 2", "", "missing", "seconds"),
    Row(f"{_OO}.cpuadam_cores_perc", real(0, 1), 0.8, "CPU cores beside super_offload", "", "missing", "seconds"),
    Row(_OP, anything, None, "parameters in host memory or on NVMe", "--offload", "same", "bytes"),
    Row(f"{_OP}.device", _DEVICE, "none", "where parameters are; stage 3 alone, below it nothing",
        "--offload params=host, or params=nvme", "same", "bytes traffic seconds"),
    Row(_names(_OP, "buffer_count", "buffer_size", "max_in_cpu"), integer(0), None,
        "NVMe's buffers, and elements that stay in the CPU", "", "missing", "host bytes"),
    Row(f"{_OP}.pin_memory", boolean, True, "page-locked host memory", "--pin-memory", "same", "host bytes"),
    Row(f"{_OP}.nvme_path", optional(text), None, "the drive's folder", "--nvme of a run", "same", "none"),
    Row(f"{_Z}.sub_group_size", integer(0), 1_000_000_000, "stage 3: elements that the optimizer updates at a time; 0 "
        "makes every parameter a group", "--sub-group; 0 is 1 here", "same", "bytes seconds",
        myth="0 means no limit, as in zerosim; it is the opposite"),
    Row(_names(_Z, "stage3_prefetch_bucket_size", "prefetch_bucket_size"), integer(0), 50_000_000,
        "stage 3: elements gathered ahead", "--prefetch-elements", "same", "bytes seconds"),
    Row(_names(_Z, "stage3_param_persistence_threshold", "param_persistence_threshold"), integer(0), 100_000,
        "stage 3: tensors of at most so many elements stay gathered", "--persistent-numel", "same", "bytes traffic",
        myth="what is larger is never kept; it bounds single tensors, not their sum"),
    Row(_names(_Z, "stage3_model_persistence_threshold", "model_persistence_threshold"), integer(0), sys.maxsize,
        "stage 3: a bound on all kept tensors", "", "missing", "bytes"),
    Row(_names(_Z, "stage3_max_live_parameters", "max_live_parameters"), integer(0), 1_000_000_000,
        "stage 3: throttles the prefetch alone; 0 leaves none", "--max-live; 0 is --prefetch-elements 0", "same",
        "bytes seconds", myth="a bound on gathered parameters; what computes is gathered whatever it says"),
    Row(_names(_Z, "stage3_max_reuse_distance", "max_reuse_distance"), integer(0), 1_000_000_000,
        "stage 3: not freed if used again within so many elements", "", "missing", "bytes traffic"),
    Row(_names(_Z, "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save"), boolean, False,
        "the whole model on rank 0 at a save", "", "missing", "save"),
    Row(f"{_Z}.stage3_module_granularity_threshold {_Z}.module_granularity_threshold", integer(), 0,
        "small modules are gathered together", "", "missing", "traffic"),
    Row(f"{_Z}.stage3_use_all_reduce_for_fetch_params {_Z}.use_all_reduce_for_fetch_params", boolean, False,
        "gathers by all-reduce", "", "missing", "traffic"),
    Row(f"{_Z}.stage3_allgather_sequential {_Z}.allgather_sequential", boolean, False, "sets the prefetch bucket to 1",
        "--prefetch-elements 1", "same", "seconds"),
    Row(f"{_Z}.round_robin_gradients", boolean, False, "another order of tensors over ranks, for offload's copies", "",
        "missing", "seconds"),
    Row(f"{_Z}.parameter_alignment", boolean, False, "aligns each tensor to 16 B in flat buffers", "", "missing",
        "bytes"),
    Row(f"{_Z}.zero_hpz_partition_size", integer(0), 1, "hpZ: a secondary shard among so many ranks",
        "--secondary-shard; 1 is 0 here", "same", "bytes traffic"),
    Row(f"{_Z}.zero_quantized_weights", boolean, False, "qwZ: gathers int8 codes", "--quantized-weights", "same",
        "traffic"),
    Row(f"{_Z}.zero_quantized_nontrainable_weights", boolean, False, "frozen weights stay int8", "", "missing",
        "bytes traffic"),
    Row(f"{_Z}.zero_quantized_gradients", boolean, False, "qgZ: reduces int4 codes", "--quantized-gradients", "same",
        "traffic"),
    Row(f"{_Z}.memory_efficient_linear", boolean, True, "a linear map without a saved copy of its weight",
        "always on here", "missing", "bytes"),
    Row(f"{_Z}.zenflow", anything, None, "ZenFlow: a hot share of gradients updated at once", "", "missing",
        "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.topk_ratio", real(above=0, below=1), 0.1, "ZenFlow's hot share", "", "missing",
        "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.select_strategy", word("auto", "step", "epoch"), "auto", "ZenFlow", "", "missing",
        "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.select_interval", _interval(), "auto", "ZenFlow", "", "missing",
        "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.update_interval", _interval(1), "auto", "ZenFlow", "", "missing",
        "bytes traffic seconds"),
    Row(_names(f"{_Z}.zenflow", "overlap_step", "offload"), boolean, False, "ZenFlow", "", "missing",
        "bytes traffic seconds"),
    Row(_names(f"{_Z}.zenflow", "auto_ratio", "pt_reserved_cores_perc"), real(0, 1), None, "ZenFlow", "", "missing",
        "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.full_warm_up_rounds", integer(), 0, "ZenFlow", "", "missing", "bytes traffic seconds"),
    Row(f"{_Z}.zenflow.steps_per_epoch", optional(integer()), None, "ZenFlow", "", "missing", "bytes traffic seconds"),
    Row(_names(f"{_Z}.leaf_module", "classes", "names", "name_suffixes") + f" {_Z}.leaf_module", leaves, None,
        "gathers such modules whole", "", "missing", "bytes"),
    Row(f"{_Z}.save_muon_momentum_buffer_in_memory", boolean, False, "Muon at stage 3 with NVMe", "", "missing",
        "bytes"),
    Row(_names(_Z, "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"), optional(boolean), None,
        "deprecated: offload_optimizer and offload_param; the last only warns", "--offload", "same", "bytes"),
    Row(f"{_Z}.legacy_stage1", boolean, False, "fails when the engine is built", "", "refuse", "none"),
    Row(_names(_Z, "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), anything, None,
        "removed in 0.19.7", "--dp-replicate, --hierarchical-gather", "near", "traffic"),
    # precision
    Row("fp16", anything, None, "fp16 with a loss scale", "--precision fp16", "same", "bytes"),
    Row("fp16.enabled", boolean, False, "fp16 with a loss scale", "--precision fp16", "same", "bytes"),
    Row("fp16.loss_scale", _LOSS_SCALE, 0.0, "a fixed loss scale; 0 is dynamic", "--loss-scale", "same", "none"),
    Row("fp16.initial_scale_power", integer(), 16, "where a dynamic scale starts", "--initial-scale-power", "same",
        "none"),
    Row("fp16.loss_scale_window", _COUNT, 1000, "steps until it doubles", "--loss-scale-window", "same", "none"),
    Row("fp16.hysteresis", integer(), 2, "overflows until it halves", "--hysteresis", "same", "none"),
    Row("fp16.min_loss_scale", _COUNT, 1, "its floor", "--min-loss-scale", "same", "none"),
    Row("fp16.consecutive_hysteresis", boolean, False, "refills the hysteresis", "", "missing", "none"),
    Row("fp16.auto_cast", boolean, False, "casts inputs to fp16", "", "ignored", "none"),
    Row("fp16.fp16_master_weights_and_grads", boolean, False, "masters in fp16", "", "missing", "bytes"),
    Row("bf16 bfloat16", anything, None, "bf16 with fp32 masters", "--precision bf16", "same", "bytes"),
    Row("bf16.enabled bfloat16.enabled", boolean, False, "bf16 with fp32 masters", "--precision bf16", "same", "bytes",
        myth="halves training memory; masters and moments stay fp32"),
    Row("bf16.bf16_master_weights_and_grads bfloat16.bf16_master_weights_and_grads", boolean, False,
        "no fp32 masters", "--precision bf16-pure", "near", "bytes"),
    Row("bf16.bf16_optimizer_states bfloat16.bf16_optimizer_states", boolean, False,
        "moments in bf16; needs bf16_master_weights_and_grads", "--precision bf16-pure", "near", "bytes"),
    Row(_names("bf16", "immediate_grad_update", "check_grad_overflow") + " "
        + _names("bfloat16", "immediate_grad_update", "check_grad_overflow"), boolean, None, "seconds of checks alone",
        "", "ignored", "seconds"),
    Row("data_types.grad_accum_dtype", anything, None, "dtype of stored gradients", "--grad-dtype", "same",
        "bytes traffic"),
    Row(_names("data_types", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"), anything, None,
        "dtypes beside the mode's", "", "missing", "bytes"),
    Row("communication_data_type", anything, None, "dtype of reductions", "--compress bf16 or fp16", "same",
        "traffic bytes"),
    Row("seq_parallel_communication_data_type", anything, "fp32", "dtype of Ulysses' exchanges", "", "missing",
        "traffic"),
    Row("prescale_gradients gradient_predivide_factor gradient_allreduce_op", anything, None,
        "another order of the division", "", "ignored", "none"),
    # optimizer
    Row("optimizer", anything, None, "DeepSpeed's own optimizer", "--optimizer", "same", "bytes seconds"),
    Row("optimizer.type", anything, None, "which optimizer; Adam is AdamW unless adam_w_mode is false", "--optimizer",
        "same", "bytes seconds"),
    Row("optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay", anything,
        None, "the optimizer's numbers", "--lr, --betas, --eps, --weight-decay", "same", "none"),
    Row("optimizer.params.torch_adam", anything, False, "PyTorch's AdamW (foreach) in place of DeepSpeed's",
        "--foreach", "same", "bytes seconds"),
    Row("optimizer.params.adam_w_mode", anything, True, "false: Adam", "--optimizer adam", "same", "none"),
    Row("optimizer.params.fp32_optimizer_states", anything, True, "the CPU's moments in fp32", "", "missing",
        "host bytes"),
    Row("optimizer.params.max_grad_norm", anything, None, "fails when the engine is built", "--clip-norm", "same",
        "none"),
    Row("scheduler", anything, None, "the learning rate", "--schedule", "near", "none"),
    Row("scheduler.type", anything, None, "the learning rate over the steps", "--schedule, --warmup", "near", "none"),
    # further sections
    Row("activation_checkpointing.partition_activations", anything, False, "divides checkpoints over tensor-parallel "
        "ranks, where the model's code calls deepspeed.checkpointing", "--partition-activations", "same",
        "bytes traffic", myth="switches recompute on"),
    Row("activation_checkpointing.cpu_checkpointing", anything, False, "checkpoints in host memory, where the model's "
        "code calls deepspeed.checkpointing", "--cpu-checkpointing", "same", "bytes"),
    Row("activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints", anything,
        None, "one buffer for all checkpoints", "", "missing", "bytes"),
    Row("activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile "
        "activation_checkpointing", anything, None, "measures", "", "ignored", "seconds"),
    Row("torch_autocast", anything, None, "autocast over fp32 weights", "--autocast", "same", "bytes"),
    Row("torch_autocast.enabled", anything, False, "autocast over fp32 weights", "--precision fp32 --autocast", "same",
        "bytes"),
    Row("torch_autocast.dtype", anything, "bfloat16", "autocast's dtype", "--autocast", "same", "bytes"),
    Row("torch_autocast.lower_precision_safe_modules", leaves, None, "modules that autocast casts", "", "missing",
        "bytes"),
    Row("tensor_parallel.autotp_size", integer(), 0, "tensor-parallel ranks; the batch check counts all ranks", "--tp",
        "same", "bytes traffic"),
    Row("tensor_parallel.tp_overlap_comm", boolean, False, "overlaps all-reduces with compute", "--tp-comm-overlap is "
        "near", "near", "seconds"),
    Row("tensor_parallel.vocab_parallel_lm_head", optional(boolean), None, "divides the head's vocabulary",
        "always on here", "near", "bytes"),
    Row("sequence_parallel_size data_parallel_size", anything, None, "Ulysses' ranks", "--cp C --context ulysses",
        "near", "bytes traffic"),
    Row(_names("compile", "deepcompile", "autoep_non_moe", "free_activation", "offload_activation",
        "offload_opt_states", "symmetric_memory", "debug_log", "offload_parameters", "sync_before_reduce",
        "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "keep_all_input_tensors"), boolean,
        False, "DeepCompile", "", "missing", "bytes seconds"),
    Row(_names("compile", "double_buffer", "keep_int_input_tensors", "offload_activation_pin_memory"), boolean, True,
        "DeepCompile", "", "missing", "bytes seconds"),
    Row("compile.free_activation_threshold", integer(), 10 * 2**20, "DeepCompile", "", "missing", "bytes seconds"),
    Row("compile.passes", optional(_passes), None, "DeepCompile", "", "missing", "bytes seconds"),
    Row("compile", anything, None, "DeepCompile", "", "missing", "bytes seconds"),
    Row("pipeline.stages pipeline.partition pipeline.activation_checkpoint_interval", anything, None,
        "PipelineModule's cut", "--pp, --stage-layers, --recompute", "same", "bytes"),
    Row("zero_allow_untested_optimizer", anything, False, "permits any optimizer", "", "ignored", "none"),
    Row("zero_force_ds_cpu_optimizer", anything, True, "with offload, refuses PyTorch's optimizers; accelerate puts "
        "DeepSpeedCPUAdam in their place", "", "missing", "seconds"),
    Row("aio.block_size aio.queue_depth aio.thread_count aio.single_submit aio.overlap_events aio.intra_op_parallelism "
        "aio.use_gds aio", anything, None, "the NVMe queue", "", "missing", "seconds"),
    Row("disable_allgather dump_state steps_per_print wall_clock_breakdown memory_breakdown flops_profiler "
        "comms_logger monitor_config tensorboard wandb csv_monitor checkpoint checkpoint.tag_validation "
        "dataloader_drop_last disable_python_gc",
        anything, None, "logs and checkpoints", "", "ignored", "seconds"),
    Row("nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity "
        "graph_harvesting curriculum_learning progressive_layer_drop", anything, None,
        "removed in 0.19.7: DeepSpeedConfigError, even when false", "", "refuse", "none"),
)  # fmt: skip
ROWS = by_key(TABLE)
STRICT = (_Z, _OO, _OP, f"{_Z}.zenflow", f"{_Z}.leaf_module", "fp16", "bf16", "bfloat16", "compile")
"""Sections in which DeepSpeed refuses unknown keys, and drops "auto"."""
REMOVED = frozenset(key for row in TABLE if "removed in 0.19.7" in row.does for key in row.key.split())
