"""A rank's share of the host's memory: bytes that leave the device and stay there until the device needs them again.

They are counted as on the device: at their allocation, and when their owner dies. Each transfer
is a `Copy` in the record, and no network traffic.
"""

from __future__ import annotations

from typing import Any

from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Alloc
from zerosim.placement.memories import HOST


class HostBuffer:
    """The bytes of a device's buffer, in the host's memory. The device's buffer may be freed afterwards."""

    __slots__ = ("__weakref__", "_data", "device", "dtype", "id", "nbytes", "shape")

    def __init__(self, source: Buffer, kind: Kind) -> None:
        """Raises: Aborted when the run has been ended; OutOfMemory."""
        self.device: Device = source.device
        self.shape, self.dtype, self.nbytes = source.shape, source.dtype, source.nbytes
        self.device.copy("device", "host", self.nbytes)
        self._data = self._download(source)
        self.id, reserved = self.device.reserve(self.nbytes, kind, HOST)
        self.device.recorder.add(Alloc(self.device.where, self.id, self.nbytes, reserved, kind.value, 0, "", HOST))
        self.device.recorder.watch(self, self.id, HOST)

    def copy_to(self, target: Buffer) -> None:
        """Copy the bytes back to the device, into a buffer of its shape and dtype. Raises: Aborted when the run has
        been ended."""
        device, stream = self.device, self.device.stream
        device.copy("host", "device", self.nbytes)
        array = self._data if stream is None else stream.upload(self._data, self.shape, self.dtype)
        device.backend.copy(array, target.array)

    def _download(self, source: Buffer) -> Any:
        device = self.device
        if device.stream is not None:
            return device.stream.download(source.array)
        array = device.backend.empty(self.shape, self.dtype)  # NumPy's memory is the host's, and shapes have no memory
        device.backend.copy(source.array, array)
        return array
