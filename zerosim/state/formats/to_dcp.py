"""Write PyTorch's distributed checkpoints, as FSDP2 leaves them: `.metadata` and a file of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from zerosim.state.formats.dcp import METADATA
from zerosim.state.formats.whole import Tensor, WholeState
from zerosim.state.formats.written import Call, Made, Pairs, archived, dtype_of, pickled, size_of

VERSION = "1.0.0"
_DCP = "torch.distributed.checkpoint"
_ADAMW: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
)
"""What torch.optim.AdamW has in a group, of PyTorch 2.13."""


def write_dcp(folder: Path, state: WholeState, ranks: int = 1, settings: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint that torch.distributed.checkpoint.load reads, as FSDP2 on `ranks` ranks leaves it.

    Names are those of get_model_state_dict and get_optimizer_state_dict: `model.NAME`, `optim.state.NAME.exp_avg`,
    `optim.state.NAME.step`. A weight is cut along its first dimension as torch.chunk cuts it. A tied weight is written
    under each of its names.

    `settings`: the optimizer's (lr, betas, ...), over AdamW's defaults; written by name and as group 0, so that either
    form of the optimizer's state loads. Without them load with DefaultLoadPlanner(allow_partial_load=True).
    """
    write_items(folder, _items(state, settings), ranks)


def write_items(folder: Path, items: Iterable[tuple[tuple[Any, ...], Any]], ranks: int = 1) -> None:
    """Write items, each with the keys that lead to it: a `Tensor`, or a value that is pickled whole."""
    described, paths = dict[str, Any](), dict[str, tuple[Any, ...]]()
    places = list[tuple[Made, Made]]()
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(ranks)]
    try:
        for keys, value in items:
            name = ".".join(map(str, keys))
            paths[name] = keys
            if not isinstance(value, Tensor):
                _add_item(files[0], places, _index(name, None, None), archived(value), "__0_0.distcp")
                described[name] = Made(f"{_DCP}.metadata.BytesStorageMetadata", None)
                continue
            array, chunks = value.read(), []
            for number, (rank, offsets, piece) in enumerate(_chunks(array, ranks)):
                at = _index(name, offsets, number)
                _add_item(files[rank], places, at, archived(piece), f"__{rank}_0.distcp")
                sizes = {"offsets": size_of(offsets), "sizes": size_of(piece.shape)}
                chunks.append(Made(f"{_DCP}.metadata.ChunkStorageMetadata", sizes))
            described[name] = Made(
                f"{_DCP}.metadata.TensorStorageMetadata",
                {"properties": _properties(value.dtype), "size": size_of(value.shape), "chunks": chunks},
            )
    finally:
        for file in files:
            file.close()
    top = {
        "state_dict_metadata": described,
        "planner_data": paths,
        "storage_data": Pairs(places),
        "storage_meta": None,
        "version": VERSION,
    }
    (folder / METADATA).write_bytes(pickled(Made(f"{_DCP}.metadata.Metadata", top))[0])


def _items(state: WholeState, settings: Mapping[str, Any] | None) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the items with the keys that lead to them."""
    for name, one in state.weights.items():
        yield ("model", name), one
    for name, of in state.aliases.items():
        if of in state.weights:
            yield ("model", name), state.weights[of]
    for name, own in state.states.items():
        for key, one in own.items():
            yield ("optim", "state", name, key), one
        if state.step is not None:
            yield ("optim", "state", name, "step"), _step(state.step)
    if settings is not None:
        values = {**_ADAMW, **settings}
        for key, value in {**values, "params": list(state.states)}.items():
            yield ("optim", "param_groups", 0, key), value
        for name in state.states:
            for key, value in values.items():
                yield ("optim", f"param_groups.{name}.{key}"), value


def _step(step: int) -> Tensor:
    return Tensor("step", "float32", (), partial(np.array, step, np.float32))


def _chunks(array: Any, ranks: int) -> Iterator[tuple[int, tuple[int, ...], Any]]:
    """Yield the rank, the offsets and the values of each piece: torch.chunk's, without empty ones."""
    if not array.shape:
        yield 0, (), array
        return
    rows = -(-array.shape[0] // ranks)
    rest = (0,) * (array.ndim - 1)
    for rank in range(ranks if rows else 1):
        piece = array[rank * rows : (rank + 1) * rows]
        if piece.size or not rank:
            yield rank, (rank * rows, *rest), piece


def _index(name: str, offsets: tuple[int, ...] | None, number: int | None) -> Made:
    fields = {"fqn": name, "index": number} | ({} if offsets is None else {"offset": size_of(offsets)})
    return Made(f"{_DCP}.metadata.MetadataIndex", fields)


def _add_item(file: BinaryIO, places: list[tuple[Made, Made]], index: Made, raw: bytes, name: str) -> None:
    """Append an item to a file, and say where it is."""
    fields = {"relative_path": name, "offset": file.tell(), "length": len(raw)}
    places.append((index, Made(f"{_DCP}.filesystem._StorageInfo", fields)))
    file.write(raw)


def _properties(dtype: str) -> Made:
    encoding = Call(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", (0,))
    layout = Call("torch.serialization._get_layout", ("torch.strided",))
    return Made(f"{_DCP}.metadata.TensorProperties", (dtype_of(dtype), layout, False, encoding, False))
