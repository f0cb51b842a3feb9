"""Readers of a rank's record: memory by kind and unit, what ops keep for backward, traffic. They touch no device.

Figures are exact integers in bytes. A ledger folds events as the recorder hands them over and keeps
no history; what it returns are frozen snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Mark, Refusal, Retag, Save, Scope
from zerosim.report import html

Key = TypeVar("Key")
MARKS = ("after_init", "end_of_forward", "end_of_backward", "gradients_upcast", "after_step")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Live bytes at one moment. `by_unit` is keyed by (unit, kind); `padding` is part of `by_kind`."""

    scope: Scope
    by_kind: Mapping[str, int]
    by_unit: Mapping[tuple[str, str], int]
    padding: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())

    def _repr_html_(self) -> str:
        return html.memory_html(self.by_kind, padding=self.padding)


class MemoryLedger:
    """Live bytes now, at the last of each mark, and at the highest point so far.

    `after_init` is the moment when parameters and optimizer state are placed; the other marks are
    those of the last step read. `refusal` is what was live when an allocation did not fit.
    """

    def __init__(self) -> None:
        self.marks: dict[str, Snapshot] = {}
        self.refusal: Snapshot | None = None
        self._live: dict[int, Alloc] = {}
        self._by_unit: dict[tuple[str, str], int] = {}
        self._padding: dict[str, int] = {}
        self._total = 0
        self._peak = Snapshot(Scope(), {}, {}, {})
        self._peak_bytes = 0
        self._rising: Scope | None = None  # where a peak was reached of which no snapshot was made yet

    @property
    def live_bytes(self) -> int:
        return self._total

    @property
    def live(self) -> Mapping[int, Alloc]:
        """The allocs of what is live, by id, oldest first (under its present kind)."""
        return self._live

    @property
    def peak(self) -> Snapshot:
        """The first moment at which the most bytes were live."""
        return self._peak

    def now(self, scope: Scope = Scope()) -> Snapshot:  # noqa: B008  a frozen tuple
        by_kind: dict[str, int] = {}
        for (_, kind), nbytes in self._by_unit.items():
            by_kind[kind] = by_kind.get(kind, 0) + nbytes
        return Snapshot(scope, _positive(by_kind), _positive(self._by_unit), _positive(self._padding))

    def read(self, events: list[Event]) -> None:
        """Fold events in order; the peak is kept where it first occurs."""
        for event in events:
            if isinstance(event, Kernel):  # the most frequent first: this loop is what recording costs
                continue
            if isinstance(event, Alloc):
                self._live[event.id] = event
                self._count(event, 1)
                if self._total > self._peak_bytes:
                    self._peak_bytes, self._rising = self._total, event.scope
            elif isinstance(event, Free):
                self._keep_peak()
                self._count(self._live.pop(event.id), -1)
            elif isinstance(event, Retag):
                self._keep_peak()
                before = self._live[event.id]
                after = self._live[event.id] = before._replace(kind=event.kind)
                self._count(before, -1)
                self._count(after, 1)
            elif isinstance(event, Refusal):
                self.refusal = self.now(event.scope)
            elif isinstance(event, Mark):
                self.marks[event.name] = self.now(event.scope)
        self._keep_peak()

    def _keep_peak(self) -> None:
        """A snapshot of a new peak, before anything goes: of all that leads up to it none is needed."""
        if self._rising is not None:
            self._peak, self._rising = self.now(self._rising), None

    def _repr_html_(self) -> str:
        marks = [html.memory_html(shot.by_kind, name) for name, shot in self.marks.items()]
        return html.memory_html(self.now().by_kind) + "".join(marks) + html.memory_html(self._peak.by_kind, "Peak")

    def _count(self, live: Alloc, sign: int) -> None:
        nbytes, key = sign * live.nbytes, (live.scope.unit, live.kind)
        self._total += nbytes
        self._by_unit[key] = self._by_unit.get(key, 0) + nbytes
        if live.padding_bytes:
            self._padding[live.kind] = self._padding.get(live.kind, 0) + sign * live.padding_bytes


def _positive(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in counts.items() if count}


