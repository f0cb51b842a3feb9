"""Write trained weights as transformers reads them: a folder with config.json and model.safetensors, or its shards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zerosim.config.config_json import config_json
from zerosim.config.parts.model import ModelConfig
from zerosim.config.released import CONFIG, INDEX, SINGLE
from zerosim.config.safetensors import WRITTEN, Planned, write_tensors
from zerosim.models.released import grouped_names, stored_names, to_groups
from zerosim.models.stacks import unstacked

LARGEST_SHARD = 5 * 10**9


def planned(model: ModelConfig, weights: Mapping[str, Any]) -> list[Planned]:
    """Return the tensors to write, under the names and in the layouts of released files."""
    names, grouped = stored_names(model, weights), grouped_names(model)

    def values(name: str) -> Any:
        return to_groups(weights[name], model) if name in grouped else weights[name]

    whole = [
        Planned(names[name], WRITTEN[str(array.dtype)], tuple(array.shape), partial(values, name))
        for name, array in weights.items()
    ]
    return [*unstacked(whole, model)]


def save_folder(folder: Path, model: ModelConfig, weights: Mapping[str, Any], largest: int = LARGEST_SHARD) -> None:
    """Write config.json and the weights into an empty folder, in shards of at most `largest` bytes, a larger tensor in
    one of its own."""
    write_json(folder / CONFIG, config_json(model, str(next(iter(weights.values())).dtype)))
    write_shards(folder, planned(model, weights), largest)


def write_shards(folder: Path, tensors: Sequence[Planned], largest: int = LARGEST_SHARD) -> None:
    """Write model.safetensors or, beyond `largest` bytes, shards and their index."""
    shards = _shards(tensors, largest)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip([SINGLE] if len(shards) == 1 else files, shards, strict=True):
        with (folder / file).open("wb") as out:
            write_tensors(out, shard)
    if len(shards) > 1:
        totals = {
            "total_parameters": sum(math.prod(one.shape) for one in tensors),
            "total_size": sum(one.nbytes for one in tensors),
        }
        of_tensor = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        write_json(folder / INDEX, {"metadata": totals, "weight_map": of_tensor})


def _shards(tensors: Sequence[Planned], largest: int) -> list[list[Planned]]:
    shards, size = [list[Planned]()], 0
    for one in tensors:
        if shards[-1] and size + one.nbytes > largest:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.nbytes
    return shards


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as transformers does: indented, keys in order."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
