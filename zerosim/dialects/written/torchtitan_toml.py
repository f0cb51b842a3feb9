"""A TOML for torchtitan 0.2: a flavor, degrees, batch, optimizer, recompute and compile."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from zerosim.config import RunConfig
from zerosim.dialects.fp8 import recipe_of
from zerosim.dialects.torchtitan.models import divided, flavor_of
from zerosim.dialects.torchtitan.quantize import FLOAT8, MX, ROUNDINGS, filters_of
from zerosim.errors import wrong

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
OFFLOADED = {"optimizer=host,params=host", "params=host,optimizer=host"}
AXES = ("tp", "cp", "ep")
_GATHERS = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
DEFAULTS: Mapping[str, Any] = {
    "data_parallel_replicate_degree": 1,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "fsdp_reshard_after_forward": "default",
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_microbatch_size": 1,
}


def written(config: RunConfig) -> str:
    """Return the TOML. Raises: InputError for a ZeRO stage or a DDP that torchtitan does not have."""
    check(config)
    flavor = flavor_of(config)
    sections = {
        "model": ({} if flavor is None else {"name": flavor[0], "flavor": flavor[1]}) | converters(config),
        "optimizer": optimizer(config),
        "lr_scheduler": schedule(config),
        "training": _training(config),
        "parallelism": {name: one for name, one in parallelism(config).items() if one != DEFAULTS.get(name)},
        "activation_checkpoint": _recompute(config),
        "compile": compiled(config),
        **quantized(config),
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {shown(value)}\n" for key, value in keys.items())
        for name, keys in sections.items()
        if keys
    )


def check(config: RunConfig) -> None:
    """Refuse a ZeRO stage that torchtitan does not have. Raises: InputError."""
    stage, cuts = config.value("stage"), config.value("cp") * config.value("tp") * config.value("pp")
    if stage == 1:
        raise wrong("stage", " 1: torchtitan has no ZeRO stage 1; choose 3 (FSDP), or 0 (DDP)")
    if stage == 0 and cuts > 1 and config.value("ranks") > cuts:
        raise wrong("stage", " 0: torchtitan's DDP has no tp, cp or pp beside it; choose --stage 3")


def optimizer(config: RunConfig) -> dict[str, Any]:
    """Return the keys of Adam or AdamW; the rate alone for another optimizer, which torchtitan does not have."""
    optim = config.optim
    if optim.optimizer not in ("adam", "adamw"):
        return {"lr": optim.lr}
    implementation = "for-loop" if config.value("for_loop") else "foreach" if config.value("foreach") else "fused"
    return {
        "name": {"adam": "Adam", "adamw": "AdamW"}[optim.optimizer],
        "lr": optim.lr,
        "beta1": optim.betas[0],
        "beta2": optim.betas[1],
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "implementation": implementation,
        **({"early_step_in_backward": True} if config.value("optimizer_in_backward") else {}),
    }


def schedule(config: RunConfig) -> dict[str, Any]:
    """Return the keys of the schedule; a constant one falls to 1 x lr."""
    keys: dict[str, Any] = {"warmup_steps": config.value("warmup")}
    if config.value("schedule") == "cosine":
        least, rate = config.value("min_lr"), config.optim.lr
        return {**keys, "decay_type": "cosine", "min_lr_factor": float(f"{least / rate:.15g}") if rate else 0.0}
    return {**keys, "min_lr_factor": 1.0}


def rows(config: RunConfig) -> tuple[int, int]:
    """Return the rows of a rank in one call of the trainer, and of a step."""
    micro = config.value("micro_batch")
    return micro * config.value("accumulate") if config.value("pp") > 1 else micro, config.global_batch


def _training(config: RunConfig) -> dict[str, Any]:
    local, whole = rows(config)
    keys: dict[str, Any] = {"local_batch_size": local}
    if config.value("pp") == 1 and config.value("accumulate") > 1:
        keys["global_batch_size"] = whole
    keys |= {"seq_len": config.value("seq"), "max_norm": config.value("clip_norm")}
    if "steps" in config.given:
        keys["steps"] = config.given["steps"]
    return keys | precision(config)


def precision(config: RunConfig) -> dict[str, Any]:
    """Return the keys of dtypes and offload, without torchtitan's defaults."""
    keys = dict[str, Any]()
    if config.value("offload") in OFFLOADED:
        keys["enable_cpu_offload"] = True
    if config.value("precision") == "bf16-pure":
        keys["dtype"] = "bfloat16"
    elif config.value("precision") == "fp32" and config.value("autocast") is None:
        keys["mixed_precision_param"] = "float32"
    if config.value("stage") and (config.value("compress") == "bf16" or config.value("precision") == "bf16-pure"):
        keys["mixed_precision_reduce"] = "bfloat16"
    return keys


