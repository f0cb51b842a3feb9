"""cupy.cuda.Stream and Event of the stand-in, over the clocks of `_clock.py`."""

from __future__ import annotations

import time
from typing import Any

from cupy._clock import (
    Clock,
    StreamClock,
    current_stream,
    finish,
    is_done,
    join,
    legacy_order,
    new_stream,
    null_stream,
    stream_of,
    wait_stream,
)
from cupy._state import LOCK, THREAD, StandinError, absent, count_wait
from cupy.cuda import graph


class Event:
    """A point in a stream. Waiting for one that was never recorded orders nothing, as in CUDA."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._timing = not disable_timing
        self._device = THREAD.device
        self._clock: Clock = {}
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            clock = current_stream() if stream is None else stream_of(stream.ptr)
            _refuse_in_graph(clock, "an event is recorded")
            if clock.device != self._device:
                raise StandinError(
                    f"cudaErrorInvalidResourceHandle: an event of device {self._device} records {clock.name} of device "
                    f"{clock.device}"
                )
            legacy_order(clock)
            self._clock = dict(clock.seen)
            self._time = time.perf_counter()

    @property
    def done(self) -> bool:
        return is_done(self._clock)

    def synchronize(self) -> None:
        if not is_done(self._clock):
            with LOCK:
                count_wait("event.synchronize")
                finish(self._clock)

    def __getattr__(self, name: str) -> Any:
        raise absent("Event", name)


def _refuse_in_graph(clock: StreamClock, what: str) -> None:
    """CUDA would make it a part of the graph; zerosim captures nothing that reaches other streams."""
    if clock.capture is not None:
        clock.capture.broken = True
        raise StandinError(f"{what} on {clock.name}, which is capturing")


class Stream:
    """A stream of the device that is current when it is made."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, *, _clock: StreamClock | None = None
    ) -> None:
        if ptds:
            raise absent("Stream", "ptds")
        self._null = null
        self._held = None if null else _clock or new_stream(THREAD.device, not non_blocking)

    @property
    def _its(self) -> StreamClock:
        return self._held or null_stream(THREAD.device)

    @property
    def ptr(self) -> int:
        return self._its.ptr

    @property
    def device_id(self) -> int:
        return -1 if self._null else self._its.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def use(self) -> Stream:
        if not self._null and self._its.device != THREAD.device:
            raise RuntimeError(
                f"The device that the stream is created on ({self._its.device}) does not match with the current device "
                f"({THREAD.device})"
            )
        THREAD.streams[THREAD.device] = None if self._null else self
        return self

    def __enter__(self) -> Stream:
        before = THREAD.streams.get(THREAD.device)
        self.use()
        THREAD.stack.append((THREAD.device, before))
        return self

    def __exit__(self, *_: Any) -> None:
        device, before = THREAD.stack.pop()
        THREAD.streams[device] = before

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with LOCK:
            _refuse_in_graph(self._its, "an event is waited for")
            join(self._its.seen, event._clock)

    def begin_capture(self, mode: int | None = None) -> None:
        graph.begin(self._its, mode)

    def end_capture(self) -> graph.Graph:
        return graph.end(self._its)

    def is_capturing(self) -> bool:
        return self._its.capture is not None

    @property
    def done(self) -> bool:
        return is_done(self._its.seen)

    def synchronize(self) -> None:
        wait_stream(self._its, "stream.synchronize")

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            held.ended = True

    def __getattr__(self, name: str) -> Any:
        raise absent("Stream", name)


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    held = THREAD.streams.get(THREAD.device if device_id == -1 else device_id)
    return Stream.null if held is None else held


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events that were recorded and waited for."""
    for event in (start_event, end_event):
        if not event._timing:
            raise StandinError("cudaErrorInvalidResourceHandle: an event made with disable_timing=True holds no time")
        if event._time is None:
            raise StandinError("cudaErrorInvalidResourceHandle: an event that was never recorded holds no time")
        if not event.done:
            raise StandinError("cudaErrorNotReady: wait for the event before you ask for its time")
    return 1e3 * (end_event._time - start_event._time)  # type: ignore[operator]
