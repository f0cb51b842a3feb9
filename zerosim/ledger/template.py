"""A stretch's entries for the clock, found once and placed at each repeat.

Some of them depend on earlier entries: products that `tp_overlap.py` may still move, and kernels that continue an
earlier entry, because sums of seconds depend on the order. All others are the same each time, except for their scopes,
works and calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from zerosim.device.events import Launch, Scope, Wait
from zerosim.device.stretches import Repeat
from zerosim.ledger.entries import Busy, Entry


class Template(NamedTuple):
    """The entries of a stretch in one phase, each with the number of its scope's module and its fields after the second
    one. Their works are numbers of the pass. Several kernels as one entry have no name. The entries' parts end at these
    places:

    head     single kernels and calls, to put in order after earlier entries
    body     entries that follow in this order, with the kernels of one module as one entry
    arrival  a wait that is left for later entries, before products that are (None: head leaves what it leaves)

    first: the kernels of body's first entry, which may continue an earlier entry; gathers: works of the stretch's
    gathers.
    """

    modules: Sequence[str]
    entries: Sequence[tuple[Entry, int, tuple[Any, ...]]]
    head: int
    body: int
    arrival: int | None
    first: Sequence[Busy]
    gathers: Collection[int]

    def placed(self, repeat: Repeat) -> list[Entry]:
        """Return the entries as they are in this repeat."""
        step, phase, block, slot = repeat.scope
        ids, found, new = repeat.ids, list[Entry](), tuple.__new__  # half the time of _make
        scopes = [new(Scope, (step, phase, block + module, slot)) for module in self.modules]
        for entry, module, rest in self.entries:
            scope = scopes[module]
            if isinstance(entry, Busy):
                found.append(new(Busy, (scope, entry.name or scope.unit, *rest)))
            elif isinstance(entry, Wait):
                found.append(new(Wait, (scope, ids[entry.work], entry.by)))
            elif isinstance(entry, Launch):
                group, first = repeat.calls[entry.group[0]]
                found.append(new(Launch, (scope, ids[entry.work], *rest[:4], group, first + entry.sequence, *rest[6:])))
            else:
                found.append(entry._replace(scope=scope))  # a copy
        return found