def shards_of(config: RunConfig) -> int:
    """Return the ranks along dp_shard."""
    others = [config.value(name) for name in ("dp_replicate", "cp", "tp", "pp")]
    return int(config.value("ranks") // prod(others))


def parallelism(config: RunConfig) -> dict[str, Any]:
    """Return all degrees, and the rest without torchtitan's defaults."""
    stage, shards, tp, cp, ep = config.value("stage"), shards_of(config), *(config.value(name) for name in AXES)
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": shards if stage == 0 else config.value("dp_replicate"),
        "data_parallel_shard_degree": 1 if stage == 0 else shards,
        "fsdp_reshard_after_forward": _reshard(config) if stage else "default",
        "tensor_parallel_degree": tp,
    }
    if config.value("tp_comm_overlap"):
        keys["enable_async_tensor_parallel"] = True
    keys["context_parallel_degree"] = cp
    if cp > 1 and config.value("context") in (None, "ring"):
        keys["context_parallel_rotate_method"] = "alltoall"
    keys["expert_parallel_degree"] = ep
    if ep > 1 and tp > 1:
        keys["expert_tensor_parallel_degree"] = config.value("etp") or tp
    if ep > 1 and config.value("dispatcher") == "deepep":
        keys["expert_parallel_comm_backend"] = "deepep"
    return keys | (_pipeline(config) if config.value("pp") > 1 else {})


def _reshard(config: RunConfig) -> str:
    if config.value("stage") == 2 or not config.value("reshard_after_forward"):
        return "never" if config.value("pp") == 1 else "default"
    if config.value("pp") > 1 or not (config.value("keep_root_units") or config.value("keep_last_unit")):
        return "always"
    return "default"


def _pipeline(config: RunConfig) -> dict[str, Any]:
    kind, chunks = config.value("pipeline") or "1f1b", config.chunks.last + 1
    keys: dict[str, Any] = {"pipeline_parallel_degree": config.value("pp")}
    if kind in SCHEDULES:
        keys["pipeline_parallel_schedule"] = SCHEDULES[kind]
    keys["pipeline_parallel_microbatch_size"] = config.value("micro_batch")
    layers = config.value("layers")
    counts = config.layers_by_chunk(layers)
    is_usual = kind != "interleaved" or chunks == 2 * config.value("pp")
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        try:
            if divided(chunks, layers, first, last) != counts or not is_usual:
                continue
        except ValueError:
            continue
        if (first, last) != (1, 1):
            keys["pipeline_parallel_first_stage_less_layers"] = first
            keys["pipeline_parallel_last_stage_less_layers"] = last
        return keys
    starts = [sum(counts[:index]) for index in range(chunks)]
    parts = [[f"layers.{start + index}" for index in range(count)] for start, count in zip(starts, counts, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return {**keys, "module_fqns_per_model_part": parts}


def _recompute(config: RunConfig) -> dict[str, Any]:
    form, _, option = config.value("recompute").partition(":")
    if form == "full" and option not in ("", "1"):
        return {"mode": "selective", "selective_ac_option": option}
    if form == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": form if form == "full" else "none"}  # blocks that differ are the script's


def compiled(config: RunConfig) -> dict[str, Any]:
    """Return the keys of compile: the blocks by the kernels, the loss if it has no fp32 copy."""
    parts = ["model"] * (config.value("kernels") == "compiled") + ["loss"] * (config.value("loss") == "lean")
    return {} if not parts else {"enable": True} | ({"components": parts} if len(parts) == 1 else {})


def converters(config: RunConfig) -> dict[str, list[str]]:
    """Return the key that switches 8-bit products on."""
    sections = list(quantized(config))
    return {"converters": sections} if sections else {}


def quantized(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the section of torchao's products; none for another library's, which torchtitan lacks."""
    fp8, filters = config.fp8, filters_of(config)
    if recipe := recipe_of(fp8):
        gathers = dict.fromkeys(_GATHERS, True)  # without recipe_name, beside which torchtitan refuses them
        return {FLOAT8: {**(gathers if fp8.gather else {"recipe_name": recipe}), "filter_fqns": filters}}
    names = {rounding: name for name, rounding in ROUNDINGS.items() if name != "mxfp8_emulated"}
    is_cut = config.value("tp") > 1 and config.value("kernels") == "compiled"  # torchtitan refuses it
    if fp8.kind != "mxfp8" or fp8.library != "torchao" or fp8.exact_wgrad or is_cut:
        return {}
    return {MX: {"recipe_name": names.get(fp8.rounding, names["floor"]), "filter_fqns": filters}}


def shown(value: Any) -> str:
    """Return a value as TOML, whose strings are JSON's here."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
