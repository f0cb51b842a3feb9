"""Streams and events as vector clocks, and the histories of bytes that they order.

Work runs at once, on the CPU, in the order in which the host launched it; what is checked is whether a GPU, which
owes only the order that streams, events and waits state, would have been bound to that order too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cupy._state import LOCK, MACHINE, THREAD, Place, RaceError, StandinError, count_wait, place

Clock = dict[int, int]
DONE: Clock = {}  # what the host has waited for: finished for whatever is launched from here on
STREAMS: dict[int, StreamClock] = {}  # by pointer
_numbers = itertools.count(1)


@dataclass(slots=True)
class Capture:
    """What a capturing stream was told to launch: functions of the stream that each runs on."""

    nodes: list[Callable[[StreamClock], None]] = field(default_factory=list)
    broken: bool = False


@dataclass(slots=True)
class StreamClock:
    """One stream of one device: `now` counts its own work, `seen` what of other streams is ordered before it."""

    number: int
    device: int
    ptr: int
    blocking: bool
    seen: Clock = field(default_factory=dict)
    pending: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    ended: bool = False
    capture: Capture | None = None

    @property
    def name(self) -> str:
        return f"the null stream of device {self.device}" if self.ptr < 16 else f"stream {self.number}"


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: a kernel or a copy."""

    stream: StreamClock
    count: int
    name: str
    place: Place

    def __str__(self) -> str:
        return f"{self.name} ({self.place}) on {self.stream.name}"


def new_stream(device: int, blocking: bool, null: bool = False) -> StreamClock:
    with LOCK:
        number = next(_numbers)
        stream = StreamClock(number, device, 0 if null else 4096 + 16 * number, blocking)
        if not null:
            STREAMS[stream.ptr] = stream
        return stream


NULL: dict[int, StreamClock] = {}


def null_stream(device: int) -> StreamClock:
    with LOCK:
        if device not in NULL:
            NULL[device] = new_stream(device, True, null=True)
        return NULL[device]


def current_stream(device: int | None = None) -> StreamClock:
    device = THREAD.device if device is None else device
    held = THREAD.streams.get(device)
    return held._its if held is not None else null_stream(device)


def stream_of(ptr: int) -> StreamClock:
    """Raises: RaceError for a pointer that is no live stream's."""
    if ptr == 0:
        return null_stream(THREAD.device)
    stream = STREAMS.get(ptr)
    if stream is None or stream.ended:
        raise RaceError(f"{ptr:#x} is not the pointer of a live stream (was its Stream object dropped?)")
    return stream


def join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


def legacy_order(stream: StreamClock) -> None:
    """The null stream and the blocking streams of its device wait for one another; non-blocking ones do not."""
    if stream.ptr == 0:
        for other in STREAMS.values():
            if other.device == stream.device and other.blocking:
                join(stream.seen, other.seen)
    elif stream.blocking and stream.device in NULL:
        join(stream.seen, NULL[stream.device].seen)


def submit(stream: StreamClock, run: Callable[[StreamClock], None]) -> None:
    """Run what a graph can hold, a kernel or a copy on the device: at once, or whenever the graph is launched."""
    with LOCK:
        MACHINE.launches["alone" if stream.capture is None else "captured"] += 1
        if stream.capture is not None:
            stream.capture.nodes.append(run)
            return
    run(stream)


def launch(stream: StreamClock, name: str) -> Work:
    """The next piece of work on `stream`. Call under LOCK."""
    if stream.capture is not None:
        stream.capture.broken = True
        raise StandinError(f"cudaErrorStreamCaptureUnsupported: {name} on {stream.name}, which is capturing")
    if stream.device != THREAD.device:
        raise RaceError(
            f"{name} was launched on {stream.name} of device {stream.device} while device {THREAD.device} is current"
        )
    legacy_order(stream)
    stream.seen[stream.number] = count = stream.seen.get(stream.number, 0) + 1
    return Work(stream, count, name, place())


def ordered(earlier: Work, work: Work) -> bool:
    number = earlier.stream.number
    return earlier.count <= work.stream.seen.get(number, 0) or earlier.count <= DONE.get(number, 0)


def finish(clock: Clock) -> None:
    """The host knows that everything in `clock` is done."""
    with LOCK:
        join(DONE, clock)
        for stream in [*STREAMS.values(), *NULL.values()]:
            done = DONE.get(stream.number, 0)
            while stream.pending and stream.pending[0][0] <= done:
                stream.pending.pop(0)[1]()
            if stream.ended and stream.seen.get(stream.number, 0) <= done:
                STREAMS.pop(stream.ptr, None)


def is_done(clock: Clock) -> bool:
    return all(count <= DONE.get(stream, 0) for stream, count in clock.items())


def wait_stream(stream: StreamClock, kind: str) -> None:
    with LOCK:
        count_wait(kind)
        legacy_order(stream)
        finish(dict(stream.seen))


def wait_device(device: int, kind: str) -> None:
    with LOCK:
        count_wait(kind)
        for stream in [*STREAMS.values(), *NULL.values()]:
            if stream.device == device:
                finish(dict(stream.seen))


@dataclass(slots=True)
class _Span:
    """Bytes with one history: who wrote them last and who read them since."""

    written: Work | None
    reads: dict[int, Work]


class History:
    """The spans of one piece of memory."""

    def __init__(self) -> None:
        self.starts: list[int] = [0]
        self.spans: list[_Span] = [_Span(None, {})]

    def _cut(self, at: int) -> int:
        index = bisect_left(self.starts, at)
        if index == len(self.starts) or self.starts[index] != at:
            before = self.spans[index - 1]
            self.starts.insert(index, at)
            self.spans.insert(index, _Span(before.written, dict(before.reads)))
        return index

    def read(self, start: int, end: int, work: Work) -> None:
        self._cut(end)
        first = self._cut(start)
        for span in self.spans[first : bisect_left(self.starts, end)]:
            if span.written is not None and not ordered(span.written, work):
                raise _race("reads", work, "written", span.written)
            span.reads[work.stream.number] = work

    def write(self, start: int, end: int, work: Work) -> None:
        self._cut(end)
        first = self._cut(start)
        last = bisect_left(self.starts, end)
        for span in self.spans[first:last]:
            if span.written is not None and not ordered(span.written, work):
                raise _race("writes", work, "written", span.written)
            for read in span.reads.values():
                if not ordered(read, work):
                    raise _race("writes", work, "read", read)
        self.starts[first:last] = [start]
        self.spans[first:last] = [_Span(work, {})]

    def at(self, offset: int) -> Any:
        return self.spans[bisect_right(self.starts, offset) - 1]


def _race(does: str, work: Work, did: str, earlier: Work) -> RaceError:
    return RaceError(
        f"{work} {does} bytes that {earlier} {'has written' if did == 'written' else 'may still be reading'}, "
        f"and no event or wait orders {earlier.stream.name} before {work.stream.name}"
    )
