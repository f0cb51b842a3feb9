"""Tensors from outside, in .safetensors files: the header is checked before any tensor is read.

A file is 8 bytes (the header's length, little-endian), a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors, one after the other without gaps. Nothing in a file is executed. `write_tensors` writes the same format.

Source: the format's description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from zerosim.config.inputs import open_file, parse_json
from zerosim.errors import InputError, printable

LARGEST_HEADER = 10**8
"""The most bytes of a header, as in the library: a million names."""

_METADATA, _MOST_DIMS = "__metadata__", 32
_SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
    }
)
"""Bytes of an element, by dtype."""
_FLOATS: Mapping[str, str] = MappingProxyType({"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"})
"""The dtypes of weights that are read, as NumPy has them; bf16 as the upper half of fp32."""
_READ: Mapping[str, str] = MappingProxyType({**_FLOATS, "U8": "u1", "I32": "<i4", "I64": "<i8"})


class Stored(NamedTuple):
    """A tensor in a file, before it is read: its bytes are [start, stop)."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fail(self, text: str) -> InputError:
        return _fail(self.path, self.name, text)

    def check_float(self) -> None:
        """Check its dtype. Raises: InputError if it is not one of the floats that are read."""
        if self.dtype not in _FLOATS:
            raise self.fail(f"is {self.dtype}: expected {', '.join(_FLOATS)}")

    def read(self, first: int = 0, last: int | None = None) -> Any:
        """Read its values, or those of elements [first, last) in one row; bf16 as the equal fp32.

        Raises: InputError for a file that has changed since its header was read.
        """
        if self.dtype not in _READ:
            raise self.fail(f"is {self.dtype}: expected {', '.join(_READ)}")
        dtype = np.dtype(_READ[self.dtype])
        is_whole, last = first == 0 and last is None, self.numel if last is None else min(last, self.numel)
        values = np.empty(last - first, dtype)
        with open_file(self.path) as file:
            file.seek(self.start + first * dtype.itemsize)
            got = file.readinto(values.view(np.uint8).data)
        if got != values.nbytes:
            raise self.fail(f"has {got} of its {values.nbytes} bytes: the file has changed since the run began")
        if self.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.shape) if is_whole else values


def read_header(path: str) -> dict[str, Stored]:
    """Return the tensors of a file by name, without their values.

    Raises: InputError, in one line with file and tensor, for a file that cannot be read or is cut short, a header that
    is not one, a repeated name, and bytes that overlap, leave a gap or are not as many as a shape needs.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(
                f"{path}: its header should have {length:,} bytes, but the file has {size:,}: it is cut short, or no "
                ".safetensors file"
            )
        if length > LARGEST_HEADER:
            raise InputError(f"{path}: its header has {length:,} bytes, expected at most {LARGEST_HEADER:,}")
        raw = file.read(length)
    name = f"{path}: its header"
    try:
        header = parse_json(raw.decode(), name)
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8: is this a .safetensors file?") from None
    if not isinstance(header, dict):
        raise InputError(f"{name} is a JSON {type(header).__name__}: expected an object of tensors")
    header.pop(_METADATA, None)
    tensors = {name: _stored(path, name, value, 8 + length) for name, value in header.items()}
    end, before = 8 + length, "the header"
    if beyond := next((one for one in tensors.values() if one.stop > size), None):
        raise beyond.fail(f"ends at byte {beyond.stop:,}, but the file has {size:,}: it is cut short")
    for one in sorted(tensors.values(), key=lambda one: (one.start, one.stop)):
        if one.start != end:
            how = "overlaps" if one.start < end else "leaves a gap after"
            raise one.fail(f"begins at byte {one.start:,} and {how} {before}, which ends at {end:,}")
        end, before = one.stop, printable(one.name)
    if end != size:
        raise InputError(f"{path} has {size - end:,} bytes after its last tensor: it is damaged")
    return tensors


def _stored(path: str, name: str, value: object, data: int) -> Stored:
    """Return a header's entry, checked. `data` is where tensors begin."""
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _fail(path, name, "lacks a dtype, a shape of whole numbers or data_offsets [begin, end]")
    itemsize = _SIZES.get(dtype)
    if itemsize is None:
        raise _fail(path, name, f"has dtype {printable(dtype[:40])!r}: expected one of {', '.join(_SIZES)}")
    needed = math.prod(shape) * itemsize
    if offsets[1] - offsets[0] != needed:
        raise _fail(
            path, name, f"is {dtype} of shape {tuple(shape)} and needs {needed:,} bytes, not data_offsets {offsets}"
        )
    return Stored(path, name, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _counts(values: object) -> list[int] | None:
    """Return a short list of whole numbers; None for anything else."""
    if not isinstance(values, list) or len(values) > _MOST_DIMS:
        return None
    return values if all(type(value) is int and 0 <= value < 2**63 for value in values) else None


def _fail(path: str, name: str, text: str) -> InputError:
    return InputError(f"{path}: tensor {printable(name[:200])!r} {text}")


# -- writing ----------------------------------------------------------------------------------------------
WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "uint8": "U8",
        "int32": "I32",
        "int64": "I64",
    }
)
"""The dtype of arrays that are written, by NumPy's name."""


class Planned(NamedTuple):
    """A tensor to write: `values` computes the array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


def write_tensors(file: BinaryIO, tensors: Iterable[Planned]) -> None:
    """Write tensors to a file, one after the other: no more than one is copied at a time."""
    tensors, end = list(tensors), 0
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    for one in tensors:
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": (end, end + one.nbytes)}
        end += one.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that tensors begin at a multiple of 8
    file.write(len(raw).to_bytes(8, "little") + raw)
    for one in tensors:
        values = np.ascontiguousarray(one.values())
        little = values.view(f"u{values.itemsize}").astype(f"<u{values.itemsize}", copy=False)
        file.write(little.reshape(-1).view(np.uint8).data)
        del values, little  # before the next one is computed
