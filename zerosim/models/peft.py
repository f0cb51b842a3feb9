"""Adapters in PEFT's format, written and read: adapter_config.json and adapter_model.safetensors.

A name there is base_model.model.MODULE.lora_A.weight, with the released file's module. PEFT adapts whole weights, so
adapters of some columns of a fused map have no name there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.inputs import read_json
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.config.released import PEFT, PEFT_CONFIG
from zerosim.config.safetensors import WRITTEN, Planned, read_header, write_tensors
from zerosim.errors import InputError
from zerosim.models.model import Shapes, check_names, check_shapes
from zerosim.models.released import from_groups, grouped_names, stored_names, to_groups
from zerosim.models.save import write_json
from zerosim.placement.block import Target

_BASE = "base_model.model."
_OTHER_FORMULAS = (
    "use_rslora",
    "use_dora",
    "alora_invocation_tokens",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)
"""Keys of adapter_config.json that make other adapters, if they are set."""


def adapted(model: ModelConfig, names: Mapping[str, Any]) -> dict[str, Target]:
    """Return the maps that these adapters adapt, by name."""
    targets = model.targets()
    return {at: targets[at] for name in names for at, found, _ in [name.partition(".lora_A.")] if found}


def check_peft(model: ModelConfig, names: Mapping[str, Any], flag: str) -> None:
    """Check the maps with adapters of these names. Raises: InputError if one is a part of a fused map."""
    if stacks := [name for name, one in adapted(model, names).items() if one.is_bare]:
        raise InputError(
            f"{flag}: adapters of experts and routers ({stacks[0]}) are nested in PEFT's files; choose OUT.npz, or "
            "--save-merged DIR"
        )
    if parts := [name for name, one in adapted(model, names).items() if one.columns is not None]:
        raise InputError(
            f"{flag}: PEFT has no adapters for a part of a fused map ({parts[0]}); choose OUT.npz, --save-merged DIR, "
            "or a --lora-target of whole maps"
        )


def save_adapters(folder: Path, config: RunConfig, adapters: Mapping[str, Any]) -> None:
    """Write adapters into an empty folder, as PEFT reads them."""
    model, tuning = config.model, config.tuning
    maps = adapted(model, adapters)
    names, grouped = stored_names(model, adapters), grouped_names(model)
    modules = sorted({re.sub(r".*?\.\d+\.", "", name, count=1) for name in maps})
    others = {name for name, _ in model.decoder.block.targets()} - {*modules}
    is_even = (
        not model.is_second
        and len(maps) == len(modules) * model.layers
        and not any(other.endswith(f".{module}") for other in others for module in modules)
    )  # PEFT takes a name as the end of one: BERT's output.dense is that of attention.output.dense too
    of_map = stored_names(model, list(maps))
    write_json(
        folder / PEFT_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": _task(model),
            "base_model_name_or_path": model.name if model.is_of_file else None,
            "r": tuning.lora_rank,
            "lora_alpha": tuning.lora_alpha or tuning.lora_rank,
            "lora_dropout": tuning.lora_dropout,
            "target_modules": modules if is_even else sorted(of_map.values()),
            "fan_in_fan_out": any(one.map.layout == "in_out" for one in maps.values()),
            "bias": "none",
            "inference_mode": True,
        },
    )

    def values(name: str) -> Any:
        at, is_b, _ = name.partition(".lora_B.")
        regroups = is_b and maps[at].weight in grouped
        return to_groups(adapters[name], model) if regroups else adapters[name]

    tensors = [
        Planned(_BASE + names[name], WRITTEN[str(array.dtype)], array.shape, partial(values, name))
        for name, array in adapters.items()
    ]
    with (folder / PEFT).open("wb") as out:
        write_tensors(out, tensors)


def _task(model: ModelConfig) -> str | None:
    """Return PEFT's name of what a model predicts. It has none for masked tokens."""
    return None if model.is_masked else "SEQ_2_SEQ_LM" if model.is_second else "CAUSAL_LM"


def read_start(config: RunConfig, shapes: Shapes, read_file: Callable[[str, Shapes], dict[str, Any]]) -> dict[str, Any]:
    """Read the adapters to start from, by name: of a folder that PEFT wrote, or of a file; none if none are given."""
    path = config.tuning.adapters
    if path is None or not os.path.isdir(path):
        return {} if path is None else read_file(path, shapes)
    return read_adapters(Path(path), config.model, config.tuning, shapes)


def read_adapters(folder: Path, model: ModelConfig, tuning: TuningConfig, shapes: Shapes) -> dict[str, Any]:
    """Read adapters of these names and shapes from a folder that PEFT wrote.

    Raises: InputError for bad files, another scale or formula, and names and shapes that are not the run's.
    """
    path = str(folder / PEFT_CONFIG)
    values = read_json(path)
    values = values if isinstance(values, dict) else {}
    if (method := values.get("peft_type", "LORA")) != "LORA":
        raise InputError(f"{path}: peft_type {method!r} is not modelled: expected LORA")
    r, alpha = values.get("r"), values.get("lora_alpha")
    if type(r) is not int or r < 1 or not isinstance(alpha, int | float):
        raise InputError(f"{path}: r {r!r}, lora_alpha {alpha!r}: expected two numbers, as PEFT writes for LoRA")
    if other := next((key for key in _OTHER_FORMULAS if values.get(key)), None):
        raise InputError(f"{path}: {other} {values[other]!r} is not modelled: expected plain LoRA")
    if alpha / r != tuning.scale:
        raise InputError(f"{path} scales by {alpha} / {r}, the run by {tuning.scale:g}: set --lora-alpha {alpha}")
    found, names = read_header(str(folder / PEFT)), stored_names(model, shapes)
    wanted = {_BASE + names[name]: shape for name, shape in shapes.items()}
    whose = f"the adapters of {folder}"
    check_names(found, wanted, whose)
    check_shapes({name: one.shape for name, one in found.items()}, wanted, whose)
    maps, grouped = adapted(model, shapes), grouped_names(model)

    def read(name: str) -> Any:
        tensor = found[_BASE + names[name]]
        tensor.check_float()
        at, is_b, _ = name.partition(".lora_B.")
        return from_groups(tensor.read(), model) if is_b and maps[at].weight in grouped else tensor.read()

    return {name: read(name) for name in shapes}
