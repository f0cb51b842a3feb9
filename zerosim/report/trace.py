"""A step by the clock as Chrome trace events, which Perfetto and chrome://tracing open.

A rank is a process, a stream a thread. On the compute stream kernels lie in slices of their unit, and those in slices
of their forward, backward or optimizer; sends and receives are bound by arrows; live bytes are a counter. Times are
microseconds with three digits: Perfetto keeps whole nanoseconds, and slices that nest have to nest in those. Source of
the rules: Google, "Trace Event Format"; google/perfetto ec5d16b, its JSON importer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from zerosim.device.events import Scope
from zerosim.ledger.clock import COMPUTE, Span, Timeline, Track

NS = 1e9
MODELLED = "modelled by zerosim's clock, not measured"


def chrome_trace(timeline: Timeline, device: str) -> dict[str, Any]:
    """The file's JSON. `device` is what the times are of."""
    events: list[dict[str, Any]] = []
    for rank, track in sorted(timeline.tracks.items()):
        events += _names(rank, track)
        events += [event for event in _slices(rank, track) if event["dur"]]  # not what takes less than a nanosecond
        events += _arrows(rank, track)
        events += _counter(rank, track)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"device": device, "times": MODELLED}}


def _streams(track: Track) -> list[str]:
    """Compute first, the others in the order in which they begin."""
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
        for span in spans:
            name = f"wait for {span.waits_for}" if span.waits_for else span.name
            yield _slice(rank, thread, name, span.start, span.stop, None if stream == COMPUTE else span.scope)


def _nested(rank: int, thread: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Slices that hold kernels: of a phase and micro-batch, and in them of a unit. The outer come first."""
    for (phase, slot), of_phase in groupby(spans, lambda span: (span.scope.phase, span.scope.slot)):
        inside = list(of_phase)
        name = phase if phase == "optimizer" else f"{phase} {slot}"
        yield _slice(rank, thread, name, inside[0].start, inside[-1].stop)
        for unit, of_unit in groupby(inside, lambda span: span.scope.unit):
            within = list(of_unit)
            if unit:
                yield _slice(rank, thread, unit, within[0].start, within[-1].stop)


def _slice(rank: int, thread: int, name: str, start: float, stop: float, scope: Scope | None = None) -> dict[str, Any]:
    """With a scope in its arguments where no slice around it says as much: some viewers add them to the name."""
    begin, end = round(start * NS), round(stop * NS)
    event = {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": _us(begin), "dur": _us(end - begin)}
    if scope is not None:
        event["args"] = {"unit": scope.unit, "phase": scope.phase, "micro_batch": scope.slot}
    return event


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1e3


def _arrows(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    """From where a send begins to where its receive ends, which is inside of both. They have the stream's name, which
    says who sends to whom."""
    threads = {stream: thread for thread, stream in enumerate(_streams(track))}
    for span in track.spans:
        if span.name in ("send", "recv") and span.number >= 0:
            ends = {"ph": "s"} if span.name == "send" else {"ph": "f", "bp": "e"}
            begin, end = round(span.start * NS), round(span.stop * NS)
            at = begin if span.name == "send" else max(begin, end - 1)
            flow = {"cat": "message", "name": "message", "id": f"{span.stream} {span.number}"}
            yield {**ends, **flow, "pid": rank, "tid": threads[span.stream], "ts": _us(at)}


def _counter(rank: int, track: Track) -> Iterator[dict[str, Any]]:
    """What is live at each moment; of several changes at one moment the last."""
    for seconds, of_moment in groupby(track.live, lambda pair: pair[0]):
        *_, (_, nbytes) = of_moment
        at = _us(round(seconds * NS))
        yield {"ph": "C", "name": "live bytes", "pid": rank, "tid": 0, "ts": at, "args": {"bytes": nbytes}}
