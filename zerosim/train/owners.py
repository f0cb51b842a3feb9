"""Ranks that differ only in the buffers that they own: three programs run for all of them.

With whole-tensor owners (`--partition owner`, Muon) each rank owns other flats, so no two ranks record the same bytes.
But most of a record does not depend on owning, and the rest depends on it flat by flat. Where a program does something
for one flat, the flat takes its turn in the record (`Device.turn`). So a rank's record is spliced, turn by turn, out of
the records of a rank that owns every flat, and of one that owns none.

    owns all     a  b  c        owns none    a' b' c'        owns b    a' b  c'

This is exact if a turn depends neither on the other flats that a rank owns nor on the rank's place in its group. A
third program tells: the highest rank runs as the owner of some flats. If its record is not the splice of its events,
every rank runs. So it is where an update goes by numbers of elements, or gradients leave for the host one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, get_args

from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact
from zerosim.device.events import Alloc, Copy, CpuEvent, Event, Free, Launch, Turn
from zerosim.device.recorder import Reader
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import AXES, STATES
from zerosim.placement.owners import EveryNth, by_owner, dealt
from zerosim.placement.partition import WholeUnits
from zerosim.verbs import MESSAGES

Run = Callable[[RunConfig, Layout, int, Reader], None]
"""A function run(config, layout, rank, reader): run a rank's program, and record turns."""
Types = tuple[type, ...]
Batches = Iterator[list[Event]]
Choice = tuple[str, list[Event], list[Event]]
"""A flat's turn: the events of a rank that owns the flat, and of one that does not. The name is '' if these agree."""

PROGRAMS = 3
PROBED = 5
"""The third program's rank owns each flat of this number: a prime, so that it owns each tensor of some block."""
ID_AT = {kind: kind._fields.index(name) for kind in get_args(Event) for name in ("id", "work") if name in kind._fields}
"""The place of a buffer's or a work's id in an event."""
_BEGINS = (Alloc, Launch, Copy, CpuEvent)


def spliced(config: RunConfig, layout: Layout, ranks: Iterable[int], run: Run, unread: Types) -> dict[int, Batches]:
    """Return the records of those of `ranks` that need not run, without the `unread` events. Ids are not those of a
    program, and no device refuses a request. A ring's rank sends what its neighbours own, and an allocator's addresses
    depend on all earlier requests: then every rank runs."""
    found, alike, mesh = dict[int, Batches](), defaultdict[Hashable, list[int]](list), layout.mesh
    cuts = [row for stage in range(mesh.pp) for row, _ in layout.cuts(stage) if not row.is_whole]
    whole = all(isinstance(row.partition, WholeUnits) and row.axes == STATES for row in cuts)
    if cuts and whole and config.world.algorithm == "direct" and is_exact(config.memory):
        for rank in ranks:
            alike[tuple(mesh.index(rank, axis) for axis in AXES if axis not in STATES)].append(rank)
    for first, *others in (together for together in alike.values() if len(together) > PROGRAMS):
        owned, bare = by_owner(layout, mesh.index(first, "pp")), config.replace(capacity=None)
        if max(sum(layout.flats[name].numel for name in names) for names in owned.values()) < config.optim.sub_group:
            bare = bare.replace(sub_group=0)  # no rank's update is cut
        if (batches := _choices(bare, layout, (first, others[-1]), run, unread)) is not None:
            for rank in (first, *others):
                found[rank] = _events(batches, owned[mesh.index(rank, *STATES)], rank - first)
    return found


def _events(batches: Sequence[Sequence[Choice]], owned: Collection[str], by: int) -> Batches:
    """Yield the record of the rank `by` ranks above the one that ran, which owns these flats."""
    calls = Counter[tuple[int, ...]]()
    for batch in batches:
        events = list[Event]()
        for flat, own, other in batch:
            events += own if flat in owned else other
        yield [_moved(event, by, calls) if type(event) is Launch else event for event in events]


def _moved(call: Launch, by: int, calls: Counter[tuple[int, ...]]) -> Launch:
    """Return the same call of a rank at another place of the owners' group, `by` ranks above. A group along other axes
    moves with the rank; its collectives depend on what the rank owns, and are counted in `calls`."""
    if any(axis in STATES for axis in call.axis.split("+")):
        return call
    group, number = tuple(member + by for member in call.group), call.sequence
    if call.op not in MESSAGES:
        number = calls[group]
        calls[group] += 1
    return call._replace(group=group, sequence=number)


