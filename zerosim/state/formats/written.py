"""Write the files of torch.save: a pickle of protocol 2, written opcode by opcode, and an archive of stored records.

`Name`, `Call` and `Made` stand for the classes and functions of PyTorch, which need not be installed.

Source: CPython's Lib/pickletools.py for the opcodes; PyTorch 2.13, torch/serialization.py for the records.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zerosim.errors import InputError
from zerosim.state.formats.names import DTYPES, STORAGES

_ALIGNED = 64  # bytes at which torch.save begins a record
_MOST = 2**31
_DTYPE_OF: Mapping[str, str] = MappingProxyType({numpy: torch for torch, numpy in DTYPES.items()})
_STORAGE_OF: Mapping[str, str] = MappingProxyType(
    {numpy: torch for torch, numpy in STORAGES.items() if torch != "torch.storage.UntypedStorage"}
)


class Name(NamedTuple):
    """A class or a function: 'torch.Size'."""

    name: str


class Call(NamedTuple):
    """What a function returns for arguments."""

    name: str
    args: tuple[Any, ...]


class Made(NamedTuple):
    """An instance of a class, made without arguments, whose attributes are set."""

    name: str
    state: Any


class Pairs(NamedTuple):
    """A mapping whose keys are objects."""

    pairs: list[tuple[Any, Any]]

    def items(self) -> list[tuple[Any, Any]]:
        return self.pairs


def size_of(shape: tuple[int, ...]) -> Call:
    """Return a torch.Size."""
    return Call("torch.Size", (tuple(shape),))


def dtype_of(name: str) -> Name:
    """Return PyTorch's dtype of NumPy's name. Raises: InputError for a dtype that PyTorch lacks."""
    if name not in _DTYPE_OF:
        raise InputError(f"PyTorch has no dtype {name}: expected one of {', '.join(_DTYPE_OF)}")
    return Name(_DTYPE_OF[name])


def pickled(value: Any) -> tuple[bytes, list[Any]]:
    """Return the pickle of a value and the arrays in it, which are the storages 0, 1, ... beside it.

    A value is a mapping, list, tuple, text, number, None, an array, or a `Name`, `Call` or `Made` of them.
    """
    writer = _Writer()
    writer.out.write(b"\x80\x02")
    writer.write(value)
    writer.out.write(b".")
    return writer.out.getvalue(), writer.arrays


class _Writer:
    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.arrays: list[Any] = []

    def write(self, value: Any) -> None:
        out = self.out
        if value is None or isinstance(value, bool):
            out.write({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif isinstance(value, int):
            self.whole(value)
        elif isinstance(value, float):
            out.write(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            out.write(b"X" + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, np.ndarray):
            self.array(value)
        elif isinstance(value, Name):
            module, _, name = value.name.rpartition(".")
            out.write(f"c{module}\n{name}\n".encode())
        elif isinstance(value, Call):
            self.write(Name(value.name))
            self.write(value.args)
            out.write(b"R")
        elif isinstance(value, Made):
            self.write(Name(value.name))
            out.write(b")\x81")
            if value.state is not None:
                self.write(value.state)
                out.write(b"b")
        else:
            self.several(value)

    def several(self, value: Any) -> None:
        """Write a tuple, a list or a mapping."""
        is_mapping = isinstance(value, Mapping | Pairs)
        if isinstance(value, tuple) and not is_mapping:
            self.out.write(b"(")
        elif isinstance(value, list) or is_mapping:
            self.out.write(b"}(" if is_mapping else b"](")
        else:
            raise TypeError(f"no checkpoint holds a {type(value).__name__}")
        for one in (part for pair in value.items() for part in pair) if is_mapping else value:
            self.write(one)
        self.out.write(b"u" if is_mapping else b"t" if isinstance(value, tuple) else b"e")

    def whole(self, value: int) -> None:
        if -_MOST <= value < _MOST:
            self.out.write(b"J" + struct.pack("<i", value))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out.write(b"\x8a" + bytes([len(raw)]) + raw)

    def array(self, value: Any) -> None:
        """Write a contiguous tensor; dtypes without a storage of their own have an untyped one."""
        dtype, shape = value.dtype.name, tuple(value.shape)
        strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        typed = _STORAGE_OF.get(dtype)
        kind, count = (Name(typed), value.size) if typed else (Name("torch.storage.UntypedStorage"), value.nbytes)
        key = str(len(self.arrays))
        self.arrays.append(value)
        rebuild = f"torch._utils._rebuild_tensor_v{2 if typed else 3}"
        self.write(Name(rebuild))
        self.out.write(b"(")
        self.write(("storage", kind, key, "cpu", count))
        self.out.write(b"Q")
        for one in (0, shape, strides, False, Call("collections.OrderedDict", ())):
            self.write(one)
        if not typed:
            self.write(dtype_of(dtype))
        self.out.write(b"tR")


def archived(value: Any) -> bytes:
    """Return the bytes of a file as torch.save(value) writes it."""
    raw, arrays = pickled(value)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _add(out, archive, "archive/data.pkl", raw)
        _add(out, archive, "archive/byteorder", sys.byteorder.encode())
        for key, array in enumerate(arrays):
            flat = np.ascontiguousarray(array).reshape(-1)
            _add(out, archive, f"archive/data/{key}", flat.view(np.uint8).tobytes())
        _add(out, archive, "archive/version", b"3\n")
    return out.getvalue()


def _add(out: io.BytesIO, archive: zipfile.ZipFile, name: str, raw: bytes) -> None:
    """Add a record whose bytes begin at a multiple of 64: an extra field fills the gap."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    is_wide = len(raw) >= 2**31  # zipfile then adds 20 bytes of its own
    gap = -(out.tell() + 30 + len(name) + 4 + (20 if is_wide else 0)) % _ALIGNED
    info.extra = struct.pack("<2H", 0x4246, gap) + bytes(gap)
    with archive.open(info, "w", force_zip64=is_wide) as record:
        record.write(raw)
