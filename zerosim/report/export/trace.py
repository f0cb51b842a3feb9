"""A step by the clock as Chrome trace events, which Perfetto, chrome://tracing and speedscope open.

A rank is a process, a stream a thread. On the compute stream kernels lie in slices of their unit, and those in slices
of their forward, backward or optimizer; arrows join sends and receives; live bytes are a counter.

Times are microseconds with three digits, because Perfetto keeps whole nanoseconds. A slice is a beginning and an end
(B, E) rather than a beginning and a duration (X): a viewer adds those two as floats, and then slices overlap by a
rounding. Source of the rules: Google, "Trace Event Format"; google/perfetto ec5d16b, its JSON importer; speedscope
1.25.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from zerosim.device.events import COMPUTE
from zerosim.ledger.clock import Timeline
from zerosim.ledger.tracks import Span, Track
from zerosim.verbs import MESSAGES

NS = 1e9
MODELLED = "modelled by zerosim's clock, not measured"


def chrome_trace(timeline: Timeline, device: str) -> dict[str, Any]:
    """Return the file's JSON. `device` names the device whose times these are."""
    events: list[dict[str, Any]] = []
    for rank, track in sorted(timeline.tracks.items()):
        events += _names(rank, track)
        events += _slices(rank, track)
        events += _arrows(rank, track)
        events += _counter(rank, track)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"device": device, "times": MODELLED}}


def _streams(track: Track) -> list[str]:
    """Return streams, compute first, the others in the order in which they begin."""
    return list(dict.fromkeys([COMPUTE, *(span.stream for span in track.spans)]))


def _names(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", rank, 0, name=f"rank {rank}")
    yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for thread, stream in enumerate(_streams(track)):
        yield _meta("thread_name", rank, thread, name=stream)
        yield _meta("thread_sort_index", rank, thread, sort_index=thread)


def _meta(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _slices(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    for thread, stream in enumerate(_streams(track)):
        spans = [span for span in track.spans if span.stream == stream]
        if stream == COMPUTE:
            yield from _nested(rank, thread, spans)
        else:
            for span in spans:
                where = {"unit": span.scope.unit, "phase": span.scope.phase, "micro_batch": span.scope.slot}
                yield from _slice(rank, thread, span.name, [span], args=where)


def _nested(rank: int, thread: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Return kernels in slices of a unit, and those in slices of a phase and microbatch. No slice repeats its
    surroundings in its arguments, because speedscope makes the arguments a part of the name."""
    for (phase, slot), of_phase in groupby(spans, lambda span: (span.scope.phase, span.scope.slot)):
        in_phase, units = list(of_phase), list[dict[str, Any]]()
        for unit, of_unit in groupby(in_phase, lambda span: span.scope.unit):
            in_unit, kernels = list(of_unit), list[dict[str, Any]]()
            for span in in_unit:
                name = f"wait for {span.waits_for}" if span.waits_for else span.name
                kernels += _slice(rank, thread, name, [span])
            units += _slice(rank, thread, unit, in_unit, kernels) if unit else kernels
        name = phase if phase in ("optimizer", "curvature") else f"{phase} {slot}"
        yield from _slice(rank, thread, name, in_phase, units)


def _slice(
    rank: int,
    thread: int,
    name: str,
    spans: Sequence[Span],
    inside: Sequence[dict[str, Any]] = (),
    args: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return a slice from the beginning of the first span to the end of the last; nothing if it is shorter than a
    nanosecond."""
    begin, end = round(spans[0].start * NS), round(spans[-1].stop * NS)
    if begin == end:
        return []
    where = {"name": name, "pid": rank, "tid": thread}
    first = {"ph": "B", **where, "ts": _us(begin)} | ({"args": args} if args else {})
    return [first, *inside, {"ph": "E", **where, "ts": _us(end)}]


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1e3


def _arrows(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    """Return arrows from the beginning of a send to the end of its receive, which is inside of both. They have the
    stream's name, which names sender and receiver."""
    threads = {stream: thread for thread, stream in enumerate(_streams(track))}
    for span in track.spans:
        if span.name in MESSAGES and span.number >= 0:
            ends = {"ph": "s"} if span.name == "send" else {"ph": "f", "bp": "e"}
            begin, end = round(span.start * NS), round(span.stop * NS)
            at = begin if span.name == "send" else max(begin, end - 1)
            flow = {"cat": "message", "name": "message", "id": f"{span.stream} {span.number}"}
            yield {**ends, **flow, "pid": rank, "tid": threads[span.stream], "ts": _us(at)}


def _counter(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    """Return the live bytes at each moment; of several changes at one moment the last."""
    for seconds, of_moment in groupby(track.live, lambda pair: pair[0]):
        *_, (_, nbytes) = of_moment
        at = _us(round(seconds * NS))
        yield {"ph": "C", "name": "live bytes", "pid": rank, "tid": 0, "ts": at, "args": {"bytes": nbytes}}
