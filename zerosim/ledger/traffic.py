"""A reader of a rank's record: its traffic, by step, phase, operation, dtype, purpose and axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerosim.device.events import Copy, Event, Launch
from zerosim.device.stretches import Repeat, Stretch


class TrafficRow(NamedTuple):
    """One rank's traffic of one kind of collective in one phase of one step.

    `payload_bytes` is the size of the whole logical tensors, summed over calls; sent and received
    bytes crossed this rank's links. They are None for a library's own collective, which does not report them (then
    `modelled_bytes` is a ring's). `purpose` is 'states' (with an optimizer's sums), 'activations' (of tp and
    pp), 'control' (norms and overflow flags), or for copies between a rank's own memories, 'device to host' and 'host
    to device': 'staging' for messages of a GPU that pass through the host, and 'offload' for data stored there until
    its use. Copies have a payload and send nothing. `axis` is the mesh axis of the group, several joined with '+'; ''
    for copies.
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
        """The bytes sent or, if not observed, the bytes that a ring would send."""
        return (self.sent_bytes or 0) if self.modelled_bytes is None else self.modelled_bytes


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


class CommLedger:
    """Traffic by (step, phase, operation, dtype, purpose, axis)."""

    folds = True

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, str, str, str, str], TrafficRow] = {}

    def read(self, events: Sequence[Event | Repeat]) -> None:
        for event in events:
            if isinstance(event, Repeat):
                for row in event.stretch.once(_rows_of):
                    self._add(row._replace(step=event.scope.step, phase=event.scope.phase))
            elif isinstance(event, Launch):
                what = event.op, event.dtype, event.purpose, event.axis
                self._add(TrafficRow(*event.scope[:2], *what, 1, event.payload_bytes, *event[9:12]))
            elif isinstance(event, Copy):
                way = f"{event.source} to {event.target}"
                self._add(TrafficRow(*event.scope[:2], way, "bytes", event.purpose, "", 1, event.nbytes, 0, 0))

    def _add(self, more: TrafficRow) -> None:
        key = more[:6]
        row = self._rows.get(key) or TrafficRow(*key, 0, 0, 0, 0)
        self._rows[key] = TrafficRow(
            *key,
            row.calls + more.calls,
            row.payload_bytes + more.payload_bytes,
            _sum(row.sent_bytes, more.sent_bytes),
            _sum(row.received_bytes, more.received_bytes),
            None if more.modelled_bytes is None else (row.modelled_bytes or 0) + more.modelled_bytes,
        )

    def rows(self) -> list[TrafficRow]:
        """Return the rows in the order of their first occurrence."""
        return list(self._rows.values())


def _rows_of(stretch: Stretch) -> list[TrafficRow]:
    """Return a stretch's traffic."""
    ledger = CommLedger()
    ledger.read(stretch.events)
    return ledger.rows()
