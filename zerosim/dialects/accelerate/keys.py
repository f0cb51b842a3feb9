"""The keys of accelerate's file, as `accelerate launch` 1.15 reads them.

The launcher joins sections to its own arguments: in `fsdp_config`, the prefix `fsdp_` may be left out.
"""

from __future__ import annotations

from typing import Any

from zerosim.dialects.rows import Row, anything, boolean, integer, optional, real


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TYPES = _words(
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM "
    "MULTI_HPU "
    "MULTI_NEURON"
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
DICTS = ("LOCAL_STATE_DICT", "FULL_STATE_DICT", "SHARDED_STATE_DICT")
BACKENDS = _words(
    "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
    "AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON"
)
BESIDE_A_FILE = _words(
    "zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device offload_param_device "
    "offload_optimizer_nvme_path offload_param_nvme_path zero3_save_16bit_model"
)
"""Keys of `deepspeed_config` that a `deepspeed_config_file` excludes."""


def upper(*known: str) -> Any:
    """Return the kind of these words in any case; of numbers, counted from 1, too."""

    def read(value: Any) -> str:
        text = str(value).upper()
        if text.isdigit() and 1 <= int(text) <= len(known):
            return known[int(text) - 1]
        if text not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return text

    return read


def word_of(*known: str) -> Any:
    """Return the kind of these words in any case, without numbers."""

    def read(value: Any) -> str:
        text = value.upper() if isinstance(value, str) else ""
        if text not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return text

    return read


def prefetch(value: Any) -> str:
    """Return the kind of FSDP1's prefetches, of which the last has no number."""
    text = str(value).upper()
    return text if text == "NO_PREFETCH" else str(upper("BACKWARD_PRE", "BACKWARD_POST")(value))


def digits(value: Any) -> int:
    """Return a whole number that the launcher passes on as text: 2 and "2", not 2.0."""
    if isinstance(value, bool) or not str(value).strip().isdecimal():
        raise ValueError("expected a whole number, without a point")
    return int(str(value))


def mixed(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            "YAML reads an unquoted no as false, and accelerate stops at it ('bool' object has no attribute 'lower'); "
            "write 'no' in quotes"
            if value is False
            else "expected no, fp16, bf16 or fp8, as text"
        )
    if value.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError("expected one of no, fp16, bf16, fp8")
    return value.lower()


def _algorithm(value: Any) -> str:
    if str(value).lower() not in ("max", "most_recent"):
        raise ValueError("expected max or most_recent")
    return str(value).lower()


def _products(value: Any) -> list[bool]:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, bool) for one in value):
        raise ValueError("expected a list of three: of forward, inputs' gradients and weights' gradients")
    return value


def auto_or(kind: Any) -> Any:
    """Return the kind that takes "auto" too."""
    return lambda value: "auto" if value == "auto" else kind(value)


def _section(name: str, keys: str) -> str:
    return " ".join(f"{name}.{key}" for key in keys.split())


