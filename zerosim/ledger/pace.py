"""A reader of a rank's record for the clock: the times of its kernels, and its waits.

Consecutive kernels in one scope form one entry. With `detail` each kernel has its own entry, and so has each allocation
and free, for pictures and traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Copy, CpuEvent, Event, Free, Kernel, Launch, Scope, Wait
from zerosim.device.stretches import Repeat, Stretch
from zerosim.device.work import MATMUL
from zerosim.ledger.costs import Costs, is_captured
from zerosim.ledger.entries import Busy, Entry, Live
from zerosim.ledger.side_stream import beside
from zerosim.ledger.tp_overlap import overlapped
from zerosim.placement.memories import DEVICE

FORWARD, BACKWARD = Phase.FORWARD.value, Phase.BACKWARD.value
FORWARD_PRODUCTS = ("linear", "attention_scores", "attention_values", "flash_attention")
"""Products of forward. In backward they are recomputed."""
FLASH_BACKWARD, FLASH_GRADS, FLASH_PRODUCTS = "flash_attention_backward", 4, 5
"""FlashAttention's backward computes four products for gradients, and recomputes the scores."""


class PaceLedger:
    """The entries of one step."""

    def __init__(self, costs: Costs, *, step: int = 0, detail: bool = False) -> None:
        self.costs, self.step, self.detail = costs, step, detail
        self.entries: list[Entry] = []
        # seconds of a kernel and of its launch, by its work
        self._times: dict[tuple[object, ...], tuple[float, float]] = {}
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._graphs: dict[Scope, float] = {}  # the rest of the launch time of a block's CUDA graph
        self.folds = not (detail or costs.graph)  # moments are not the same each time, nor what is left for a graph

    def read(self, events: Sequence[Event | Repeat]) -> None:
        """Fold events in order."""
        entries = self._entries(events)
        if self.costs.chunks > 1:
            entries = overlapped(entries, self.costs.chunks)
        if self.costs.side_stream:
            entries = beside(entries)
        for entry in entries:
            self._add(entry)

    def _entries(self, events: Sequence[Event | Repeat]) -> Iterator[Entry]:
        """Return one entry for each kernel, and those of a stretch as they were found once."""
        for event in events:
            if self.detail and isinstance(event, (Alloc, Free)) and event.memory == DEVICE:
                self._count(event)
                if event.scope.step == self.step:
                    yield Live(event.scope, self._live)
            if event.scope.step != self.step:
                continue
            if isinstance(event, Repeat):
                yield from self._repeated(event)
            elif isinstance(event, Kernel):
                if event.work is None:  # a collective's own sums are part of it
                    yield self._busy(event)
            elif isinstance(event, (Launch, Wait, CpuEvent)) or (
                isinstance(event, Copy) and event.purpose != "staging"
            ):
                yield event

    def _repeated(self, repeat: Repeat) -> Iterator[Entry]:
        (step, phase, block, slot), scope, module = repeat.scope, repeat.scope, ""
        for entry in repeat.stretch.once(_entries_of, self.costs, phase):
            if isinstance(entry, (Launch, Wait)):
                placed = repeat.placed(entry)
                assert isinstance(placed, (Launch, Wait))
                yield placed
                continue
            if entry.scope.unit != module:
                module = entry.scope.unit
                scope = Scope(step, phase, block + module, slot)
            yield type(entry)._make((scope, *entry[1:]))  # a kernel, or a copy

    def _count(self, event: Alloc | Free) -> None:
        """Count live bytes from the beginning of the record, but report only the step's moments."""
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
        if self.costs.graph and is_captured(kernel.scope) and kernel.place == DEVICE:
            left = self._graphs.get(kernel.scope, self.costs.graph)
            launch = min(launch, left)
            self._graphs[kernel.scope] = left - launch
        launch = launch if kernel.place == DEVICE else 0.0
        flops = kernel.flops if kernel.engine == MATMUL else 0
        return Busy(
            kernel.scope, kernel.name, seconds, flops, model_flops(kernel), 1, launch, launch + seconds, kernel.place
        )

    def _add(self, entry: Entry) -> None:
        last = self.entries[-1] if self.entries else None
        if self.detail or not isinstance(entry, Busy):
            self.entries.append(entry)
        elif isinstance(last, Busy) and (last.scope, last.place) == (entry.scope, entry.place):
            self.entries[-1] = last.then(entry)
        else:
            self.entries.append(entry._replace(name=entry.scope.unit))


def _entries_of(stretch: Stretch, costs: Costs, phase: str) -> list[Entry]:
    """Return a stretch's entries. The first kernels may continue an earlier entry, and are added to it one by one, as
    sums of seconds depend on the order. Later kernels in one scope are one entry, unless they may be moved."""
    pace = PaceLedger(costs, step=-1)
    each = list(pace._entries([event._replace(scope=event.scope._replace(phase=phase)) for event in stretch.events]))
    if costs.chunks > 1 or costs.side_stream:
        return each
    for entry in each:
        pace._add(entry)
    first = pace.entries[0] if pace.entries else None
    apart = first.kernels if isinstance(first, Busy) else 0
    return [*each[:apart], *pace.entries[apart > 0 :]]


def model_flops(kernel: Kernel) -> int:
    """Count a product's flops that the model itself needs: those of forward, and of gradients in backward."""
    if kernel.engine != MATMUL:
        return 0
    if kernel.scope.phase == BACKWARD and kernel.name not in FORWARD_PRODUCTS:
        return kernel.flops * FLASH_GRADS // FLASH_PRODUCTS if kernel.name == FLASH_BACKWARD else kernel.flops
    return kernel.flops if kernel.scope.phase == FORWARD else 0