class SavedRow(NamedTuple):
    """What one op holds for its backward. A buffer is charged once, to the op that saved it first."""

    op: str
    what: str
    nbytes: int


class ActivationLedger:
    """What each unit's forward leaves for its backward, op by op, in the last micro-batch read.

    Rows stand in the order of saving. Parameters are not among them (they are model states), nor is
    what a unit saved and dropped again before its forward ended.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[int, SavedRow]] = {}
        self._moments: dict[tuple[str, str], tuple[int, int]] = {}
        self._charged: set[int] = set()

    def saved(self) -> dict[str, tuple[SavedRow, ...]]:
        """By unit, in forward's order: what it holds when its forward ends."""
        return self.saved_by_phase("forward")

    def saved_again(self) -> dict[str, tuple[SavedRow, ...]]:
        """By unit, in backward's order: what its second forward made, where it is recomputed in full."""
        return self.saved_by_phase("backward")

    def saved_by_phase(self, phase: str) -> dict[str, tuple[SavedRow, ...]]:
        return {unit: tuple(rows.values()) for (unit, during), rows in self._rows.items() if during == phase}

    def read(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Save:
                self._save(event)
            elif type(event) is Free and event.id in self._charged:
                self._charged.remove(event.id)
                scope = event.scope
                if scope.phase == "forward" and (scope.unit, "forward") in self._rows:
                    self._rows[scope.unit, "forward"].pop(event.id, None)  # gone before its forward ended

    def _save(self, event: Save) -> None:
        scope = event.scope
        where, moment = (scope.unit, scope.phase), (scope.step, scope.slot)
        if self._moments.get(where) != moment:
            self._moments[where], self._rows[where] = moment, {}
        if event.id not in self._charged:
            self._charged.add(event.id)
            self._rows[where][event.id] = SavedRow(event.op, event.what, event.nbytes)


class TrafficRow(NamedTuple):
    """What one rank did of one kind of collective in one phase of one step.

    `payload_bytes` is the size of the whole logical tensors, summed over calls; sent and received
    are what crossed this rank's links, None where an engine's own collective does not tell (then
    `modelled_bytes` is a ring's). `purpose` is 'states', 'control' (norms and overflow flags) or 'staging':
    messages of a GPU that passed through the host's memory, 'device to host' and 'host to device'. `axis` is the
    mesh axis of the group, several joined with '+'; '' for staging.
    """

    step: int
    phase: str
    op: str
    dtype: str
    purpose: str
    axis: str
    calls: int
    payload_bytes: int
    sent_bytes: int | None
    received_bytes: int | None
    modelled_bytes: int | None = None

    @property
    def wire_bytes(self) -> int:
        """What was sent or, where that was not seen, what a ring would have sent."""
        return (self.sent_bytes or 0) if self.modelled_bytes is None else self.modelled_bytes


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


class CommLedger:
    """Traffic by (step, phase, operation, dtype, purpose, axis)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, str, str, str, str], TrafficRow] = {}

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Copy):
                self._stage(event)
            elif isinstance(event, Launch):
                key = (event.scope.step, event.scope.phase, event.op, event.dtype, event.purpose, event.axis)
                row = self._rows.get(key) or TrafficRow(*key, 0, 0, 0, 0)
                self._rows[key] = TrafficRow(
                    *key,
                    row.calls + 1,
                    row.payload_bytes + event.payload_bytes,
                    _sum(row.sent_bytes, event.sent_bytes),
                    _sum(row.received_bytes, event.received_bytes),
                    None if event.modelled_bytes is None else (row.modelled_bytes or 0) + event.modelled_bytes,
                )

    def _stage(self, event: Copy) -> None:
        key = (event.scope.step, event.scope.phase, f"{event.source} to {event.target}", "bytes", "staging", "")
        row = self._rows.get(key) or TrafficRow(*key, 0, 0, 0, 0)
        self._rows[key] = row._replace(calls=row.calls + 1, payload_bytes=row.payload_bytes + event.nbytes)

    def rows(self) -> list[TrafficRow]:
        """In the order in which each first occurred."""
        return list(self._rows.values())

    def _repr_html_(self) -> str:
        return html.traffic_html(self.rows())
