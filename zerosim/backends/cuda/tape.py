"""A rank's kernels, held back for a moment: what repeats is captured once as a CUDA graph, and launched as one.

Kernels wait on the tape until CALLS are there, or until anything but a kernel touches the stream. A tape that is the
same as an earlier one, kernel by kernel, in addresses, shapes, strides, types and numbers, is captured, and from then
on launched as one graph. Any other tape is launched kernel by kernel. So where a buffer moves, a number changes or
another stream comes in, nothing is replayed, and no code above this one knows.

Scratch comes from a pool of the tape's own. A graph keeps its addresses, and between two tapes all of it is free.
Graphs of one stream run one after the other, so they share it. A tape holds addresses and no arrays: a rank's pool
gives the same memory to the next buffer in the same stream, and CUDA keeps that order. Before the pool grows, which may
free blocks of it, the tape is launched.

Source: CUDA C++ Programming Guide, CUDA Graphs (what a capture forbids; thread-local captures let other threads
allocate); CuPy 14, `cupy/cuda/stream.pyx` (begin_capture), `cupy/cuda/graph.pyx`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from math import copysign
from typing import Any, NamedTuple

import cupy as cp

CALLS = 32
"""Kernels of the backend on one tape: enough that launching costs little, few enough that the GPU starts early."""
MOST_GRAPHS = 4096
"""Captured graphs of a rank. Beyond, addresses move too much for graphs."""
MOST_SEEN = 65536

Key = tuple[Any, ...]


class Held(NamedTuple):
    """An array's place in memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class Packed(NamedTuple):
    """A tuple, a list, or one of the contract's tuples with names, of these items."""

    kind: type
    items: tuple[Any, ...]


class Changing(Exception):
    """An argument that no two calls can be known to share."""


def key_of(value: Any, gpu: int) -> Any:
    """Return an argument as a value that equals another call's only if a kernel would do the same.

    Raises: Changing.
    """
    if isinstance(value, cp.ndarray):
        if value.data.device_id != gpu:
            raise Changing
        return Held(value.data.ptr, value.shape, value.strides, value.dtype)
    if isinstance(value, tuple | list):
        return Packed(type(value), tuple(key_of(item, gpu) for item in value))
    if isinstance(value, float) and value == 0 and copysign(1, value) < 0:
        raise Changing  # it equals 0
    if value is None or isinstance(value, int | float | str | range):
        return value
    raise Changing


def argument_of(key: Any, gpu: int) -> Any:
    """Return the argument again, an array as a view of memory that others own."""
    if isinstance(key, Held):
        span = sum(step * (size - 1) for size, step in zip(key.shape, key.strides, strict=True)) + key.dtype.itemsize
        memory = cp.cuda.UnownedMemory(key.address, span, None, gpu)
        return cp.ndarray(key.shape, key.dtype, cp.cuda.MemoryPointer(memory, 0), key.strides)
    if isinstance(key, Packed):
        items = [argument_of(item, gpu) for item in key.items]
        return key.kind(*items) if hasattr(key.kind, "_fields") else key.kind(items)
    return key


class Graphs:
    """The captured graphs of a stream, and the memory that they use as scratch."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Any] = {}  # None: not to be captured
        self.seen: set[int] = set()  # hashes of tapes that were launched once
        self.scratch = cp.cuda.MemoryPool(_allocator_of(self.by_key, self.seen))

    def due(self, key: Key) -> bool:
        """Return whether to capture this tape now: it was launched once before."""
        if key in self.by_key or len(self.by_key) >= MOST_GRAPHS:
            return False
        if len(self.seen) >= MOST_SEEN:
            self.seen.clear()
        known = hash(key) in self.seen
        self.seen.add(hash(key))
        return known


def _allocator_of(graphs: dict[Key, Any], seen: set[int]) -> Callable[[int], Any]:
    """Return the allocator of scratch. Where memory runs out the pool frees blocks; graphs that use them go first."""

    def allocate(nbytes: int) -> Any:
        try:
            return cp.cuda.MemoryPointer(cp.cuda.Memory(nbytes), 0)
        except cp.cuda.memory.OutOfMemoryError:
            graphs.clear()
            seen.clear()
            raise

    return allocate


class Tape:
    """One stream's kernels that wait. Any thread may call; `stream` is always the same."""

    def __init__(self, gpu: int) -> None:
        self._gpu, self._lock = gpu, threading.RLock()
        self._calls: list[Key] = []
        self._graphs = Graphs()

    @property
    def scratch(self) -> Any:
        """The pool of the kernels' scratch."""
        return self._graphs.scratch

    def add(self, stream: Any, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Hold a kernel back. Return False if its arguments may change behind their values: the caller runs it."""
        try:
            named = tuple((name, key_of(value, self._gpu)) for name, value in kwargs.items())
            call = kernel, tuple(key_of(value, self._gpu) for value in args), named
        except Changing:
            return False
        with self._lock:
            self._calls.append(call)
            if len(self._calls) >= CALLS:
                self.flush(stream)
        return True

    def flush(self, stream: Any) -> None:
        """Launch what waits: as a graph if this tape has been captured."""
        with self._lock:
            if not self._calls:
                return
            calls, self._calls = tuple(self._calls), []
            with cp.cuda.Device(self._gpu), cp.cuda.using_allocator(self.scratch.malloc), stream:
                if self._graphs.due(calls):
                    self._graphs.by_key[calls] = self._captured(stream, calls)
                graph = self._graphs.by_key.get(calls)
                if graph is None:
                    self._run(calls)
                else:
                    graph.launch()

    def _run(self, calls: Key) -> None:
        for kernel, args, kwargs in calls:
            named = {name: argument_of(value, self._gpu) for name, value in kwargs}
            kernel(*(argument_of(value, self._gpu) for value in args), **named)

    def _captured(self, stream: Any, calls: Key) -> Any:
        """Return the graph of these calls, or None if the stream refuses one of them while it captures."""
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeThreadLocal)
        refused = ""
        try:
            self._run(calls)
        except RuntimeError as error:  # CUDA's, cuBLAS's and CuPy's own refusals
            refused = _one_line(error)
        try:
            graph = stream.end_capture()
        except RuntimeError as error:
            refused = refused or _one_line(error)
        if not refused:
            return graph
        said = f"CUDA graphs: {refused}: {len(calls)} kernels are launched one by one"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None


def _one_line(error: RuntimeError) -> str:
    """Return what it says. Held itself, it would hold the frames that it passed through, and their arrays."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
