"""The CUDA backend whose kernels wait on a rank's tape (`tape.py`), which replays what repeats as CUDA graphs.

The kernels are those of `backend.py`. Whatever reads a stream, waits for it or copies from the host first launches what
waits. Kernels whose numbers change with every step are never held back. `--capture-graphs` chooses this backend. No GPU
has run it yet, so it is off by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import finalize

import cupy as cp

from zerosim.backends.cuda import arrays, batched
from zerosim.backends.cuda.backend import KERNELS, CudaBackend
from zerosim.backends.cuda.libraries import Cublas, workspace_bytes
from zerosim.backends.cuda.products import SUMS_STAY_WIDE
from zerosim.backends.cuda.stream import CudaStream, give_back
from zerosim.backends.cuda.tape import Tape
from zerosim.backends.kernels import Array, Native, made_of

CHANGING = frozenset({"adam", "adam8bit", "coded", "elementwise", "route", "sample_labels"})
"""Kernels with the step's own numbers or draws, rules in Python, and values from the host."""


class _Queue(cp.cuda.Stream):  # type: ignore[misc]
    """A stream with its tape and its cuBLAS handle, which kernels find through the current stream."""

    tape: Tape
    blas: Cublas


class GraphStream(CudaStream):
    """One rank's stream with its tape. Before its pool grows, the tape is launched."""

    def __init__(self, gpu: int) -> None:
        super().__init__(gpu, cp.cuda.MemoryPool(_grow), _Queue)
        queue = self.cupy_stream
        queue.tape = self._tape = Tape(gpu)
        finalize(self, give_back, self.device, self._tape.scratch).atexit = False
        with self.device, queue:
            self._workspace = cp.cuda.Memory(workspace_bytes())  # no pool's: it goes with the stream
            queue.blas = Cublas(queue.ptr, self._workspace.ptr, self._workspace.size, SUMS_STAY_WIDE)

    def flush(self) -> None:
        """Launch the kernels that wait."""
        self._tape.flush(self.cupy_stream)

    def memory(self) -> tuple[int, int]:
        """Return the bytes in use in the rank's pool, and those reserved there and for scratch and the workspace."""
        used, reserved = super().memory()
        with self.device:
            return used, reserved + self._tape.scratch.total_bytes() + self._workspace.size


def _grow(nbytes: int) -> Any:
    """Allocate for a rank's pool, in whose stream this thread works."""
    _flush()
    return cp.cuda.MemoryPointer(cp.cuda.Memory(nbytes), 0)


def _flush() -> None:
    stream = cp.cuda.get_current_stream()
    tape = getattr(stream, "tape", None)
    if tape is not None:
        tape.flush(stream)


def _held_back(kernel: Callable[..., None]) -> object:
    """Make a backend's method of a kernel that waits on the current stream's tape."""

    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> None:
        stream = cp.cuda.get_current_stream()
        tape = getattr(stream, "tape", None)
        if tape is None:
            kernel(*args, **kwargs)
        elif kernel.__name__ in CHANGING or not tape.add(stream, kernel, args, kwargs):
            tape.flush(stream)
            kernel(*args, **kwargs)

    return staticmethod(run)


@made_of(*KERNELS, method=_held_back)
class GraphsBackend(CudaBackend):
    """`CudaBackend` with tapes."""

    name = "cuda"
    empty = staticmethod(arrays.empty)

    def open_stream(self, rank: int) -> CudaStream:
        """Open rank r's stream on visible GPU r mod G."""
        return GraphStream(rank % cp.cuda.runtime.getDeviceCount())

    def native_collective(self, streams: Sequence[Any], calls: Sequence[Native]) -> None:
        for stream in streams:
            stream.flush()
        super().native_collective(streams, calls)

    def from_host(self, values: Any, out: Array) -> None:
        _flush()
        super().from_host(values, out)

    def to_host(self, array: Array) -> Any:
        return self.to_host_later(array)()

    def to_host_later(self, array: Array) -> Callable[[], Any]:
        _flush()
        return super().to_host_later(array)


class BatchedGraphsBackend(GraphsBackend):
    """`BatchedCudaBackend` with tapes."""

    flash_attention = _held_back(batched.flash_attention)
    flash_attention_backward = _held_back(batched.flash_attention_backward)
    attention_block = _held_back(batched.attention_block)
    attention_block_backward = _held_back(batched.attention_block_backward)
