"""One rank on a GPU: its device, its stream, and a memory pool of its own.

Rank r works on GPU r mod G. Ranks that share a GPU have separate streams there, which run side by side.
Streams do not synchronise by default: events order reads of another rank's arrays and the reuse of
memory (`comm/transports/threads.py`). A pool reuses a block in
the same stream only, so a rank needs no synchronisation with itself. One pool per rank separates ranks that share a
GPU. CuPy 14 never frees a dropped pool's memory, so a stream frees it when it closes.

Source: CuPy 14.2, `cupy/cuda/memory.pyx` (free chunks and their arena hold one another until `free_all_blocks`);
CUDA Runtime API, Event Management (times have a resolution of about half a microsecond).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import finalize

import cupy as cp
import numpy as np

from zerosim.backends.cuda.facts import find_gpu
from zerosim.backends.kernels import Array, GpuBytes
from zerosim.backends.numpy.ops import NUMPY_TYPES
from zerosim.dtypes import DType


class CudaStream:
    """One rank's queue of kernels and its memory pool. Any thread may act as the rank: `with stream.use():`."""

    def __init__(self, gpu: int, pool: Any = None, kind: Any = cp.cuda.Stream) -> None:
        self.gpu = gpu
        self.device = cp.cuda.Device(gpu)
        self.pool = cp.cuda.MemoryPool() if pool is None else pool
        with self.device:
            self.cupy_stream = kind(non_blocking=True)
        finalize(self, give_back, self.device, self.pool).atexit = False

    def flush(self) -> None:
        """Launch kernels that were held back: none here."""

    def use(self) -> AbstractContextManager[object]:
        """Launch kernels in this rank's stream and allocate arrays from its pool inside the `with` block."""
        stack = ExitStack()
        stack.enter_context(self.device)
        stack.enter_context(cp.cuda.using_allocator(self.pool.malloc))
        stack.enter_context(self.cupy_stream)
        return stack

    def record_event(self) -> Any:
        """Record an event after all work queued so far."""
        self.flush()
        with self.device:
            event = cp.cuda.Event(disable_timing=True)
            event.record(self.cupy_stream)
        return event

    def wait_event(self, event: Any) -> None:
        """Make the stream wait for `event`, which may be another GPU's. The host does not wait."""
        self.flush()
        with self.device:
            self.cupy_stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait on the host until the stream has finished all its work."""
        self.flush()
        self.cupy_stream.synchronize()

    def download(self, array: Array) -> Any:
        """Copy an array's bytes to the host, bit for bit, as a flat NumPy array of uint8. Wait for the copy."""
        self.flush()
        with self.use():
            return array.get().reshape(-1).view(np.uint8)

    def upload(self, data: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array of this rank with these bytes. CUDA has read the pageable memory when this returns."""
        self.flush()
        with self.use():
            array = cp.empty(shape, NUMPY_TYPES[dtype.name])
            array.set(np.frombuffer(data, np.uint8).view(array.dtype).reshape(shape))
            return array

    def gpu_bytes(self) -> GpuBytes:
        """Return the GPU's number, name and bytes in use, including other programs' bytes."""
        self.synchronize()
        gpu = find_gpu(self.gpu)
        assert gpu is not None, f"GPU {self.gpu} worked a moment ago"
        return gpu.index, gpu.name, gpu.memory_bytes - gpu.free_bytes

    def timer(self) -> StreamTimer:
        return StreamTimer(self)

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the rank's pool on its GPU: in use (each block rounded up to 512), and reserved."""
        self.flush()
        with self.device:
            return self.pool.used_bytes(), self.pool.total_bytes()


def give_back(device: Any, pool: Any) -> None:
    """Free the pool's unused memory on that GPU."""
    with device:
        pool.free_all_blocks()


class StreamTimer:
    """Time the work queued between `start()` and `stop()` by the GPU's own clock. Any thread may call, repeatedly.

    Its two events record times. A stream's other events do not, because that costs less.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        with stream.device:
            self._started = cp.cuda.Event()
            self._stopped = cp.cuda.Event()

    def start(self) -> None:
        """Start timing the work queued from now on. Return at once; timing begins after the stream's queued work."""
        self._stream.flush()
        with self._stream.device:
            self._started.record(self._stream.cupy_stream)

    def stop(self) -> float:
        """Wait for the work queued so far, and return the seconds on the GPU since `start`."""
        self._stream.flush()
        with self._stream.device:
            self._stopped.record(self._stream.cupy_stream)
            self._stopped.synchronize()
            return float(cp.cuda.get_elapsed_time(self._started, self._stopped)) / 1e3
