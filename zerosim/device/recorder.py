"""Collects the events of one rank, and hands them to its readers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import ref

from zerosim.device.events import Event, Free, Scope
from zerosim.device.stretches import Repeat, one_by_one


class Reader(Protocol):
    """Folds events into a ledger, in order. A reader with a true attribute `folds` gets stretches too (`stretches.py`),
    others get each of their events."""

    def read(self, events: list[Event]) -> None: ...


class Recorder:
    """Collects one rank's events and hands them to its readers.

    Readers are fed in batches (`drain`, once a step), so a long run keeps its ledgers but not
    its history. With `keep` the drained events stay in `history`.

    The recorder also learns when an owner of bytes dies (`watch`): a weak reference's callback puts the death into a
    queue. The next event, drain or change of scope records it first (`settle`), as if it had been recorded at once.
    The callback is the deque's own `append`. Python runs a signal's handler only between bytecodes, and `append` has
    none, so Ctrl-C cannot interrupt it. It could interrupt a `__del__`. Python ignores exceptions of a destructor: then
    the interrupt would be lost, and the `Free` with it.
    """

    def __init__(self, readers: tuple[Reader, ...] = (), *, keep: bool = False, enabled: bool = True) -> None:
        self.history: list[Event] = []
        self.readers = readers
        self.keep = keep
        self.enabled = enabled
        self.where = Scope()  # the device's, for deaths
        self.release: Callable[[int, str], None] = lambda id, memory: None  # its allocator takes back dead bytes
        self._events: list[Any] = []
        self.owners: dict[ref[object], tuple[int, str]] = {}  # and the id and memory of each owner's bytes
        self.dead: deque[ref[object]] = deque()  # owners that have died, in order
        self.bury = self.dead.append

    @property
    def events(self) -> list[Event]:
        """The events recorded since the last drain."""
        self.settle()
        return self._events

    def add(self, event: Event) -> None:
        if self.dead:
            self.settle()
        if self.enabled:
            self._events.append(event)

    def put(self, event: Event) -> None:
        """Add an event without the deaths since the last event."""
        if self.enabled:
            self._events.append(event)

    def repeat(self, repeat: Repeat) -> None:
        """Add a stretch, without the deaths since the last event."""
        if self.enabled:
            self._events.append(repeat)

    def again(self, events: Iterable[Event | Repeat]) -> None:
        """Add what happens again, without the deaths since the last event."""
        if self.enabled:
            self._events += events

    def watch(self, owner: object, id: int, memory: str) -> None:
        """Record the end of `id` when `owner` dies."""
        self.owners[ref(owner, self.bury)] = id, memory

    def settle(self) -> None:
        """Record the deaths since the last event, in order."""
        dead, owners = self.dead, self.owners
        while dead:
            id, memory = owners.pop(dead.popleft())
            self.release(id, memory)
            self.put(tuple.__new__(Free, (self.where, id, memory)))  # half the time of Free(self.where, id, memory)

    def drain(self) -> None:
        """Feed the collected events to the readers, then forget them (or keep them)."""
        self.settle()
        self.feed()

    def feed(self) -> None:
        """Feed readers, without the deaths since the last event. Only here stretches become single events."""
        events, self._events = self._events, []
        folding = [getattr(reader, "folds", False) for reader in self.readers]
        single = list(one_by_one(events)) if self.keep or not all(folding) else []
        for reader, folds in zip(self.readers, folding, strict=True):
            reader.read(events if folds else single)
        if self.keep:
            self.history.extend(single)