def _choices(
    config: RunConfig, layout: Layout, ends: tuple[int, int], run: Run, unread: Types
) -> list[list[Choice]] | None:
    """Return the choices for the ranks between two ends; None if a splice is not exact."""
    names, found, owned, place = dict[Hashable, int](), list[list[Choice]](), set[str](), layout.mesh.index
    ranks = ends[0], *ends
    readers = [_TurnReader(names, ends[0] - rank, unread) for rank in ranks]
    for reader, rank, n in zip(readers, ranks, (1, 0, PROBED), strict=True):
        shared = dealt(layout, EveryNth(place(rank, *STATES), n))
        owned = by_owner(shared, place(rank, "pp"))[place(rank, *STATES)]
        run(config, shared, rank, reader)
    for batches in zip(*(reader.batches for reader in readers), strict=True):
        if len({tuple(flat for flat, _ in batch) for batch in batches}) > 1:
            return None
        found.append([])
        for (flat, own), (_, other), (_, probed) in zip(*batches, strict=True):
            if probed != (own if flat in owned else other):
                return None
            if own == other and found[-1] and not found[-1][-1][0]:
                found[-1][-1][2].extend(other)
            else:
                found[-1].append((flat if own != other else "", own, other))
    return found if _holds_for_any_owner(found) else None


def _holds_for_any_owner(batches: Sequence[Sequence[Choice]]) -> bool:
    """Return whether each buffer and work that a turn names has begun whatever else a rank owns: in both choices of an
    earlier turn, or in the same choice of the same flat."""
    begun, always = defaultdict[tuple[str, bool], set[object]](set), set[object]()
    for flat, *choices in chain.from_iterable(batches):
        for is_own, events in zip((True, False), choices if flat else choices[1:] * 2, strict=True):
            begun[flat, is_own] |= {event[ID_AT[type(event)]] for event in events if type(event) in _BEGINS}
        always |= begun[flat, True] & begun[flat, False]
        for is_own, events in zip((True, False), choices, strict=True):
            named = {event[ID_AT[type(event)]] for event in events if type(event) in ID_AT} - {None}
            if named - always - begun[flat, is_own]:
                return False
    return True


class _TurnReader:
    """Stores a record by turns. An id becomes one that other records have too: `names` has it by the turn in which it
    began, and by its number among the like events there. Frees after the end of the program, whose order nobody sees,
    go to the turns in which their buffers began."""

    def __init__(self, names: dict[Hashable, int], by: int, unread: Types) -> None:
        self.batches: list[list[tuple[str, list[Event]]]] = []
        self._names, self._by, self._unread = names, by, unread
        self._turns, self._begun = [""], Counter[Hashable]()
        self._ids, self._born = dict[int, int](), dict[int, str]()

    def read(self, events: list[Event]) -> None:
        batch, end = [(self._turns[-1], list[Event]())], len(events)
        self.batches.append(batch)
        while end and isinstance(events[end - 1], Free) and events[end - 1].scope.step < 0:
            end -= 1
        for event in events[:end]:
            if isinstance(event, Turn):
                self._turns.append(event.flat)
                self._begun.clear()
                batch.append((event.flat, []))
            elif not isinstance(event, self._unread):
                batch[-1][1].append(self._named(event))
        ended = {flat: list[Event]() for flat in self._turns}
        for event in map(self._named, events[end:]):
            ended[self._born[event.id]].append(event)
        batch += ended.items()

    def _named(self, event: Any) -> Any:
        kind, at = type(event), ID_AT.get(type(event))
        if at is None or event[at] is None:
            return event
        if kind is Launch:
            event = _moved(event, self._by, Counter())
        if (name := self._ids.get(event[at])) is None:
            like = len(self._turns), kind, event.kind if kind is Alloc else event[2:4]
            self._begun[like] += 1
            name = self._ids[event[at]] = self._names.setdefault((*like, self._begun[like]), len(self._names))
            self._born[name] = self._turns[-1]
        return tuple.__new__(kind, (*event[:at], name, *event[at + 1 :]))
