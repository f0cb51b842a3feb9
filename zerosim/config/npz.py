"""Arrays from outside, in .npz files: headers are checked before any array is read.

An .npz file is a zip of .npy members, each a header (dtype, order, shape) and the numbers. A few bytes of a zip can
expand to any number of bytes, and unpickling an array of Python objects can run any program. So headers come first, a
reader takes only the arrays that it uses, and only plain numbers are read.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np

from zerosim.config.inputs import open_file
from zerosim.errors import InputError

_LARGEST_DIRECTORY = 4 * 10**6  # of a zip, in bytes: 40,000 names
_LARGEST_HEADER = 1000  # NumPy's have 118 bytes
_CHUNK = 2**20
_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4}  # of a header's length, by the format's version
_HEADER = re.compile(
    r"""\{((?:'descr':[ ]*'(?P<descr>[^'\\]*)'
          | 'fortran_order':[ ]*(?P<fortran_order>True|False)
          | 'shape':[ ]*\((?P<shape>(?:[0-9]+,[ ]?)*[0-9]*)\)),?[ ]*){3}\}[ ]*\n?""",
    re.VERBOSE,
)
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BROKEN = (  # what zipfile and zlib raise for damaged bytes
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, OverflowError, NotImplementedError,
    RuntimeError, KeyError,
)  # fmt: skip


class Header(NamedTuple):
    """A member's declared header. `dtype` is None for anything but numbers, which `descr` names."""

    shape: tuple[int, ...]
    descr: str
    dtype: np.dtype[Any] | None
    fortran_order: bool

    @property
    def words(self) -> str:
        """'float32', as messages name it."""
        if self.descr == "|O":
            return "Python objects (never loaded)"
        return self.descr if self.dtype is None else str(self.dtype)


class ArrayFile:
    """An open .npz file. `names` are its arrays, without '.npy'; `others` are members of other names."""

    def __init__(self, path: str, zipped: zipfile.ZipFile) -> None:
        self.path = path
        self._zipped = zipped
        self._members: dict[str, zipfile.ZipInfo] = {}
        self.others: list[str] = []
        for info in zipped.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                self.others.append(name)
            elif name in self._members:
                raise InputError(f"{path} has two members {info.filename!r}: expected one array for each name")
            else:
                self._members[name] = info
        self.names = tuple(self._members)

    def header(self, name: str) -> Header:
        """Read a member's header. Raises: InputError if the member cannot be read, is no array, or lacks the declared
        bytes."""
        with self._open(name) as member:
            return self._header(name, member)

    def read(self, name: str, rows: int | None = None) -> Any:
        """Read an array of numbers, or its first `rows`.

        Raises: InputError as `header`, and if its bytes are damaged, fewer than declared, or do not fit into memory.
        """
        with self._open(name) as member:
            shape, _, dtype, fortran_order = self._header(name, member)
            assert dtype is not None
            if fortran_order:
                return _numbers(member, shape[::-1], dtype).T[:rows]
            return _numbers(member, shape if rows is None else (min(rows, shape[0]), *shape[1:]), dtype)

    def where(self, name: str) -> str:
        """Return a member's place, as messages name it."""
        return f"{self.path}: member {name + '.npy'!r}"

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        info, where = self._members[name], self.where(name)
        if info.flag_bits & 1:
            raise InputError(f"{where} is encrypted: save it without a password")
        if info.compress_type not in _PACKINGS:
            raise InputError(
                f"{where} is compressed by method {info.compress_type}: expected a file from np.savez or "
                "np.savez_compressed"
            )
        try:
            with self._zipped.open(info) as member:
                yield member
        except InputError:
            raise
        except MemoryError:
            raise InputError(f"{where} does not fit into memory") from None
        except _BROKEN as error:
            raise InputError(f"{where} is damaged: {error}") from None

    def _header(self, name: str, member: IO[bytes]) -> Header:
        where = self.where(name)
        start = member.read(8)
        length_bytes = _LENGTH_BYTES.get(start[6:])
        if start[:6] != _MAGIC or length_bytes is None:
            raise InputError(f"{where} is not an array of numbers: expected a file from np.savez")
        length = int.from_bytes(member.read(length_bytes), "little")
        text = member.read(min(length, _LARGEST_HEADER)).decode("latin-1")
        match = _HEADER.fullmatch(text) if length <= _LARGEST_HEADER else None
        if match is None or None in match.groups():
            raise InputError(f"{where} is not an array of numbers; its header is {text.strip()[:200]!r}")
        descr, shape = match["descr"], tuple(int(size) for size in re.findall("[0-9]+", match["shape"]))
        header = Header(shape, descr, _dtype(descr), match["fortran_order"] == "True")
        if header.dtype is not None:
            promised, there = math.prod(shape) * header.dtype.itemsize, self._members[name].file_size - member.tell()
            if promised != there:
                raise InputError(
                    f"{where} is damaged: {descr} of shape {shape} needs {promised} bytes, but the file has {there}"
                )
        return header


@contextmanager
def open_npz(path: str) -> Iterator[ArrayFile]:
    """Open a file. Raises: InputError for a file that cannot be read, or is no .npz file."""
    with _Sparing(open_file(path).detach()) as file:
        try:
            if file.read(len(_MAGIC)) == _MAGIC:
                raise InputError(f"{path} is a single array, a .npy file: expected an .npz file, as np.savez writes")
            zipped = zipfile.ZipFile(file)
        except InputError:
            raise
        except _BROKEN as error:
            raise InputError(f"{path} is not a readable .npz file: {error}") from None
        with zipped:
            yield ArrayFile(path, zipped)


class _Sparing(io.BufferedReader):
    """A zip that never reads more at once than a directory may have: zipfile reads it whole, however long."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size:,} bytes, expected at most {_LARGEST_DIRECTORY:,}")
        return super().read(size)


def _dtype(descr: str) -> np.dtype[Any] | None:
    try:
        return np.dtype(descr) if re.fullmatch("[<>|][biufc][0-9]{1,2}", descr) else None
    except TypeError:  # <f7
        return None


def _numbers(member: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the member's next numbers. Raises: the exceptions in `_BROKEN`, and MemoryError."""
    values = np.empty(math.prod(shape), dtype)
    room, filled = values.view(np.uint8), 0
    while filled < len(room):
        part = member.read(min(_CHUNK, len(room) - filled))
        if not part:
            raise EOFError(f"it ends after {filled} of {len(room)} bytes")
        room[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
    return values.reshape(shape)
