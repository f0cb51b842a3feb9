"""A reader of a rank's record: its traffic, by step, phase, operation, dtype, purpose and axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.device.events import Copy, Event, Launch
from zerosim.device.stretches import Repeat, Stretch

SAVE = "save"
"""The phase of a save."""


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

    @property
    def saves(self) -> bool:
        """Whether it is a save's, and no part of the step."""
        return self.phase == SAVE


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


class CommLedger:
    """Traffic by (step, phase, operation, dtype, purpose, axis)."""

    folds = True

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # a row's last five fields by the others

    def read(self, events: Sequence[Event | Repeat]) -> None:
        for event in events:
            if type(event) is Repeat:  # faster than isinstance, and most events are none of these
                step, phase = event.scope[:2]
                for what, more in event.stretch.once(_counts_of):
                    self._add((step, phase, *what), more)
            elif type(event) is Launch:
                what = event.op, event.dtype, event.purpose, event.axis
                self._add((*event.scope[:2], *what), (1, event.payload_bytes, *event[9:12]))
            elif type(event) is Copy:
                way = f"{event.source} to {event.target}"
                self._add((*event.scope[:2], way, "bytes", event.purpose, ""), (1, event.nbytes, 0, 0, None))

    def _add(self, key: tuple[Any, ...], more: tuple[Any, ...]) -> None:
        had = self._counts.get(key)
        if had is not None:
            modelled = None if more[4] is None else (had[4] or 0) + more[4]
            more = had[0] + more[0], had[1] + more[1], _sum(had[2], more[2]), _sum(had[3], more[3]), modelled
        self._counts[key] = more

    def rows(self) -> list[TrafficRow]:
        """Return the rows in the order of their first occurrence."""
        return [TrafficRow(*key, *counts) for key, counts in self._counts.items()]


def _counts_of(stretch: Stretch) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return a stretch's traffic, by a row's fields without step and phase."""
    ledger = CommLedger()
    ledger.read(stretch.events)
    return [(key[2:], counts) for key, counts in ledger._counts.items()]
