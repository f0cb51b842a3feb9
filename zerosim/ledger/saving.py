"""A reader of a rank's record: what a save of its state took, in bytes and, with costs, in seconds of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerosim.device.events import Alloc, Copy, Event, Free, Launch
from zerosim.device.stretches import Repeat
from zerosim.ledger.costs import Costs
from zerosim.ledger.traffic import SAVE
from zerosim.placement.memories import DEVICE, HOST, NVME


@dataclass(slots=True)
class SaveCounts:
    """One save on one rank.

    written, read    bytes to the node's drives and, of states that lie there, from them
    to_host          bytes that leave the device
    sent, received   bytes over the rank's links; for native collectives, those that a ring would send
    most             by memory, the most bytes at once that the save itself holds there
    largest          the largest single copy to the drives
    gathers          seconds of its collectives, by the given costs
    """

    written: int = 0
    read: int = 0
    to_host: int = 0
    sent: int = 0
    received: int = 0
    largest: int = 0
    gathers: float = 0.0
    most: dict[str, int] = field(default_factory=dict)

    @property
    def host(self) -> int:
        return self.most.get(HOST, 0)

    @property
    def device(self) -> int:
        return self.most.get(DEVICE, 0)


class SaveLedger:
    """The saves of a rank, by step."""

    folds = True

    def __init__(self, costs: Costs | None = None) -> None:
        self.saves: dict[int, SaveCounts] = {}
        self._costs = costs
        self._live: dict[int, tuple[str, int]] = {}
        self._total: dict[str, int] = {}

    @property
    def last(self) -> SaveCounts:
        """The last save; nothing was counted without one."""
        return self.saves[max(self.saves)] if self.saves else SaveCounts()

    def read(self, events: Sequence[Event | Repeat]) -> None:
        """Fold events in order. A copy that is written beside later steps is freed in one of them, or in the next
        save."""
        for event in events:
            if type(event) is Free:
                if event.id in self._live:
                    memory, nbytes = self._live.pop(event.id)
                    self._total[memory] -= nbytes
            elif event.scope[1] == SAVE:
                self._count(event, self.saves.setdefault(event.scope.step, SaveCounts()))

    def _count(self, event: Event | Repeat, one: SaveCounts) -> None:
        if type(event) is Alloc:
            self._live[event.id] = event.memory, event.nbytes
            total = self._total[event.memory] = self._total.get(event.memory, 0) + event.nbytes
            one.most[event.memory] = max(total, one.most.get(event.memory, 0))
        elif type(event) is Launch:
            one.sent += event.wire_bytes
            one.received += event.received_bytes if event.received_bytes is not None else event.wire_bytes
            if self._costs is not None and event.payload_bytes:
                one.gathers += self._costs.collective(event)
        elif type(event) is Copy and event.purpose != "staging":
            if event.target == NVME:
                one.written += event.nbytes
                one.largest = max(one.largest, event.nbytes)
            elif event.source == NVME:
                one.read += event.nbytes
            elif event.source == DEVICE:
                one.to_host += event.nbytes
