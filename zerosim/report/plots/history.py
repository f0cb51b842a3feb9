"""Live bytes by kind over time, from one rank's events: numbers only, no drawing.

Time is the order of events. If a picture cannot show all moments, each of its columns keeps two real ones, that with
the most bytes and that with the fewest, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zerosim.device.events import Alloc, Event, Free, Retag, Scope
from zerosim.errors import InputError, wrong
from zerosim.placement.memories import DEVICE

COLUMNS = 1200


@dataclass(frozen=True, slots=True)
class Span:
    """Events `start` to `end` (exclusive), counted from the first shown one, in one phase or unit."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most bytes were live: after event `index`, in `scope`."""

    index: int
    nbytes: int
    scope: Scope


@dataclass(frozen=True, slots=True)
class History:
    """`live[k, i]` bytes of `kinds[k]` are live from event `at[i]` up to `at[i + 1]`."""

    kinds: tuple[str, ...]
    num_events: int
    at: Any
    live: Any
    peak: Peak
    phases: tuple[Span, ...]
    units: tuple[Span, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, those of the drawn moments."""
        scope = self.peak.scope
        return {
            "num_events": self.num_events,
            "at": self.at.tolist(),
            "live_bytes": {kind: row.tolist() for kind, row in zip(self.kinds, self.live, strict=True)},
            "peak": {"event": self.peak.index, "bytes": self.peak.nbytes, **scope._asdict()},
            "phases": [[span.name, span.start, span.end] for span in self.phases],
        }


class InTime(NamedTuple):
    """`live[k, i]` bytes of `kinds[k]` are live from `seconds[i]` on."""

    kinds: tuple[str, ...]
    seconds: Any
    live: Any


def read_history(events: Sequence[Event], step: int | None = None, columns: int = COLUMNS) -> History:
    """Read live bytes over one step, or over all events if `step` is None.

    `events` begin when the rank does, so that buffers allocated before the step count. Raises: InputError if the step
    has no events, or the beginning is missing.
    """
    inside = [index for index, event in enumerate(events) if step is None or event.scope.step == step]
    if not inside:
        steps = sorted({event.scope.step for event in events if event.scope.step >= 0})
        known = f"{steps[0]} to {steps[-1]}" if steps else "none, for the record is empty"
        raise wrong("step", f" {step}: no events of it: expected one of {known}, recorded with keep_events")
    first, last = inside[0], inside[-1] + 1
    kinds, live = live_after(events[:last])
    shown = events[first:last]
    before, live = live[:, first : first + 1], live[:, first + 1 :]
    totals = live.sum(axis=0)
    top = int(totals.argmax())
    kept = in_columns(totals, np.arange(len(totals)), columns)
    return History(
        kinds=kinds,
        num_events=len(shown),
        at=np.concatenate([[0], kept + 1]),
        live=np.concatenate([before, live[:, kept]], axis=1),
        peak=Peak(top, int(totals[top]), shown[top].scope),
        phases=_spans([event.scope.phase for event in shown]),
        units=_spans([event.scope.unit for event in shown]),
    )


def live_after(events: Sequence[Event]) -> tuple[tuple[str, ...], Any]:
    """Return live bytes of each kind (K, E + 1): before the first event, then after each."""
    live: dict[int, tuple[str, int]] = {}
    changes: list[tuple[str, int, int]] = []  # kind, event, bytes
    for index, event in enumerate(events):
        if getattr(event, "memory", DEVICE) != DEVICE:
            continue
        nbytes = event.nbytes if isinstance(event, Alloc) else 0
        if isinstance(event, (Free, Retag)):
            if event.id not in live:
                raise InputError(f"event {index} is of buffer {event.id}, not allocated before: give the whole record")
            kind, nbytes = live.pop(event.id)
            changes.append((kind, index, -nbytes))
        if isinstance(event, (Alloc, Retag)):
            live[event.id] = event.kind, nbytes
            changes.append((event.kind, index, nbytes))
    rows = {kind: row for row, kind in enumerate(dict.fromkeys(kind for kind, _, _ in changes))}
    counts = np.zeros((max(len(rows), 1), len(events) + 1), np.int64)
    for kind, index, nbytes in changes:
        counts[rows[kind], index + 1] += nbytes
    return tuple(rows) or ("none",), counts.cumsum(axis=1)


def in_columns(totals: Any, at: Any, columns: int) -> Any:
    """Return which moments to draw: all, or of each column the highest and the lowest, in their order. `at` rises."""
    if len(totals) <= 2 * columns:
        return np.arange(len(totals))
    edges = np.searchsorted(at, np.linspace(at[0], at[-1] + 1e-12, columns + 1))
    kept: set[int] = {0, len(totals) - 1}
    for start, end in pairwise(edges):
        if start < end:
            kept.add(int(start) + int(totals[start:end].argmax()))
            kept.add(int(start) + int(totals[start:end].argmin()))
    return np.array(sorted(kept))


def live_in_time(events: Sequence[Event], seconds: Sequence[float], step: int, columns: int = COLUMNS) -> InTime:
    """Return live bytes by kind over one step in time. `seconds` are the moments of its allocations and frees on the
    device, in order."""
    inside = [
        at
        for at, event in enumerate(events)
        if isinstance(event, Alloc | Free) and event.memory == DEVICE and event.scope.step == step
    ]
    kinds, live = live_after(events[: inside[-1] + 1])
    live = live[:, np.array(inside) + 1]
    kept = in_columns(live.sum(axis=0), np.array(seconds), columns)
    return InTime(kinds, np.array(seconds)[kept], live[:, kept])


def _spans(names: Sequence[str]) -> tuple[Span, ...]:
    """Return runs of the same name."""
    starts = [at for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    return tuple(Span(names[start], start, end) for start, end in zip(starts, [*starts[1:], len(names)], strict=True))
