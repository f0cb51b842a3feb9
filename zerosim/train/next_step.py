"""A step of a plan that is the step before it again.

States are made in a plan's first step, so the second step is the first one like all later ones. On shapes the program
does in it what it did before, without making states. So a `NextStep` records the second step out of the record of the
first, and the program does not run again.

    a buffer that outlived the step takes the place of one like it that the step freed
    events that made the optimizer's states are left out, and collectives count on

Where the record cannot tell the next step, the program runs: where the step ended with other buffers than it began
with, besides states; where a buffer is replaced before its predecessor is freed; where work is still in flight; and
where the device has too little memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact
from zerosim.config.parts.compression import goes_on
from zerosim.config.parts.delayed import is_delayed
from zerosim.config.parts.paging import moves_pages
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.device.events import Alloc, Copy, Event, Free, Kernel, Launch, Mark, Message, Retag, Save, Scope, Wait
from zerosim.device.memory import Exact
from zerosim.device.stretches import Repeat, Stretch
from zerosim.ledger.memory import MemoryLedger
from zerosim.optim.control import StepControl
from zerosim.placement.memories import DEVICE, NVME
from zerosim.verbs import MESSAGES

Line = tuple[tuple[int, ...], bool]
"""The members of a group that count their calls together, and whether these are messages between two."""
Live = Mapping[tuple[str, int], Alloc]
"""The live buffers by memory and id."""
AS_THEY_ARE = (Kernel, Wait, Copy, Message, Mark)
"""The most frequent events, which change nothing but their step."""


def steps_are_alike(config: RunConfig, skipped: Collection[int]) -> bool:
    """Return whether a plan's steps do the same, save for states that the first one makes: no step overflows, updates
    wait for no other step, and neither an allocator's blocks nor a warmup depend on earlier steps."""
    return not (
        skipped
        or is_delayed(config.grads)
        or moves_pages(config.memory)
        or not is_exact(config.memory)
        or goes_on(config.reduction)
        or OPTIMIZERS[config.optim.optimizer].estimates_every
    )


class NextStep:
    """The record of a rank's last step, and of the next one. It reads the device's events, as `ledger` does."""

    folds = True

    def __init__(self, device: Device, ledger: MemoryLedger) -> None:
        self.device, self.ledger = device, ledger
        self._began: Live | None = None  # before the last step
        self._events: Sequence[Event | Repeat] = []
        device.recorder.readers += (self,)

    def read(self, events: Sequence[Event | Repeat]) -> None:
        """Keep the record of a step."""
        self._events = events

    def recorded(self, control: StepControl) -> bool:
        """Record the next step, and decide it as the last one. Return False, and record nothing, where the program has
        to run."""
        if self._began is None:
            self.device.recorder.drain()  # what was placed before the first step is no part of it
        ledgers = {DEVICE: self.ledger, **self.ledger.others}
        live = {(memory, id): alloc for memory, one in ledgers.items() for id, alloc in one.live.items()}
        events = None if self._began is None else self._next(self._began, live)
        self._began = live
        if events is None or (norm := control.reports[-1].grad_norm) is None:
            return False
        control.decide(norm * control.reports[-1].loss_scale)
        self.device.recorder.again(events)
        return True

    def _next(self, began: Live, live: Live) -> list[Any] | None:
        """Return the next step's record, if the last one's tells it."""
        heirs, calls = _heirs(began, live), _calls(self._events)
        if heirs is None or calls is None or _in_flight(self._events) or not self._fits(began):
            return None
        return _again(self._events, heirs, calls)

    def _fits(self, began: Live) -> bool:
        """Return whether the device has room for the most bytes of the next step."""
        allocator = self.device.allocator
        if allocator.capacity is None:
            return True
        assert isinstance(allocator, Exact)
        sizes = {id: alloc.nbytes for (memory, id), alloc in began.items() if memory == DEVICE}
        highest = total = 0
        for event in self._events:
            if isinstance(event, Repeat):
                highest, total = max(highest, total + event.stretch.highest), total + event.stretch.nbytes
            elif isinstance(event, Alloc) and event.memory == DEVICE and not event.name:
                sizes[event.id] = event.nbytes
                total += event.nbytes
                highest = max(highest, total)
            elif isinstance(event, Free) and event.memory == DEVICE:
                total -= sizes.pop(event.id, 0)
        return allocator.fits(highest)


