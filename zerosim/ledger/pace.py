"""A reader of a rank's record that keeps what the clock needs: how long its kernels take, and what it waits for.

Kernels that follow one another in one scope are one entry. In `detail` each is one, and so is what becomes live or is
freed, for pictures and traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Scope, Wait
from zerosim.device.work import MATMUL
from zerosim.ledger.costs import Costs, is_captured
from zerosim.ledger.entries import Busy, Entry, Live
from zerosim.ledger.side_stream import beside
from zerosim.ledger.tp_overlap import overlapped

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
        entries = self._entries(events)
        if self.costs.chunks > 1:
            entries = overlapped(entries, self.costs.chunks)
        if self.costs.side_stream:
            entries = beside(entries)
        for entry in entries:
            self._add(entry)

    def _entries(self, events: Sequence[Event]) -> Iterator[Entry]:
        """One for each kernel."""
        for event in events:
            if self.detail and isinstance(event, (Alloc, Free)):
                self._count(event)
                if event.scope.step == self.step:
                    yield Live(event.scope, self._live)
            if event.scope.step != self.step:
                continue
            if isinstance(event, Kernel):
                if event.work is None:  # a collective's own sums are part of it
                    yield self._busy(event)
            elif isinstance(event, (Launch, Wait)) or (isinstance(event, Copy) and event.purpose == "offload"):
                yield event

    def _count(self, event: Alloc | Free) -> None:
        """What is live is known from the beginning of the record, the moments are those of the step."""
        if isinstance(event, Alloc):
            self._sizes[event.id] = event.nbytes
            self._live += event.nbytes
        else:
            self._live -= self._sizes.pop(event.id)

    def _busy(self, kernel: Kernel) -> Busy:
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
        return Busy(kernel.scope, kernel.name, seconds, flops, forward, 1, launch, launch + seconds)

    def _add(self, entry: Entry) -> None:
        last = self.entries[-1] if self.entries else None
        if self.detail or not isinstance(entry, Busy):
            self.entries.append(entry)
        elif isinstance(last, Busy) and last.scope == entry.scope:
            self.entries[-1] = last.then(entry)
        else:
            self.entries.append(entry._replace(name=entry.scope.unit))
