"""A reader of a rank's record: its traffic, by step, phase, operation, dtype, purpose and axis."""

from __future__ import annotations

from typing import NamedTuple

from zerosim.device.events import Copy, Event, Launch


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

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, str, str, str, str], TrafficRow] = {}

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Copy):
                self._copy(event)
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

    def _copy(self, event: Copy) -> None:
        key = (event.scope.step, event.scope.phase, f"{event.source} to {event.target}", "bytes", event.purpose, "")
        row = self._rows.get(key) or TrafficRow(*key, 0, 0, 0, 0)
        self._rows[key] = row._replace(calls=row.calls + 1, payload_bytes=row.payload_bytes + event.nbytes)

    def rows(self) -> list[TrafficRow]:
        """Return the rows in the order of their first occurrence."""
        return list(self._rows.values())
