"""A reader of a rank's record for the clock: the times of its kernels, and its waits.

Consecutive kernels in one scope form one entry. With `detail` each kernel has its own entry, and so has each allocation
and free, for pictures and traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, takewhile

from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Copy, CpuEvent, Event, Free, Kernel, Launch, Scope, Wait
from zerosim.device.stretches import Repeat, Stretch
from zerosim.device.work import GROUPED, LINEAR, MATMUL, OF_LINEAR
from zerosim.ledger.costs import Costs, is_captured
from zerosim.ledger.entries import Busy, Entry, Live, goes_on
from zerosim.ledger.side_stream import beside
from zerosim.ledger.template import Template
from zerosim.ledger.tp_overlap import Overlap, overlapped
from zerosim.placement.memories import DEVICE

OTHERS = (Repeat, Launch, Wait, Copy, CpuEvent)
READ = frozenset({Kernel, *OTHERS})
BLOCK = "h.0"
"""Any block: a template's entries are found in it."""
FORWARD, BACKWARD, SAVE = Phase.FORWARD.value, Phase.BACKWARD.value, Phase.SAVE.value
FORWARD_PRODUCTS = (
    LINEAR,
    *(name for name, plain in OF_LINEAR.items() if plain == LINEAR),
    *(GROUPED, "attention_scores", "attention_values", "flash_attention"),
)
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
        entries, order = self._entries(events), Overlap(self.costs.chunks)
        if self.costs.side_stream:
            single = chain.from_iterable(map(self._one_by_one, entries))
            for entry in beside(overlapped(single, self.costs.chunks)):
                self._add(entry)
            return
        for event in entries:
            if isinstance(event, Repeat):
                self._fold(event, order)
            else:
                self._take((event,), order)
        for entry in order.rest():
            self._add(entry)

    def _entries(self, events: Iterable[Event | Repeat]) -> Iterator[Entry | Repeat]:
        """Return the step's stretches, and one entry for each kernel."""
        detail, its = self.detail, self.step
        for event in events:
            if detail and isinstance(event, (Alloc, Free)) and event.memory == DEVICE:
                self._count(event)
                if event.scope.step == its:
                    yield Live(event.scope, self._live)
            if type(event) not in READ:  # faster than isinstance
                continue
            step, phase, _, _ = event.scope
            if step != its or phase == SAVE:  # the step has ended
                continue
            if isinstance(event, Kernel):
                if event.work is None:  # a collective's own sums are part of it
                    yield self._busy(event)
            elif isinstance(event, OTHERS) and not (isinstance(event, Copy) and event.purpose == "staging"):
                yield event

    def _one_by_one(self, entry: Entry | Repeat) -> Sequence[Entry]:
        return self._template(entry, ()).placed(entry) if isinstance(entry, Repeat) else (entry,)

    def _fold(self, repeat: Repeat, order: Overlap) -> None:
        """Fold a stretch's entries as they were found once."""
        ids, known = repeat.ids, order.gathers
        awaited = [number for number in repeat.stretch.once(_awaited) if ids[number] in known] if known else ()
        template = self._template(repeat, awaited)
        placed, (_, _, head, body, arrival, first, gathers) = template.placed(repeat), template
        if head:
            self._take(placed[:head], order)
        last = self.entries[-1] if self.entries else None
        if first and goes_on(last, placed[head]):
            self.entries[-1] = last.then(*first)
            head += 1
        self.entries += placed[head:body]
        if arrival is not None:
            order.arrival, order.run = placed[body:arrival], placed[arrival:]
        known.update([ids[number] for number in gathers])

    def _template(self, repeat: Repeat, gathers: Iterable[int]) -> Template:
        return repeat.stretch.once(_template_of, self.costs, repeat.scope.phase, *gathers)

    def _take(self, entries: Iterable[Entry], order: Overlap) -> None:
        for entry in entries:
            for now in order.take(entry):
                self._add(now)

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
        elif goes_on(last, entry):
            self.entries[-1] = last.then(entry)
        else:
            self.entries.append(entry._replace(name=entry.scope.unit))


def _template_of(stretch: Stretch, costs: Costs, phase: str, *gathers: int) -> Template:
    """Return a stretch's template. `gathers` are the earlier gathers among the works that it waits for."""
    pace, order, at = PaceLedger(costs, step=-1), Overlap(costs.chunks, gathers), 0
    scopes = (event.scope._replace(phase=phase, unit=BLOCK + event.scope.unit) for event in stretch.events)
    events = [event._replace(scope=scope) for event, scope in zip(stretch.events, scopes, strict=True)]
    each = [entry for entry in pace._entries(events) if not isinstance(entry, Repeat)]
    if costs.chunks > 1:
        at = next((at for at, one in enumerate(each, 1) if order.settles(one)), len(each))
    if costs.side_stream:
        at = len(each)
    for entry in each[:at]:
        order.take(entry)
    rest = [now for entry in each[at:] for now in order.take(entry)]
    for entry in rest:
        pace._add(entry)
    first = [entry for entry in takewhile(lambda entry: goes_on(rest[0], entry), rest) if isinstance(entry, Busy)]
    joined = [entry._replace(name="") if isinstance(entry, Busy) else entry for entry in pace.entries]
    left = [order.arrival, order.run] if at < len(each) else []
    parts = [each[:at], joined, *left]
    modules = dict[str, int]()
    entries = [
        (entry, modules.setdefault(entry.scope.unit.removeprefix(BLOCK), len(modules)), entry[2:])
        for entry in chain.from_iterable(parts)
    ]
    head, body, *arrival = accumulate(map(len, parts))
    gathered = order.gathers.difference(gathers)
    return Template([*modules], entries, head, body, arrival[0] if left else None, first, gathered)


def _awaited(stretch: Stretch) -> list[int]:
    """Return the numbers of earlier works for which a stretch waits."""
    begun = {event.work for event in stretch.events if isinstance(event, Launch)}
    return [event.work for event in stretch.events if isinstance(event, Wait) and event.work not in begun]


def model_flops(kernel: Kernel) -> int:
    """Count a product's flops that the model itself needs: those of forward, and of gradients in backward."""
    if kernel.engine != MATMUL:
        return 0
    if kernel.scope.phase == BACKWARD and kernel.name not in FORWARD_PRODUCTS:
        return kernel.flops * FLASH_GRADS // FLASH_PRODUCTS if kernel.name == FLASH_BACKWARD else kernel.flops
    return kernel.flops if kernel.scope.phase == FORWARD else 0
