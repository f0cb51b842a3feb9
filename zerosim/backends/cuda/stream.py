"""One rank on a GPU: its device, its stream, and a memory pool of its own.

Rank r works on GPU r mod G; ranks that share a GPU have streams of their own there, which run side by side.
Streams know nothing of each other: what one rank may read of another's arrays, and when memory may be
used again, is ordered by events (`comm/transports/threads.py`). Blocks that a pool took back are handed out again in
the same stream alone, so that a rank needs no order with itself. A pool per rank tells ranks apart that share a GPU.
CuPy 14 never frees what a pool holds when the pool is dropped: a stream gives it back as it ends.

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
    """Where one rank's kernels queue and its memory comes from. Any thread works as the rank, `with stream.use():`."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.device = cp.cuda.Device(gpu)
        self.pool = cp.cuda.MemoryPool()
        with self.device:
            self.cupy_stream = cp.cuda.Stream(non_blocking=True)
        finalize(self, _give_back, self.device, self.pool).atexit = False

    def use(self) -> AbstractContextManager[object]:
        """Kernels launched inside run in this rank's stream, arrays made inside come from its pool."""
        stack = ExitStack()
        stack.enter_context(self.device)
        stack.enter_context(cp.cuda.using_allocator(self.pool.malloc))
        stack.enter_context(self.cupy_stream)
        return stack

    def record_event(self) -> Any:
        """An event behind all that the stream was given so far."""
        with self.device:
            event = cp.cuda.Event(disable_timing=True)
            event.record(self.cupy_stream)
        return event

    def wait_event(self, event: Any) -> None:
        """The stream goes on when `event` has passed, which may be of another GPU; the host does not wait."""
        with self.device:
            self.cupy_stream.wait_event(event)

    def synchronize(self) -> None:
        """The host waits until the stream has nothing left to do."""
        self.cupy_stream.synchronize()

    def download(self, array: Array) -> Any:
        """An array's bytes in the host's memory, bit for bit, as a flat NumPy array of uint8. Waits for them."""
        with self.use():
            return array.get().reshape(-1).view(np.uint8)

    def upload(self, data: Any, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array of this rank with these bytes; CUDA takes them from pageable memory before it returns."""
        with self.use():
            array = cp.empty(shape, NUMPY_TYPES[dtype.name])
            array.set(np.frombuffer(data, np.uint8).view(array.dtype).reshape(shape))
            return array

    def gpu_bytes(self) -> GpuBytes:
        """The GPU's number, name and bytes in use, other programs' among them."""
        self.synchronize()
        gpu = find_gpu(self.gpu)
        assert gpu is not None, f"GPU {self.gpu} worked a moment ago"
        return gpu.index, gpu.name, gpu.memory_bytes - gpu.free_bytes

    def timer(self) -> StreamTimer:
        return StreamTimer(self)

    def memory(self) -> tuple[int, int]:
        """Bytes of the rank's pool on its GPU: in use (each block rounded up to 512), and held."""
        with self.device:
            return self.pool.used_bytes(), self.pool.total_bytes()


def _give_back(device: Any, pool: Any) -> None:
    """Free what the pool holds on that GPU and nobody uses."""
    with device:
        pool.free_all_blocks()


class StreamTimer:
    """`start()`, work given to the stream, `stop()`: its time by the GPU's own clock. Any thread may call, repeatedly.

    It has two events that hold times; a stream's events hold none, because that costs less.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        with stream.device:
            self._started = cp.cuda.Event()
            self._stopped = cp.cuda.Event()

    def start(self) -> None:
        """What the stream is given from here on is timed. Returns at once; a stream with work left starts after it."""
        with self._stream.device:
            self._started.record(self._stream.cupy_stream)

    def stop(self) -> float:
        """Seconds on the GPU from `start` to the end of what the stream was given so far. Waits for that end."""
        with self._stream.device:
            self._stopped.record(self._stream.cupy_stream)
            self._stopped.synchronize()
            return float(cp.cuda.get_elapsed_time(self._started, self._stopped)) / 1e3
