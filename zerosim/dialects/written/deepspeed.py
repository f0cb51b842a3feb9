"""Write DeepSpeed's JSON, for DeepSpeed 0.19.8. "auto" is never written: each reader would fill it by its own rules."""

from __future__ import annotations

import json
from typing import Any

from zerosim.config import RunConfig
from zerosim.errors import InputError

_TYPES = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "adagrad": "Adagrad", "muon": "Muon"}
_TORCH = {"sgd": "SGD", "rmsprop": "RMSprop", "radam": "RAdam"}
_DEVICES = {"host": "cpu", "nvme": "nvme"}


def written(config: RunConfig) -> str:
    """Return ds_config.json. Raises: InputError for a mesh that DeepSpeed's JSON cannot say."""
    if config.mesh.dp_replicate > 1:
        raise InputError("deepspeed: has no replicas since 0.19.7 (MiCS); choose --write fsdp2, or --dp-replicate 1")
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.data.micro_batch,
        "gradient_accumulation_steps": config.data.accumulate,
        "gradient_clipping": config.optim.clip_norm,
        **_precision(config),
        **_optimizer(config),
        "zero_optimization": _zero(config),
    }
    if config.value("grad_dtype") == "fp32" and config.parallel.zero_stage == 1 and config.value("precision") == "bf16":
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.value("compress") in ("bf16", "fp16"):
        values["communication_data_type"] = config.value("compress")
    if config.mesh.tp > 1:
        values["tensor_parallel"] = {"autotp_size": config.mesh.tp}
    if config.mesh.cp > 1 and config.value("context") == "ulysses":
        values["sequence_parallel_size"] = config.mesh.cp
    kept = {name: True for name in ("partition_activations", "cpu_checkpointing") if config.value(name)}
    if kept:
        values["activation_checkpointing"] = kept
    return json.dumps(values, indent=2) + "\n"


def _precision(config: RunConfig) -> dict[str, Any]:
    precision = config.value("precision")
    if config.value("autocast") is not None:
        name = {"bf16": "bfloat16", "fp16": "float16"}[config.value("autocast")]
        return {"torch_autocast": {"enabled": True, "dtype": name}}
    if precision == "bf16":
        return {"bf16": {"enabled": True}}
    if precision == "bf16-pure":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    if precision == "fp32":
        return {"bf16": {"enabled": False}}
    if precision != "fp16":
        raise InputError(f"deepspeed: has no precision {precision}; choose --precision bf16, fp16 or fp32")
    scale = config.value("loss_scale")
    dynamic = {
        name: int(config.value(name))
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    }
    return {"fp16": {"enabled": True, **(dynamic if scale in (None, "dynamic") else {"loss_scale": scale})}}


def _optimizer(config: RunConfig) -> dict[str, Any]:
    """Return the optimizer's section; nothing where it is the Trainer's, or in code."""
    name = config.value("optimizer")
    if config.value("recipe") == "hf-deepspeed" or (name not in _TYPES and name not in _TORCH):
        return {}
    params: dict[str, Any] = {"lr": config.value("lr"), "weight_decay": config.value("weight_decay")}
    if name in ("adam", "adamw", "lion", "radam"):
        params["betas"] = list(config.value("betas"))
    if name not in ("lion", "sgd"):
        params["eps"] = config.value("eps")
    if name == "adam":
        params["adam_w_mode"] = False
    if config.value("foreach") and name in ("adam", "adamw"):
        params["torch_adam"] = True
    return {"optimizer": {"type": _TYPES.get(name) or _TORCH[name], "params": params}}


def _zero(config: RunConfig) -> dict[str, Any]:
    stage = config.parallel.zero_stage
    found: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return found
    overlaps = config.value("overlap_comm") if stage == 3 else config.value("reduce_buffers") == 2
    found |= {"overlap_comm": bool(overlaps), "contiguous_gradients": True}
    if config.value("reduce_bucket"):
        found["reduce_bucket_size"] = config.value("reduce_bucket")
    if stage < 3 and config.value("grad_reduction") == "reduce_scatter":
        found["use_multi_rank_bucket_allreduce"] = False
    if stage == 3:
        found |= {
            "stage3_prefetch_bucket_size": config.value("prefetch_elements"),
            "stage3_param_persistence_threshold": config.value("persistent_numel"),
            "sub_group_size": config.value("sub_group") or 10**12,
        }
        if config.value("max_live"):
            found["stage3_max_live_parameters"] = config.value("max_live")
        if config.value("secondary_shard") > 1:
            found["zero_hpz_partition_size"] = config.value("secondary_shard")
        for name in ("quantized_weights", "quantized_gradients"):
            if config.value(name):
                found[f"zero_{name}"] = True
    places = dict(one.split("=") for one in config.value("offload").split(",") if one)
    for state, section in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        if state in places:
            device = _DEVICES[places[state]]
            found[section] = {"device": device, "pin_memory": config.value("pin_memory")}
            if device == "nvme":
                found[section]["nvme_path"] = config.value("nvme") or "/local_nvme"
    return found
