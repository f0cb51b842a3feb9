"""Write weights as transformers does: model.safetensors, or shards and their index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from zerosim.config.released import INDEX, SINGLE
from zerosim.config.safetensors import Planned, write_tensors
from zerosim.errors import InputError, printable
from zerosim.models.save import LARGEST_SHARD, write_json
from zerosim.state.formats.shards import DTYPES
from zerosim.state.formats.whole import WholeState

_DTYPE_OF: Mapping[str, str] = MappingProxyType({numpy: said for said, numpy in DTYPES.items()})


def write_safetensors(folder: Path, state: WholeState, *, masters: bool = False, largest: int = LARGEST_SHARD) -> None:
    """Write the weights as transformers does: model.safetensors, or shards of at most `largest` bytes and their index.

    The model's own copies (bf16) are written where the checkpoint has some, fp32 weights with `masters`. Tied names are
    left out: their weight is there under the other name.

    Raises: InputError for a dtype that .safetensors lacks.
    """
    weights = state.weights if masters else {**state.weights, **state.stored}
    shards, size = [list[Planned]()], 0
    for name, one in weights.items():
        if one.dtype not in _DTYPE_OF:
            raise InputError(
                f"{printable(name[:200])!r} is {one.dtype}: a .safetensors file has {', '.join(_DTYPE_OF)}"
            )
        planned = Planned(name, _DTYPE_OF[one.dtype], one.shape, one.read)
        if shards[-1] and size + planned.nbytes > largest:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.nbytes
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip([SINGLE] if len(shards) == 1 else files, shards, strict=True):
        with (folder / file).open("wb") as out:
            write_tensors(out, shard)
    if len(shards) > 1:
        totals = {
            "total_parameters": sum(math.prod(one.shape) for one in weights.values()),
            "total_size": sum(one.nbytes for shard in shards for one in shard),
        }
        of_tensor = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        write_json(folder / INDEX, {"metadata": totals, "weight_map": of_tensor})
