"""How arrays become bytes that MPI can send, and back: as they lie, through the host's memory, or on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from zerosim.backends.kernels import Array, Stream
from zerosim.device.device import Device
from zerosim.dtypes import DType

INLINE_BYTES = 3072
"""A part up to this size travels in its header, which then still goes out at once (Open MPI: up to 4096 bytes)."""


class Staging:
    """Send arrays in place, for backends whose arrays are host memory (NumPy), which MPI reads and writes itself."""

    is_copy = False
    """Whether bytes are copied between the device's memory and the host's."""

    inline_bytes = INLINE_BYTES

    def __init__(self, devices: Mapping[int, Device]) -> None:
        self._devices = devices

    def outgoing(self, array: Array, rank: int) -> Any:
        """Return the contiguous bytes of `rank`'s array; valid, and unchanged, as long as they are held."""
        return bytes_of(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Any, Any]:
        """Return a arriving place for `rank`, and the bytes in it to fill."""
        array = self._devices[rank].backend.empty(shape, dtype)
        return array, bytes_of(array)

    def arrived(self, kept: Any, rank: int) -> Array:
        """Return the array that `rank`'s moves read, once the bytes are filled."""
        return kept

    def _stream(self, rank: int) -> Stream:
        stream = self._devices[rank].stream
        assert stream is not None
        return stream


class ThroughHost(Staging):
    """For backends whose arrays are on a GPU: their bytes pass through the host's memory, on the ranks' own streams."""

    is_copy = True

    def outgoing(self, array: Array, rank: int) -> Any:
        return self._stream(rank).download(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Any, Any]:
        data = memoryview(bytearray(prod(shape) * dtype.itemsize))
        return (data, shape, dtype), data

    def arrived(self, kept: Any, rank: int) -> Array:
        return self._stream(rank).upload(*kept)


class GpuAware(Staging):
    """For a library that reads and writes a GPU's memory itself. It knows no streams: all kernels queued on some memory
    must finish before the library gets it."""

    inline_bytes = 0

    def outgoing(self, array: Array, rank: int) -> Any:
        self._stream(rank).synchronize()
        return bytes_of(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Any, Any]:
        stream = self._stream(rank)
        with stream.use():
            found = super().incoming(shape, dtype, rank)
        stream.synchronize()  # earlier kernels on this memory may still be queued
        return found


def bytes_of(array: Array) -> Any:
    """Return a contiguous array's own memory as bytes, whatever its dtype (half types have no buffer format)."""
    return array.reshape(-1).view("uint8")