def _heirs(began: Live, live: Live) -> dict[int, int] | None:
    """Return, for each buffer that the step freed, the buffer like it that outlived the step; None where the step ended
    with other buffers than it began with, besides states."""
    lasting = defaultdict[tuple[Any, ...], deque[int]](deque)
    for (memory, id), alloc in live.items():
        if (memory, id) not in began and not alloc.name:
            lasting[memory, alloc.scope.unit, alloc[2:]].append(id)
    found = dict[int, int]()
    for (memory, id), alloc in began.items():
        if (memory, id) not in live:
            like = lasting[memory, alloc.scope.unit, alloc[2:]]
            if not like:
                return None
            found[id] = like.popleft()
    return None if any(lasting.values()) else found


def _calls(events: Sequence[Event | Repeat]) -> dict[Line, int] | None:
    """Return the number of a step's calls on each line; None where the line's calls do not count together."""
    following, calls = dict[Line, int](), Counter[Line]()
    for event in events:
        if isinstance(event, Repeat):
            counted = [(event.calls[line], is_message, more) for line, is_message, more in event.stretch.once(_lines)]
            placed = [((group, is_message), first, more) for (group, first), is_message, more in counted]
        elif isinstance(event, Launch):
            placed = [((event.group, event.op in MESSAGES), event.sequence, 1)]
        else:
            continue
        for line, first, more in placed:
            if following.get(line, first) != first:
                return None
            following[line] = first + more
            calls[line] += more
    return calls


def _lines(stretch: Stretch) -> list[tuple[int, bool, int]]:
    """Return a stretch's lines of calls: the line's number, whether its calls are messages, how many there are."""
    found = {event.group[0]: event.op in MESSAGES for event in stretch.events if isinstance(event, Launch)}
    return [(line, is_message, stretch.calls[line]) for line, is_message in found.items()]


def _in_flight(events: Sequence[Event | Repeat]) -> set[int]:
    """Return the step's works that nobody has waited for."""
    found = set[int]()
    for event in events:
        if isinstance(event, Repeat):
            launched, waited = event.stretch.once(_works)
            found.update([event.ids[number] for number in launched])
            found.difference_update([event.ids[number] for number in waited])
        elif isinstance(event, (Launch, Copy)) and event.work is not None:
            found.add(event.work)
        elif isinstance(event, Wait):
            found.discard(event.work)
    return found


def _works(stretch: Stretch) -> tuple[list[int], list[int]]:
    """Return the numbers of the works that a stretch launches, and of those it waits for."""
    launched = [one.work for one in stretch.events if isinstance(one, Launch)]
    return launched, [one.work for one in stretch.events if isinstance(one, Wait)]


def _again(events: Sequence[Event | Repeat], heirs: Mapping[int, int], calls: Mapping[Line, int]) -> list[Any] | None:
    """Return a step's record as the next step's; None where a buffer is replaced before its predecessor is freed."""
    found: list[Any] = []
    replaced, freed, states, fills, before, scope = set(heirs.values()), set[int](), set[int](), 0, Scope(), Scope()
    for event in events:
        if event.scope is not before:
            before = event.scope
            scope = before._replace(step=before.step + 1)
        kind = type(event)
        if kind in AS_THEY_ARE and not fills:
            found.append(tuple.__new__(kind, (scope, *event[1:])))  # half the time of _replace
            continue
        if isinstance(event, Alloc) and event.name:
            states.add(event.id)
            fills += event.memory != NVME
            continue
        if fills and isinstance(event, Kernel) and event.name == "fill":
            fills -= 1
            continue
        if fills:
            return None
        if isinstance(event, Repeat):
            placed = list(event.calls)
            for line, is_message, _ in event.stretch.once(_lines):
                group, first = placed[line]
                placed[line] = group, first + calls[group, is_message]
            found.append(Repeat(scope, *event[1:4], placed))
        elif isinstance(event, Launch):
            more = calls[event.group, event.op in MESSAGES]
            found.append(event._replace(scope=scope, sequence=event.sequence + more))
        elif isinstance(event, (Alloc, Free, Retag, Save)) and (event.id in heirs or event.id in replaced):
            if isinstance(event, Alloc) and event.id not in freed:
                return None
            id = heirs.get(event.id, event.id)
            if isinstance(event, Free):
                freed.add(id)
            found.append(event._replace(scope=scope, id=id))
        elif isinstance(event, (Free, Retag, Save)) and event.id in states:
            return None
        else:
            found.append(tuple.__new__(kind, (scope, *event[1:])))
    return None if fills else found
