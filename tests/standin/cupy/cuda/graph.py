"""cupy.cuda.Graph of the stand-in: what a stream captured, launched again with the same arguments.

Source: cupy/cuda/graph.pyx; CUDA C++ Programming Guide, CUDA Graphs (what a capture forbids).
"""

from __future__ import annotations

from typing import Any

from cupy._clock import Capture, StreamClock, current_stream, stream_of
from cupy._state import LOCK, MACHINE, THREAD, StandinError, absent


class Graph:
    """Its nodes run in the order of their capture: one stream was captured, and orders them."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def launch(self, stream: Any = None) -> None:
        clock = current_stream() if stream is None else stream_of(stream.ptr)
        with LOCK:
            if clock.capture is not None:
                clock.capture.broken = True
                raise StandinError("a graph within a graph is no part of what zerosim uses")
            MACHINE.launches["graphs"] += 1
            MACHINE.launches["replayed"] += len(self._nodes)
        for run in self._nodes:
            run(clock)

    def __getattr__(self, name: str) -> Any:
        raise absent("Graph", name)


def begin(clock: StreamClock, mode: int | None) -> None:
    if clock.ptr == 0:
        raise RuntimeError("cannot capture on the default (legacy) stream")
    if mode != 1:
        raise absent("Stream", f"begin_capture({mode}): other threads allocate meanwhile, so zerosim needs ThreadLocal")
    if clock.capture is not None:
        raise StandinError("cudaErrorIllegalState: the stream is capturing already")
    clock.capture = Capture()
    THREAD.capturing.append(clock)


def end(clock: StreamClock) -> Graph:
    if not any(begun is clock for begun in THREAD.capturing) or clock.capture is None:
        raise StandinError("cudaErrorStreamCaptureWrongThread: this thread has not begun a capture of the stream")
    THREAD.capturing = [begun for begun in THREAD.capturing if begun is not clock]
    capture, clock.capture = clock.capture, None
    if capture.broken:
        raise StandinError("cudaErrorStreamCaptureInvalidated: a call in the capture was refused")
    return Graph(capture.nodes)
