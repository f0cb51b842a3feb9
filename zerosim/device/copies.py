"""Copies between a rank's own memories: launched after a stream's earlier work, and waited for like collectives.

Each direction has its own stream. A copy holds its source until compute or the host's CPU has waited for it. Copies
inline run between kernels instead, on devices of any backend: nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerosim.backends.kernels import Array, Backend
from zerosim.backends.numpy.files import FileArray
from zerosim.device.device import Buffer, Device, Kind, Storage
from zerosim.device.events import COMPUTE, CPU, Alloc, Copy, Wait
from zerosim.placement.memories import HOST

OFFLOAD, SAVES, PAGES, CONTROL = "offload", "saves", "pages", "control"


class Copying:
    """A copy in flight into `target`."""

    __slots__ = ("_held", "device", "id", "target")

    def __init__(self, device: Device, id: int, source: Buffer, target: Buffer) -> None:
        self.device, self.id, self.target = device, id, target
        self._held: Buffer | None = source

    def wait(self, by: str = COMPUTE) -> Buffer:
        """Let compute, the host's CPU or a stream wait for the copy, and return the filled buffer."""
        self.device.recorder.add(Wait(self.device.where, self.id, by))
        if by in (COMPUTE, CPU):
            self.release()
        return self.target

    def release(self) -> None:
        """Let go of the source."""
        self._held = None


def launch_copy(source: Buffer, target: Buffer, *, after: str = COMPUTE, purpose: str = OFFLOAD) -> Copying:
    """Launch a copy of `source` into `target`, a buffer like it in another memory. `after`: the stream whose earlier
    work the copy follows, `COMPUTE` or the host's `CPU`.

    Raises: Aborted when the run has been ended; OutputError where a drive fails.
    """
    device = source.device
    device.look_up()
    id = device.next_id()
    device.recorder.add(Copy(device.where, source.memory, target.memory, source.nbytes, purpose, id, after))
    _carry(device.backend, source, target)
    return Copying(device, id, source, target)


def copy_to_host(source: Buffer, kind: Kind, purpose: str = OFFLOAD) -> Buffer:
    """Copy a buffer of the device inline, into a new one of the host.

    Raises: Aborted when the run has been ended; OutOfMemory.
    """
    device, stream = source.device, source.device.stream
    device.look_up()
    device.recorder.add(Copy(device.where, source.memory, HOST, source.nbytes, purpose))
    if stream is not None:
        array = stream.download(source.array)
    else:  # NumPy's memory is the host's, and shapes have no memory
        array = device.backend.empty(source.shape, source.dtype)
        device.backend.copy(source.array, array)
    id, reserved = device.reserve(source.nbytes, kind, HOST)
    device.recorder.add(Alloc(device.where, id, source.nbytes, reserved, kind.value, 0, "", HOST))
    return Buffer(Storage(array, device, id, HOST), array, source.dtype)


def copy_inline(host: Buffer, target: Buffer, purpose: str = OFFLOAD) -> None:
    """Copy a buffer that `copy_to_host` has made into one of the device, inline. Raises: Aborted when the run has been
    ended."""
    device, stream = host.device, host.device.stream
    device.look_up()
    device.recorder.add(Copy(device.where, host.memory, target.memory, target.nbytes, purpose))
    array = host.array if stream is None else stream.upload(host.array, target.shape, target.dtype)
    device.backend.copy(array, target.array)


def copied_to(buffer: Buffer, memory: str) -> Buffer:
    """Return a norm's sums in that memory: a copy, if they are in another one."""
    if buffer.memory == memory:
        return buffer
    there = buffer.device.alloc(buffer.shape, buffer.dtype, Kind.TEMP, memory=memory)
    to_host = memory == HOST
    copy = launch_copy(buffer, there, after=COMPUTE if to_host else CPU, purpose=CONTROL)
    if to_host:
        copy.wait(CPU)
    return copy.wait()


def put(array: Array, into: Buffer | None) -> None:
    """Store an array's values in a buffer, rounded as it rounds them, if there is one. This is no copy of a step, and
    not recorded."""
    if into is not None and into.array is not array:
        _fill(into, into.device.backend.copy, array)


def write(values: Any, into: Buffer) -> None:
    """Store a host array's values in the same way."""
    _fill(into, into.device.backend.from_host, values)


def _fill(into: Buffer, store: Callable[[Any, Array], None], values: Any) -> None:
    if isinstance(into.array, FileArray):
        store(values, rounded := into.device.backend.empty(into.shape, into.dtype))
        into.array.write(rounded)
    else:
        store(values, into.array)


def _carry(backend: Backend, source: Buffer, target: Buffer) -> None:
    if isinstance(source.array, FileArray):
        source.array.read(target.array)
    elif isinstance(target.array, FileArray):
        target.array.write(source.array)
    else:
        backend.copy(source.array, target.array)
