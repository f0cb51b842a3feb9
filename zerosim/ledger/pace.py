"""A reader of a rank's record that keeps what the clock needs: how long its kernels take, and what it waits for.

Kernels that follow one another in one scope are one entry, unless each is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Phase
from zerosim.device.events import Copy, Event, Kernel, Launch, Scope, Wait
from zerosim.device.work import MATMUL
from zerosim.ledger.costs import kernel_seconds


class Busy(NamedTuple):
    """The device computes for so many seconds. `flops` are those of products; `forward_flops` those of a forward."""

    scope: Scope
    name: str
    seconds: float
    flops: int
    forward_flops: int


Entry = Busy | Launch | Wait | Copy


class PaceLedger:
    """The entries of one step. `each_kernel`: they are not put together, and have their names."""

    def __init__(self, cluster: Cluster, *, step: int = 0, each_kernel: bool = False) -> None:
        self.cluster, self.step, self.each_kernel = cluster, step, each_kernel
        self.entries: list[Entry] = []

    def read(self, events: Sequence[Event]) -> None:
        """Fold events in order."""
        for event in events:
            if event.scope.step != self.step:
                continue
            if isinstance(event, Kernel):
                if event.work is None:  # a collective's own sums are part of it
                    self._add(event)
            elif isinstance(event, Launch | Wait) or (isinstance(event, Copy) and event.purpose == "offload"):
                self.entries.append(event)

    def _add(self, kernel: Kernel) -> None:
        seconds = kernel_seconds(kernel, self.cluster)
        flops = kernel.flops if kernel.engine == MATMUL else 0
        forward = flops if kernel.scope.phase == Phase.FORWARD.value else 0
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Busy) and last.scope == kernel.scope and not self.each_kernel:
            self.entries[-1] = Busy(
                last.scope, last.name, last.seconds + seconds, last.flops + flops, last.forward_flops + forward
            )
        else:
            name = kernel.name if self.each_kernel else kernel.scope.unit
            self.entries.append(Busy(kernel.scope, name, seconds, flops, forward))
