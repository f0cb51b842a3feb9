"""Arrays that are files: a NumPy run's data on a node's NVMe drives.

A file is read and written with system calls, never mapped into memory. So a full or missing drive raises an error at a
copy, and no signal.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.dtypes import DType
from zerosim.errors import OutputError


class FileArray:
    """A flat array in a file, or a view of it. It has what a `Buffer` needs of an array, and no arithmetic."""

    __slots__ = ("dtype", "offset", "path", "shape")

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> None:
        self.path, self.shape, self.dtype, self.offset = path, shape, np.dtype(dtype), offset

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    def __getitem__(self, window: slice) -> FileArray:
        start, stop, _ = window.indices(self.shape[0])
        return FileArray(self.path, (max(0, stop - start),), self.dtype, self.offset + start * self.dtype.itemsize)

    def read(self, into: Any) -> None:
        """Fill a contiguous array. Raises: OutputError."""
        self._all(os.O_RDONLY, os.preadv, into)

    def write(self, values: Any) -> None:
        """Write a contiguous array's bytes. Raises: OutputError."""
        self._all(os.O_WRONLY, os.pwritev, values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read the values from the file."""
        values = np.empty(self.shape, self.dtype)
        self.read(values)
        return values if dtype is None else values.astype(dtype)

    def _all(self, mode: int, move: Any, array: Any) -> None:
        bytes_left, at = memoryview(array.reshape(-1).view(np.uint8)), self.offset
        try:
            file = os.open(self.path, mode | os.O_CLOEXEC)
            try:
                while bytes_left:
                    done = move(file, [bytes_left], at)
                    if not done:
                        raise OSError(errno.EIO, "the file is shorter than it was made")
                    bytes_left, at = bytes_left[done:], at + done
            finally:
                os.close(file)
        except OSError as error:
            raise failed(self.path.parent.parent, error) from error


def failed(folder: Path, error: OSError) -> OutputError:
    """Return the error for a failure on the drive under `--nvme`."""
    why = error.strerror or str(error)
    return OutputError(f"--nvme {folder}: {why}: the run's files could not be written or read, and are removed")


def new_file(path: Path, shape: tuple[int, ...], dtype: DType) -> FileArray:
    """Create a file of zeros with its disk blocks reserved, so that a full disk fails at once. Raises: OutputError."""
    from zerosim.backends.numpy.ops import NUMPY_TYPES  # a plan has no files, and loads no formats

    made = FileArray(path, shape, NUMPY_TYPES[dtype.name])
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if made.nbytes:
                os.posix_fallocate(file, 0, made.nbytes)
        finally:
            os.close(file)
    except OSError as error:
        raise failed(path.parent.parent, error) from error
    return made
