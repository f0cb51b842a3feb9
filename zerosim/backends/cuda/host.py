"""Copies between host and device: pinned memory, uploads that do not wait, downloads that wait for one event.

CuPy's pool reuses a pinned block as soon as Python drops it, even while its copy is in flight.
So `Transfers` holds each block until the event recorded after its copy has completed. The copies of a step
(tokens, losses, a flag) are small. The first upload of a large model's weights is not: beyond `most_bytes`
the host waits for the copies in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, store


class Transfers:
    """Copies over the bus, and the pinned blocks that copies in flight still use. Any thread may call."""

    def __init__(self, most_bytes: int = 2**30) -> None:
        self._most_bytes = most_bytes
        self._held: deque[tuple[Any, Any, int]] = deque()

    def from_host(self, values: Any, out: Array) -> None:
        """Round on the host, as the NumPy backend does, and upload in the current stream, without waiting.

        A strided `out` takes scratch of its size.
        """
        if not out.size:
            return
        block = self._pinned(out.nbytes)
        rounded = _as_array(block, out.shape, out.dtype)
        with np.errstate(all="ignore"):  # inf and nan are ordinary results here
            store(np.asarray(values), rounded)
        with result_for(out) as target:
            stream = cp.cuda.get_current_stream()
            kind = cp.cuda.runtime.memcpyHostToDevice
            cp.cuda.runtime.memcpyAsync(target.data.ptr, block.ptr, out.nbytes, kind, stream.ptr)
        self._hold(block, out.nbytes)

    def to_host(self, array: Array) -> Any:
        """Return the values as a new NumPy array (half types as float32). Wait for the current stream."""
        return self.to_host_later(array)()

    def to_host_later(self, array: Array) -> Callable[[], Any]:
        """Start a download in the current stream. The returned function waits for it and returns the values.

        A later write to `array` in this stream does not change them. A strided array needs scratch.
        """
        shape, dtype = array.shape, array.dtype
        if not array.size:
            return lambda: raised(np.empty(shape, dtype))
        with cp.cuda.Device(array.device.id):
            block = self._pinned(array.nbytes)
            source, stream = dense(array), cp.cuda.get_current_stream()
            kind = cp.cuda.runtime.memcpyDeviceToHost
            cp.cuda.runtime.memcpyAsync(block.ptr, source.data.ptr, array.nbytes, kind, stream.ptr)
            done = self._hold(block, array.nbytes)

        def wait() -> Any:  # keeps the block alive, not the device's array
            done.synchronize()
            values = _as_array(block, shape, dtype)
            found = raised(values)
            return found.copy() if found is values else found

        return wait

    def _pinned(self, nbytes: int) -> Any:
        """Return a block of pinned memory, after giving blocks whose copies are done back to CuPy's pool."""
        in_flight = tuple(self._held)
        if nbytes + sum(held for _, _, held in in_flight) > self._most_bytes:
            for event, _, _ in in_flight:
                event.synchronize()
        for _ in in_flight:
            try:
                entry = self._held.popleft()
            except IndexError:  # another thread was faster
                break
            if not entry[0].done:
                self._held.append(entry)
        return cp.cuda.alloc_pinned_memory(nbytes)

    def _hold(self, block: Any, nbytes: int) -> Any:
        """Hold the block until the current stream has finished its queued work. Return the event of that."""
        event = cp.cuda.Event(disable_timing=True)
        event.record(cp.cuda.get_current_stream())
        self._held.append((event, block, nbytes))
        return event


def _as_array(block: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a NumPy view of pinned memory, valid while the block is held."""
    nbytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer(block, np.uint8, nbytes).view(dtype).reshape(shape)
