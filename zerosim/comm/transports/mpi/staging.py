"""How arrays become bytes that MPI can send, and back: as they lie, through the host's memory, or on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

from zerosim.backends.kernels import Array, Backend, Stream
from zerosim.device.device import Device
from zerosim.dtypes import DType

INLINE_BYTES = 3072
"""A part up to this size travels in its header, which then still goes out at once (Open MPI: up to 4096 bytes)."""


class Staging(Protocol):
    """How arrays become bytes that MPI can send, and back."""

    is_copy: bool
    """Whether bytes are copied on the way, between the device's memory and the host's."""

    inline_bytes: int
    """Parts up to this size travel within a header."""

    def outgoing(self, array: Array, rank: int) -> Any:
        """The contiguous bytes of `rank`'s array; valid, and unchanged, as long as they are held."""
        ...

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Any, Any]:
        """Something to keep for `rank`, and the bytes in it to fill."""
        ...

    def landed(self, kept: Any, rank: int) -> Array:
        """The array that `rank`'s moves read, once the bytes are filled."""
        ...


class HostMemory:
    """For backends whose arrays are host memory (NumPy): MPI reads and writes them where they are."""

    is_copy = False
    inline_bytes = INLINE_BYTES

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def outgoing(self, array: Array, rank: int) -> Any:
        return bytes_of(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Array, Any]:
        array = self._backend.empty(shape, dtype)
        return array, bytes_of(array)

    def landed(self, kept: Array, rank: int) -> Array:
        return kept


class ThroughHost:
    """For backends whose arrays are on a GPU: their bytes pass through the host's memory, on the ranks' own streams."""

    is_copy = True
    inline_bytes = INLINE_BYTES

    def __init__(self, devices: Mapping[int, Device]) -> None:
        self._devices = devices

    def outgoing(self, array: Array, rank: int) -> Any:
        return stream_of(self._devices, rank).download(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Any, Any]:
        data = memoryview(bytearray(prod(shape) * dtype.itemsize))
        return (data, shape, dtype), data

    def landed(self, kept: Any, rank: int) -> Array:
        return stream_of(self._devices, rank).upload(*kept)


class GpuAware:
    """For a library that reads and writes a GPU's memory itself. It knows no streams: before it is shown memory,
    everything that was queued on it must be done."""

    is_copy = False
    inline_bytes = 0

    def __init__(self, devices: Mapping[int, Device]) -> None:
        self._devices = devices

    def outgoing(self, array: Array, rank: int) -> Any:
        stream_of(self._devices, rank).synchronize()
        return bytes_of(array)

    def incoming(self, shape: tuple[int, ...], dtype: DType, rank: int) -> tuple[Array, Any]:
        stream = stream_of(self._devices, rank)
        with stream.use():
            array = self._devices[rank].backend.empty(shape, dtype)
        stream.synchronize()  # kernels that used this memory before may still be queued
        return array, bytes_of(array)

    def landed(self, kept: Array, rank: int) -> Array:
        return kept


def stream_of(devices: Mapping[int, Device], rank: int) -> Stream:
    stream = devices[rank].stream
    assert stream is not None
    return stream


def bytes_of(array: Array) -> Any:
    """A contiguous array's own memory as bytes, whatever its dtype (half types have no buffer format)."""
    return array.reshape(-1).view("uint8")
