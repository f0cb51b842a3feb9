"""A reader of a rank's record that keeps what the clock needs: how long its kernels take, and what it waits for.

Kernels that follow one another in one scope are one entry. In `detail` each is one, and so is what becomes live or is
freed, for pictures and traces.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Scope, Wait
from zerosim.device.work import MATMUL
from zerosim.ledger.costs import Costs, is_captured
from zerosim.ledger.entries import Busy, Entry, Live

FORWARD = Phase.FORWARD.value


class PaceLedger:
    """The entries of one step."""

    def __init__(self, costs: Costs, *, step: int = 0, detail: bool = False) -> None:
        self.costs, self.step, self.detail = costs, step, detail
        self.entries: list[Entry] = []
        self._times: dict[tuple[object, ...], tuple[float, float]] = {}  # of a kernel and of its launch, by its work
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._graphs: dict[Scope, float] = {}  # what is left of the launch of a block's CUDA graph

    def read(self, events: Sequence[Event]) -> None:
        """Fold events in order."""
        for event in events:
            if self.detail and isinstance(event, (Alloc, Free)):
                self._count(event)
            if event.scope.step != self.step:
                continue
            if isinstance(event, Kernel):
                if event.work is None:  # a collective's own sums are part of it
                    self._add(event)
            elif isinstance(event, (Launch, Wait)) or (isinstance(event, Copy) and event.purpose == "offload"):
                self.entries.append(event)

    def _count(self, event: Alloc | Free) -> None:
        """What is live is known from the beginning of the record, the moments are those of the step."""
        if isinstance(event, Alloc):
            self._sizes[event.id] = event.nbytes
            self._live += event.nbytes
        else:
            self._live -= self._sizes.pop(event.id)
        if event.scope.step == self.step:
            self.entries.append(Live(event.scope, self._live))

    def _add(self, kernel: Kernel) -> None:
        work = kernel[1:]
        times = self._times.get(work)
        if times is None:
            times = self._times[work] = self.costs.kernel(kernel), self.costs.launch(kernel)
        seconds, launch = times
        if self.costs.graph and is_captured(kernel.scope):
            left = self._graphs.get(kernel.scope, self.costs.graph)
            launch = min(launch, left)
            self._graphs[kernel.scope] = left - launch
        flops = kernel.flops if kernel.engine == MATMUL else 0
        forward = flops if kernel.scope.phase == FORWARD else 0
        last = self.entries[-1] if self.entries else None
        name = kernel.name if self.detail else kernel.scope.unit
        busy = Busy(kernel.scope, name, seconds, flops, forward, 1, launch, launch + seconds)
        if isinstance(last, Busy) and last.scope == kernel.scope and not self.detail:
            self.entries[-1] = last.then(busy)
        else:
            self.entries.append(busy)
