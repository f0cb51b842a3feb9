"""Weights in .safetensors, bits kept: a model's folder, its shards, adapters, and pieces that a distributed save left.

`HuggingFaceStorageWriter(save_distributed=True)` writes each rank's pieces into shard-00001-model-00001-of-00001
.safetensors; where a piece begins is in the header's __metadata__, under DCP_SHARDING_INFO.

Source: PyTorch 2.13, torch/distributed/checkpoint/hf_storage.py; `zerosim.config.safetensors` for the format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.config.inputs import open_file, parse_json
from zerosim.config.released import INDEX, PEFT, SINGLE, stored_tensors
from zerosim.config.safetensors import LARGEST_HEADER, Stored, read_header
from zerosim.errors import InputError
from zerosim.state.formats.boxes import Box, from_boxes
from zerosim.state.formats.whole import Tensor, WholeState, host_dtype

SHARDING = "DCP_SHARDING_INFO"
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
)
"""NumPy's or ml_dtypes' name of a dtype in a header."""


def tensor_of(stored: Stored) -> Tensor:
    """Return a tensor of a .safetensors file. bf16 stays bf16, unlike `Stored.read`."""
    return Tensor(stored.name, DTYPES[stored.dtype], stored.shape, partial(_read, stored))


def _read(stored: Stored) -> Any:
    values = np.empty(stored.numel, host_dtype(DTYPES[stored.dtype]))
    with open_file(stored.path) as file:
        file.seek(stored.start)
        got = file.readinto(values.view(np.uint8).data) if values.nbytes else 0
    if got != values.nbytes:
        raise stored.fail(f"has {got:,} of its {values.nbytes:,} bytes: the file has changed")
    return values.reshape(stored.shape)


def read_safetensors(path: str) -> WholeState:
    """Return the weights of a .safetensors file, an index, a model's folder or one with adapters.

    Raises: InputError as `zerosim.config.released.stored_tensors`.
    """
    others = dict[str, str]()
    if os.path.isdir(path):
        names = os.listdir(path)
        if SINGLE not in names and INDEX not in names and PEFT in names:
            path = os.path.join(path, PEFT)
        elif PEFT in names:
            others[PEFT] = "adapters beside the model: pass this file to read them"
    weights = {name: tensor_of(one) for name, one in stored_tensors(path).items()}
    return WholeState("safetensors", "", weights, {}, {}, None, frozenset(), {}, others)


def read_sharded(folder: str) -> WholeState:
    """Return the weights of a folder with each rank's pieces in .safetensors. Raises: InputError for a hole or an
    overlap, with the tensor's name."""
    pieces, version = dict[str, list[tuple[Stored, Box]]](), ""
    for file in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
        path = os.path.join(folder, file)
        offsets, version = _sharding(path)
        for name, one in read_header(path).items():
            begin = offsets.get(name)
            if begin is None or len(begin) != len(one.shape):
                raise one.fail(f"has no offsets of {len(one.shape)} dimensions in {SHARDING}: expected saved_offsets")
            pieces.setdefault(name, []).append((one, Box(begin, one.shape, tensor_of(one).read)))
    weights = {name: whole_of(name, found, folder) for name, found in pieces.items()}
    return WholeState("dcp safetensors", version, weights, {}, {}, None, frozenset(), {}, {})


def whole_of(name: str, pieces: list[tuple[Stored, Box]], where: str) -> Tensor:
    """Return the tensor of which these are the pieces: it ends where the last of them does."""
    boxes = {box.offsets: box for _, box in pieces}
    sizes = [[a + n for a, n in zip(*box[:2], strict=True)] for box in boxes.values()]
    shape = tuple(max(ends) for ends in zip(*sizes, strict=True))
    return from_boxes(name, DTYPES[pieces[0][0].dtype], shape, list(boxes.values()), where)


def _sharding(path: str) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return where each piece of a file begins, and the writer's version."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise InputError(f"{path}: its header has {length:,} bytes, expected at most {LARGEST_HEADER:,}")
        raw = file.read(length)
    header = parse_json(raw.decode("utf-8", "replace"), f"{path}: its header")
    said = header.get("__metadata__") if isinstance(header, dict) else None
    text = said.get(SHARDING) if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(text, str):
        raise InputError(f"{path}: its header has no {SHARDING}: expected a piece that a distributed save wrote")
    info, found = parse_json(text, f"{path}: {SHARDING}"), dict[str, tuple[int, ...]]()
    for name, entry in info.items() if isinstance(info, dict) else ():
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list) and all(type(n) is int and n >= 0 for n in offsets):
            found[name] = tuple(offsets)
    return found, str(said.get("DCP_VERSION", ""))