_NO = {"says": "ignored", "changes": "none"}
TABLE: tuple[Row, ...] = (
    Row("compute_environment", anything, "LOCAL_MACHINE", "SageMaker's file has keys of its own", **_NO),
    Row("distributed_type", anything, None, "what wraps the model", "--stage and --recipe", "same", "bytes traffic"),
    Row("num_processes", integer(1), -1, "the ranks of all machines", "--ranks N", "same", "all",
        myth="the ranks of one machine"),
    Row("num_machines", optional(integer(1)), 1, "nodes", "--ranks-per-node R", "same", "traffic"),
    Row("mixed_precision", mixed, None, "the format of compute; DDP autocasts fp32 weights",
        "--precision, or --precision fp32 --autocast bf16 under DDP", "near", "bytes",
        myth="bf16 weights: under DDP they stay fp32"),
    Row("downcast_bf16 gpu_ids machine_rank main_process_ip main_process_port rdzv_backend same_network "
        "main_training_function tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm commands command_file "
        "use_cpu debug enable_cpu_affinity mpirun_config fp16", anything, None, "how processes start", **_NO),
    Row("fsdp_config.fsdp_version", upper("1", "2"), 1, "FSDP1 or FSDP2", "--recipe fsdp1 or fsdp2", "near", "bytes",
        myth="2 is the default: it is in TrainingArguments, here it is 1"),
    Row("fsdp_config.fsdp_sharding_strategy", upper(*STRATEGIES), "FULL_SHARD",
        "version 1: what is sharded, and over which ranks", "--stage, and --dp-replicate", "same", "bytes traffic"),
    Row("fsdp_config.fsdp_reshard_after_forward", boolean, True, "version 2: free a unit after forward",
        "--reshard-after-forward", "same", "bytes traffic", myth="it works in version 1: there the strategy wins"),
    Row("fsdp_config.fsdp_auto_wrap_policy", optional(word_of(*POLICIES)), "NO_WRAP", "which modules are units",
        "units are blocks", "near", "bytes traffic", myth="blocks are units by default: the whole model is one"),
    Row("fsdp_config.fsdp_transformer_layer_cls_to_wrap", optional(anything), None, "the class of a unit",
        "units are blocks", "same", "bytes"),
    Row("fsdp_config.fsdp_min_num_params", integer(), 10**8, "elements of a unit of SIZE_BASED_WRAP", "", "missing",
        "bytes"),
    Row("fsdp_config.fsdp_offload_params", boolean, False,
        "shards, gradients, states and the optimizer step on the CPU, pinned",
        "--offload optimizer=host,params=host --pin-memory", "same", "bytes traffic seconds",
        myth="only parameters move"),
    Row("fsdp_config.fsdp_backward_prefetch", optional(prefetch),
        "NO_PREFETCH", "version 1: what backward gathers early", "--prefetch 1", "same", "bytes seconds"),
    Row("fsdp_config.fsdp_forward_prefetch", boolean, False, "version 1: forward gathers the next unit early",
        "--forward-prefetch", "same", "seconds", myth="it works in version 2: the launcher drops it"),
    Row("fsdp_config.fsdp_activation_checkpointing", boolean, False, "recompute each unit", "--recompute full", "same",
        "bytes seconds"),
    Row("fsdp_config.fsdp_activation_checkpointing_offload", boolean, False, "a unit's input waits on the host",
        "--cpu-checkpointing", "same", "bytes traffic"),
    Row("fsdp_config.fsdp_state_dict_type", optional(upper(*DICTS)), None, "the form of a checkpoint", "", "missing",
        "save peak"),
    Row("fsdp_config.fsdp_cpu_ram_efficient_loading", boolean, True, "rank 0 alone loads the weights",
        "--host-load first", "same", "load peak"),
    Row("fsdp_config.fsdp_sync_module_states", boolean, True, "rank 0 sends the weights to the others", "", "missing",
        "load peak"),
    Row("fsdp_config.fsdp_use_orig_params", boolean, True, "no bytes of a step", **_NO),
    Row("fsdp_config.fsdp_limit_all_gathers fsdp_config.fsdp_ignored_modules",
        anything, None, "no bytes of a step", **_NO),
    Row("deepspeed_config.zero_stage", digits, 2, "the ZeRO stage", "--stage", "same", "bytes"),
    Row("deepspeed_config.gradient_accumulation_steps", auto_or(integer(1)), "auto", "microbatches of a step",
        "--accumulate", "same", "batch"),
    Row("deepspeed_config.gradient_clipping", auto_or(real(0)), "auto", "the norm that gradients are clipped to",
        "--clip-norm", "same", "none", myth="0 turns it off: the key is left out then, and DeepSpeed's own 1.0 holds"),
    Row("deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device",
        optional(word_of("NONE", "CPU", "NVME")), "none", "where states lie", "--offload", "same", "bytes"),
    Row("deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path", anything, "none",
        "the drive's folder", "--nvme DIR", "same", "none"),
    Row("deepspeed_config.zero3_init_flag", boolean, None, "shard weights while they are made", "--host-load device",
        "same", "load"),
    Row("deepspeed_config.zero3_save_16bit_model", boolean, False, "gather weights to save them", "", "missing",
        "save peak"),
    Row("deepspeed_config.deepspeed_config_file", optional(anything), "none", "DeepSpeed's own file", "that file",
        "same", "-"),
    Row("deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile "
        "deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config.deepspeed_exclusion_filter "
        "deepspeed_config.deepspeed_inclusion_filter", anything, None, "how processes start", **_NO),
    Row("parallelism_config.parallelism_config_dp_replicate_size", integer(), 1, "replicas", "--dp-replicate", "same",
        "bytes traffic"),
    Row("parallelism_config.parallelism_config_dp_shard_size", integer(), 1, "ranks of a replica",
        "--ranks / the other sizes", "same", "bytes", myth="it is filled in: absent is 1"),
    Row("parallelism_config.parallelism_config_tp_size", integer(), 1, "tensor parallelism", "--tp", "same",
        "bytes traffic"),
    Row(_section("parallelism_config", "parallelism_config_cp_size"), integer(), 1, "context parallelism", "--cp",
        "same", "bytes traffic"),
    Row("parallelism_config.parallelism_config_cp_backend", anything, "torch", "whose context parallelism", "--context",
        "same", "bytes traffic"),
    Row("parallelism_config.parallelism_config_cp_comm_strategy", anything, "allgather",
        "how keys and values reach other ranks", "--context allgather or ring", "same", "bytes traffic"),
    Row("parallelism_config.parallelism_config_sp_size", integer(), 1, "Ulysses' sequence parallelism",
        "--cp C --context ulysses", "same", "bytes traffic"),
    Row(_section("parallelism_config", "parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation"), anything, None,
        "how Ulysses reads its batch", **_NO),
    Row(_section("megatron_lm_config", "megatron_lm_tp_degree megatron_lm_pp_degree"), integer(1), 1,
        "Megatron's parallelism", "--tp, --pp", "same", "bytes"),
    Row("megatron_lm_config.megatron_lm_num_micro_batches", integer(1), 1, "microbatches of a step", "--accumulate",
        "same", "bytes"),
    Row(_section("megatron_lm_config", "megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
        "megatron_lm_use_distributed_optimizer"), boolean, False, "Megatron's", "--sequence-parallel, --recompute "
        "selective, --stage 1", "same", "bytes"),
    Row("megatron_lm_config.megatron_lm_recompute_granularity", word_of("FULL", "SELECTIVE"), None,
        "what is recomputed",
        "--recompute", "same", "bytes"),
    Row("megatron_lm_config.megatron_lm_gradient_clipping", real(0), 1.0, "the norm of clipping", "--clip-norm", "same",
        "none"),
    Row("fp8_config.fp8_backend", optional(anything), None, "AO (torchao, tensorwise), TE or MSAMP; the first that is "
        "installed", "--fp8 tensorwise; --fp8 delayed", "same", "seconds"),
    Row("fp8_config.fp8_format", word_of("HYBRID", "E4M3", "E5M2"), "HYBRID", "TE: E4M3 alone, or E5M2 for gradients",
        "--fp8-format", "same", "seconds"),
    Row("fp8_config.fp8_amax_history_len", integer(1), 1024, "TE: steps whose amax is kept", "--fp8-amax-history",
        "same", "seconds"),
    Row("fp8_config.fp8_amax_compute_algo", _algorithm, "most_recent", "TE: which of them gives the scale",
        "--fp8-amax-algo", "same", "seconds", myth="most_recent is passed on: Transformer Engine's own max holds"),
    Row("fp8_config.fp8_margin", integer(0), 0, "TE: powers of two left free above the scale", "--fp8-margin", "same",
        "seconds"),
    Row("fp8_config.fp8_override_linear_precision", _products, [False, False, False], "TE: a list for forward, inputs' "
        "and weights' gradients; true is 16 bits", "--fp8-exact-wgrad for the last", "same", "seconds"),
    Row("fp8_config.fp8_use_mxfp8_block_scaling", boolean, False, "TE: MXFP8 in place of delayed scaling",
        "--fp8 mxfp8", "same", "seconds"),
    Row("fp8_config.fp8_enable_fsdp_float8_all_gather", boolean, True, "AO: FSDP2 gathers weights in 8 bits",
        "--fp8-gather", "same", "seconds"),
    Row("fp8_config.fp8_pad_inner_dim fp8_config.fp8_interval fp8_config.fp8_use_autocast_during_eval "
        "fp8_config.fp8_opt_level", anything, None, "no bytes of a step", **_NO),
    Row("dynamo_config.dynamo_backend dynamo_backend", word_of(*BACKENDS), "NO", "torch.compile", "--kernels compiled",
        "same", "seconds"),
    Row("dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph "
        "dynamo_config.dynamo_use_regional_compilation", anything, None, "how torch.compile compiles", **_NO),
)  # fmt: skip
SECTIONS = (
    "fsdp_config", "deepspeed_config", "parallelism_config", "megatron_lm_config", "fp8_config", "dynamo_config",
    "mpirun_config",
)  # fmt: skip
TOP = frozenset({row for one in TABLE for row in one.key.split() if "." not in row} | set(SECTIONS))
