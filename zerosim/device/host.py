"""A rank's part of the host's memory: bytes that leave the device and wait there until it wants them again.

They are counted as they are on the device: when they come to live, and when the object that owns them dies. What they
took on the way is a `Copy` of its own in the record, and no traffic of a network.
"""

from __future__ import annotations

from typing import Any

from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import HostAlloc, HostFree


class HostBuffer:
    """The bytes of a device's buffer, in the host's memory. Made of one, whose bytes may go afterwards."""

    __slots__ = ("__weakref__", "_data", "device", "dtype", "id", "nbytes", "shape")

    def __init__(self, source: Buffer, kind: Kind) -> None:
        """Raises: Aborted when the run has been ended."""
        self.device: Device = source.device
        self.shape, self.dtype, self.nbytes = source.shape, source.dtype, source.nbytes
        self.device.copy("device", "host", self.nbytes)
        self._data = self._download(source)
        self.id = self.device.next_id()
        self.device.recorder.add(HostAlloc(self.device.where, self.id, self.nbytes, kind.value))
        self.device.recorder.watch(self, HostFree, self.id)

    def copy_to(self, target: Buffer) -> None:
        """Back to the device, into a buffer of its shape and dtype. Raises: Aborted when the run has been ended."""
        device, stream = self.device, self.device.stream
        device.copy("host", "device", self.nbytes)
        array = self._data if stream is None else stream.upload(self._data, self.shape, self.dtype)
        device.backend.copy(array, target.array)

    def _download(self, source: Buffer) -> Any:
        device = self.device
        if device.stream is not None:
            return device.stream.download(source.array)
        array = device.backend.empty(self.shape, self.dtype)  # NumPy's memory is the host's, and shapes have none
        device.backend.copy(source.array, array)
        return array
