"""The Python page of torchtitan 0.3, whose files are functions that return a Trainer.Config. It is written, never read.

Names are those of release 0.3.0: config/configs.py, trainer.py, components/optimizer, models/*/__init__.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config import RunConfig
from zerosim.dialects.fp8 import recipe_of
from zerosim.dialects.torchtitan.models import flavor_of
from zerosim.dialects.torchtitan.quantize import filters_of
from zerosim.dialects.written import torchtitan_toml as toml
from zerosim.errors import wrong

_FAMILIES = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")
_GONE = (
    "enable_async_tensor_parallel",
    "expert_tensor_parallel_degree",
    "expert_parallel_comm_backend",
    "context_parallel_rotate_method",
)
"""Keys of 0.2's [parallelism] that 0.3 has elsewhere, or no more."""


def written(config: RunConfig) -> str:
    """Return the page. Raises: InputError for a ZeRO stage or a model that torchtitan does not have."""
    toml.check(config)
    family, flavor = flavor_of(config) or ("", "")
    if family not in _FAMILIES:
        name = config.value("model")
        raise wrong(
            "model", f" {name!r}: torchtitan 0.3 has no flavor of these sizes; choose llama3-8b or --write fsdp2"
        )
    is_chunked = config.value("loss") == "chunked"
    optimizers, of_optimizer = _optimizer(config)
    activation, of_activation = _recompute(config)
    imports = {
        f"torchtitan.models.{family}": {"model_registry"},
        "torchtitan.models.common.config_utils": {"decoder_vocab_size"},
        "torchtitan.components.loss": {"CrossEntropyLoss"} | ({"ChunkedLossWrapper"} if is_chunked else set()),
        "torchtitan.components.optimizer": {"LRSchedulersContainer", *of_optimizer},
        "torchtitan.config": {"ParallelismConfig", "TrainingConfig"},
        "torchtitan.trainer": {"Trainer"},
    }
    if of_activation:
        imports["torchtitan.distributed.activation_checkpoint"] = {of_activation}
    whole = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))"
    lines = {
        "model_spec": "spec",
        "loss": f"ChunkedLossWrapper.Config(loss_fn={whole})" if is_chunked else whole,
        "optimizer": optimizers,
        "lr_scheduler": _call("LRSchedulersContainer.Config", toml.schedule(config)),
        "training": _call("TrainingConfig", _training(config)),
        "parallelism": _call("ParallelismConfig", _parallelism(config)),
        "activation_checkpoint": activation,
    }
    compiled = toml.compiled(config)
    if config.value("tp_comm_overlap"):
        compiled = {"enable": True, "enable_async_tensor_parallel": True, **compiled}
    if compiled:
        lines["compile"] = _call("CompileConfig", compiled)
        imports["torchtitan.config"] |= {"CompileConfig"}
    registry = (
        {"moe_comm_backend": "deepep"} if config.value("ep") > 1 and config.value("dispatcher") == "deepep" else {}
    )
    converter = _converter(config)
    if converter:
        imports["torchtitan.components.quantization"] = {"Float8LinearConverter"}
    head = [f"# {config.value('ranks')} ranks, torchtitan 0.3: a function for --config, in a module for --module."]
    if of_optimizer == {"default_adamw"} and "replace(" in optimizers:
        head.append("from dataclasses import replace\n")
    if config.fp8.is_on and not converter:
        head.append(f"# --fp8 {config.fp8.kind} of {config.fp8.library}: torchtitan 0.3 has no converter for it.")
    head += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    spec = f"    spec = model_registry({', '.join([_shown(flavor), *_keywords(registry), *converter])})"
    body = [f"        {name}={value}," for name, value in lines.items()]
    page = [*head, "", "", "def planned() -> Trainer.Config:", spec, "    return Trainer.Config(", *body, "    )", ""]
    return "\n".join(page)


def _converter(config: RunConfig) -> list[str]:
    """Return the keyword that converts linear maps to 8 bits. 0.3 has torchao's rowwise recipes, not tensorwise."""
    recipe = recipe_of(config.fp8)
    if recipe not in ("rowwise", "rowwise_with_gw_hp"):
        return []
    keys = {"recipe_name": recipe, "filter_fqns": filters_of(config, "lm_head")}
    keys |= {"model_compile_enabled": config.value("kernels") == "compiled"}
    return [f"converters=[Float8LinearConverter.Config({', '.join(_keywords(keys))})]"]


def _keywords(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _call(name: str, values: Mapping[str, Any]) -> str:
    """Return a call with keywords, on several lines if it is long."""
    words = _keywords(values)
    line = f"{name}({', '.join(words)})"
    if len(line) <= 90:
        return line
    return "\n".join([f"{name}(", *(f"            {word}," for word in words), "        )"])


def _optimizer(config: RunConfig) -> tuple[str, set[str]]:
    """Return the optimizer's expression, and what it imports."""
    keys = toml.optimizer(config)
    name, implementation = keys.get("name", "AdamW"), keys.get("implementation", "fused")
    usual = {"lr": keys["lr"], "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    given = {"lr": keys["lr"]}
    if "beta1" in keys:
        given |= {"betas": (keys["beta1"], keys["beta2"]), "eps": keys["eps"], "weight_decay": keys["weight_decay"]}
    if name == "AdamW":
        changed = {key: value for key, value in given.items() if key == "lr" or value != usual[key]}
        plain = _call("default_adamw", changed)
        more = f"replace({plain}, implementation={_shown(implementation)})"
        return (plain if implementation == "fused" else more), {"default_adamw"}
    words = ", ".join(_keywords(given))
    group = f'ParamGroupConfig(pattern=".*", optimizer_name={_shown(name)}, optimizer_kwargs=dict({words}))'
    values = f"param_groups=[{group}], implementation={_shown(implementation)}"
    return f"OptimizersContainer.Config({values})", {"OptimizersContainer", "ParamGroupConfig"}


def _training(config: RunConfig) -> dict[str, Any]:
    local, whole = toml.rows(config)
    keys: dict[str, Any] = {"local_batch_size": local}
    if config.value("pp") == 1 and config.value("accumulate") > 1:
        keys["global_batch_size"] = whole
    keys |= {"seq_len": config.value("seq"), "max_norm": config.value("clip_norm"), **toml.precision(config)}
    if "steps" in config.given:
        keys["steps"] = config.given["steps"]
    return keys if config.value("cuda_graphs") else {**keys, "disable_cuda_graphs": True}


def _parallelism(config: RunConfig) -> dict[str, Any]:
    keys = {name: value for name, value in toml.parallelism(config).items() if name not in _GONE}
    if "module_fqns_per_model_part" in keys:
        *parts, (*names, _) = keys["module_fqns_per_model_part"]
        keys["module_fqns_per_model_part"] = [*parts, [*names, "lm_head"]]
    if config.value("tp") > 1 and not config.value("sequence_parallel"):
        keys["enable_sequence_parallel"] = False
    return {name: value for name, value in keys.items() if value != toml.DEFAULTS.get(name)}


def _recompute(config: RunConfig) -> tuple[str, str]:
    """Return the policy's expression and its class; 0.3 has no K-th block."""
    form = config.value("recompute").partition(":")[0]
    kind = {"full": "FullAC", "selective": "SelectiveAC"}.get(form, "")
    return (f"{kind}.Config()", kind) if kind else ("None", "")
