"""accelerate's YAML of a run: FSDP for stages 2 and 3, DeepSpeed's plugin for its recipes and stage 1, DDP for stage 0.

Batch, optimizer and model are the script's, so the file has no keys for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config.run import RunConfig
from zerosim.dialects.fp8 import recipe_of
from zerosim.errors import InputError

_DEEPSPEED = ("deepspeed", "hf-deepspeed")
_HALVES = ("bf16", "fp16")


def written(config: RunConfig) -> str:
    """Return the smallest file that says what accelerate can say of this run. Raises: InputError for a mesh that
    accelerate has not."""
    if config.mesh.pp > 1:
        raise InputError(
            f"pp {config.mesh.pp}: accelerate has no pipeline; write megatron or torchtitan, or choose pp 1"
        )
    if config.mesh.ep > 1:
        raise InputError(f"ep {config.mesh.ep}: accelerate's file has no expert parallelism; choose ep 1")
    kind = _kind(config)
    sections: dict[str, Mapping[str, Any]] = {}
    if kind == "FSDP":
        sections["fsdp_config"] = _fsdp(config)
    elif kind == "DEEPSPEED":
        sections["deepspeed_config"] = _deepspeed(config)
    if sizes := _sizes(config, kind):
        sections["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    if products := _eight_bits(config):
        sections["fp8_config"] = products
        if products["backend"] == "AO" and kind == "FSDP":  # accelerate refuses torchao beside it
            sections["fsdp_config"] = {**sections["fsdp_config"], "fsdp_cpu_ram_efficient_loading": False}
    if config.clock.kernels == "compiled":
        sections["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    node, ranks = config.mesh.ranks_per_node, config.mesh.ranks
    machines = ranks // node if node and node < ranks and ranks % node == 0 else 1
    precision = "fp8" if products else _precision(config)
    top = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "mixed_precision": precision,
           "num_machines": machines, "num_processes": ranks}  # fmt: skip
    lines = [f"{key}: {_shown(value)}" for key, value in top.items()]
    for name, section in sections.items():
        lines += [f"{name}:", *(f"  {key}: {_shown(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"'{value}'" if value in ("no", "NO") else str(value)


def _kind(config: RunConfig) -> str:
    stage, recipe = config.parallel.zero_stage, config.parallel.recipe
    if recipe in _DEEPSPEED or stage == 1:
        return "DEEPSPEED"
    if stage >= 2:
        return "FSDP"
    return "MULTI_GPU" if config.mesh.ranks > 1 else "NO"


def _precision(config: RunConfig) -> str:
    casts, stored = config.tuning.autocast, config.precision.param_dtype
    return casts if casts in _HALVES else stored if stored in _HALVES else "no"


def _eight_bits(config: RunConfig) -> dict[str, Any]:
    """Return fp8_config of the products that accelerate has: torchao's tensorwise ones, Transformer Engine's delayed
    scaling and its MXFP8."""
    fp8 = config.fp8
    if _precision(config) != "bf16":  # accelerate's fp8 computes the rest in bf16
        return {}
    if recipe_of(fp8) == "tensorwise":
        return {"backend": "AO", "enable_fsdp_float8_all_gather": fp8.gather}
    if fp8.library != "te" or fp8.kind not in ("delayed", "mxfp8"):
        return {}
    keys: dict[str, Any] = {"backend": "TE", "fp8_format": fp8.form.upper()}
    if fp8.kind == "mxfp8":
        return {**keys, "use_mxfp8_block_scaling": True}
    keys |= {"margin": fp8.margin, "amax_history_len": fp8.amax_history, "amax_compute_algo": fp8.amax_algo}
    return {**keys, "override_linear_precision": [False, False, True]} if fp8.exact_wgrad else keys


def _version(config: RunConfig) -> int:
    """FSDP1 for its recipe, unless its file has no word for the mesh."""
    mesh = config.mesh
    is_plain = mesh.tp == mesh.cp == 1 and mesh.dp_replicate in (1, mesh.ranks // (mesh.ranks_per_node or mesh.ranks))
    return 1 if config.parallel.recipe == "fsdp1" and is_plain else 2


def _fsdp(config: RunConfig) -> dict[str, Any]:
    version, stage, replicas = _version(config), config.parallel.zero_stage, config.mesh.dp_replicate
    section: dict[str, Any] = {"fsdp_version": version}
    if version == 1:
        whole = stage == 3
        plain, hybrid = ("FULL_SHARD", "HYBRID_SHARD") if whole else ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        section["fsdp_sharding_strategy"] = hybrid if replicas > 1 else plain
        if whole:
            section["fsdp_backward_prefetch"] = "BACKWARD_PRE" if config.gathering.prefetch else "NO_PREFETCH"
            section["fsdp_forward_prefetch"] = bool(config.gathering.prefetch and config.gathering.forward_prefetch)
    else:
        section["fsdp_reshard_after_forward"] = stage == 3 and config.gathering.reshard_after_forward
    section["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    section["fsdp_activation_checkpointing"] = config.memory.again.every == 1
    if version == 2 and config.memory.cpu_checkpointing and config.memory.again.every == 1:
        section["fsdp_activation_checkpointing_offload"] = True
    section["fsdp_offload_params"] = config.offload.is_all_host or (stage == 2 and config.offload.cpu_steps)
    if config.offload.host_load in ("first", "every"):
        section["fsdp_cpu_ram_efficient_loading"] = config.offload.host_load == "first"
    return section


def _deepspeed(config: RunConfig) -> dict[str, Any]:
    stage = config.parallel.zero_stage
    section: dict[str, Any] = {"zero_stage": stage, "gradient_accumulation_steps": config.data.accumulate}
    if config.optim.clip_norm:  # DeepSpeedPlugin leaves 0 out, and DeepSpeed's own default is 1
        section["gradient_clipping"] = config.optim.clip_norm
    places = {"host": "cpu", "nvme": "nvme"}
    for name, state in (("optimizer", "optimizer"), ("param", "params")):
        if place := places.get(config.offload.memory_of(state)):
            section[f"offload_{name}_device"] = place
    if stage == 3:
        section["zero3_init_flag"] = config.offload.host_load != "device"
    return section


def _sizes(config: RunConfig, kind: str) -> dict[str, Any]:
    """Return the sizes of a mesh that is more than shards. Raises: InputError for one that accelerate refuses."""
    mesh = config.mesh
    by_strategy = kind == "FSDP" and _version(config) == 1
    if by_strategy or (mesh.tp * mesh.cp == 1 and (kind != "FSDP" or mesh.dp_replicate == 1)):
        return {}
    replicas, by_heads = mesh.dp_replicate, kind == "DEEPSPEED" and mesh.cp > 1
    shards = mesh.ranks // (replicas * mesh.tp * mesh.cp)
    if kind == "FSDP" and shards == mesh.cp == 1:
        raise InputError(f"dp_shard 1: accelerate's FSDP has no ranks to shard over; choose stage 0, or more than "
                         f"{mesh.ranks} ranks")  # fmt: skip
    if replicas > 1 and shards == 1:
        raise InputError("dp_shard 1: accelerate refuses replicas of one rank beside tp and cp; choose dp_replicate 1")
    if mesh.cp > 1 and kind not in ("FSDP", "DEEPSPEED"):
        raise InputError(f"cp {mesh.cp}: accelerate's context parallelism needs FSDP2; choose stage 3 and recipe fsdp2")
    if kind in ("MULTI_GPU", "NO"):
        return {"dp_replicate_size": shards, "tp_size": mesh.tp}
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": mesh.tp}
    sizes["sp_size" if by_heads else "cp_size"] = mesh.cp
    if mesh.cp > 1 and not by_heads and config.context.how == "ring":
        return {**sizes, "cp_comm_strategy": "alltoall"}
    return sizes
