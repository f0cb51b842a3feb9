"""Read the files of torch.save: a zip archive with a pickle and the bytes of each storage, uncompressed.

    NAME/data.pkl      the values; a tensor is a storage's key, an offset, sizes and strides
    NAME/data/0        the bytes of storage 0
    NAME/byteorder     little or big; NAME/version 3

The pickle is read by `pickles.py`, which runs nothing. A tensor's bytes are read when it is asked for, never the whole
file. PyTorch before 1.6 wrote another format, which is refused.

Source: PyTorch 2.13, torch/serialization.py and torch/_utils.py; PKWARE's APPNOTE 6.3 for the archive.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerosim.config.inputs import open_file
from zerosim.errors import InputError, printable
from zerosim.state.formats.names import DTYPES, STORAGES
from zerosim.state.formats.pickles import read_pickle
from zerosim.state.formats.plain import BadPickle, Named, Persistent
from zerosim.state.formats.whole import Tensor, host_dtype
from zerosim.state.formats.zips import Record, Zip, read_zip

_MOST_DIMS = 32


class Stored(NamedTuple):
    """A tensor of an archive: element i of its flat storage is at `offset` + sum of index * stride.

    Source: PyTorch's torch/_utils.py, _rebuild_tensor_v2.
    """

    archive: Zip
    record: Record
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_native: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """The elements of the storage from the first to the last of the tensor."""
        return 1 + sum((n - 1) * by for n, by in zip(self.shape, self.strides, strict=True)) if self.numel else 0

    def named(self, name: str) -> Tensor:
        """Return this tensor under a name."""
        return Tensor(name, self.dtype, self.shape, self.read)

    def narrow(self, first: int, count: int) -> Stored:
        """Return elements [first, first + count) of a flat tensor. Raises: InputError if it has fewer, or more dims."""
        if len(self.shape) != 1 or first < 0 or count < 0 or first + count > self.shape[0]:
            raise InputError(
                f"{self.archive.path}: a piece of {count:,} elements from {first:,} on is no part of {self.shape}"
            )
        return self._replace(shape=(count,), offset=self.offset + first * self.strides[0])

    def read(self) -> Any:
        """Read the values into a new array. Raises: InputError for a file that is cut short or has changed."""
        dtype = host_dtype(self.dtype)
        with open_file(self.archive.path) as file:
            begin = self.archive.begin(file, self.record)
            values = np.empty(self.span, dtype)
            file.seek(begin + self.offset * dtype.itemsize)
            got = file.readinto(values.view(np.uint8).data) if values.nbytes else 0
        if got != values.nbytes:
            raise InputError(
                f"{self.archive.path}: a tensor has {got:,} of its {values.nbytes:,} bytes: the file is cut short"
            )
        if not self.is_native and dtype.itemsize > 1:
            half = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
            values.view(f"u{half}").byteswap(inplace=True)
        bits = values if dtype.kind == "c" else values.view(f"u{dtype.itemsize}")  # strides of all but ml_dtypes' own
        strided = np.lib.stride_tricks.as_strided(bits, self.shape, [by * dtype.itemsize for by in self.strides])
        return np.ascontiguousarray(strided).reshape(self.shape).view(dtype)


def read_archive(path: str, start: int = 0, stop: int | None = None) -> Any:
    """Return the values of a file of torch.save, or of bytes [start, stop) of one. Tensors in it are `Stored`.

    Raises: InputError, in one line, for a file that torch.save did not write, that is compressed, damaged or cut
    short, and for a pickle with a name that no checkpoint needs.
    """
    archive = read_zip(path, start, stop)
    order = archive.read("byteorder")
    if order not in (b"", b"little", b"big"):
        raise InputError(f"{path}: its byteorder is {printable(repr(order[:20]))}: expected little or big")
    return read_pickle(
        archive.read("data.pkl"), path, partial(_rebuild, archive, order in (b"", sys.byteorder.encode()))
    )


def _rebuild(archive: Zip, is_native: bool, name: str, args: tuple[Any, ...]) -> Any:
    """Return the tensor that a call in a pickle makes; NotImplemented for any other call."""
    if name == "torch._tensor._rebuild_from_type_v2":
        function, kind, inner = args[:3]
        if not isinstance(function, Named) or kind not in (
            Named("torch.Tensor"),
            Named("torch.nn.parameter.Parameter"),
        ):
            return NotImplemented
        return _rebuild(archive, is_native, function.name, inner)
    if name not in (
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    ):
        return NotImplemented
    storage, offset, shape, strides = args[:4]
    is_third, more = name.endswith("_v3"), args[6:]
    if any(more[1 if is_third else 0 :]) or not isinstance(storage, Persistent):
        return NotImplemented  # conjugated, or negative
    _, kind, key, _, _ = storage.id
    dtype = (DTYPES if is_third else STORAGES)[(more[0] if is_third else kind).name]
    record = archive.records.get(f"data/{key}")
    if record is None:
        raise BadPickle(f"its archive has no data/{printable(str(key)[:40])}, which a tensor needs")
    counts = [offset, *shape, *strides]
    if len(shape) > _MOST_DIMS or len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in counts):
        raise BadPickle("it has a tensor whose sizes are no whole numbers")
    stored = Stored(archive, record, dtype, tuple(shape), tuple(strides), offset, is_native)
    needed = (offset + stored.span) * host_dtype(dtype).itemsize if stored.numel else 0
    if needed > record.nbytes:
        raise BadPickle(
            f"a tensor of shape {tuple(shape)} needs {needed:,} bytes, and its storage has {record.nbytes:,}"
        )
    if stored.numel > stored.span:
        raise BadPickle(f"a tensor of shape {tuple(shape)} repeats its elements: save its .contiguous()")
    return stored
