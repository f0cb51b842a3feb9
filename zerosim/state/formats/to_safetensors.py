"""Write weights as transformers does: model.safetensors, or shards and their index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from zerosim.config.safetensors import Planned
from zerosim.errors import InputError, printable
from zerosim.models.save import LARGEST_SHARD, write_shards
from zerosim.state.formats.shards import DTYPES
from zerosim.state.formats.whole import WholeState

_DTYPE_OF: Mapping[str, str] = MappingProxyType({numpy: said for said, numpy in DTYPES.items()})


def write_safetensors(folder: Path, state: WholeState, *, masters: bool = False, largest: int = LARGEST_SHARD) -> None:
    """Write the weights as transformers does: model.safetensors, or shards of at most `largest` bytes and their index.

    The model's own copies (bf16) are written where the checkpoint has some, fp32 weights with `masters`. Tied names are
    left out: their weight is there under the other name.

    Raises: InputError for a dtype that .safetensors lacks.
    """
    tensors = list[Planned]()
    for name, one in (state.weights if masters else {**state.weights, **state.stored}).items():
        if one.dtype not in _DTYPE_OF:
            raise InputError(
                f"{printable(name[:200])!r} is {one.dtype}: a .safetensors file has {', '.join(_DTYPE_OF)}"
            )
        tensors.append(Planned(name, _DTYPE_OF[one.dtype], one.shape, one.read))
    write_shards(folder, tensors, largest)
