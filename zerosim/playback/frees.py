"""The moments at which ranks free gathered parameters and whole gradients, with a sentence for each.

ZeRO is about these copies: every rank frees its copy, and keeps its local shard. A copy that another one of the same
buffer outlives is left out: of two uses' gradients Python frees the second when it has been added to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Event, Free, Retag
from zerosim.placement.layout import Layout
from zerosim.placement.memories import DEVICE

COPIES: Mapping[str, str] = {Kind.UNSHARDED_PARAM: "param", Kind.PREFETCHED_PARAM: "param", Kind.UNSHARDED_GRAD: "grad"}
"""Kinds of copies that a ZeRO stage frees, with the state that they are of."""
_WORDS = {"param": "gathered parameters", "grad": "whole gradient"}
_PARTS = {2: "half", 3: "third", 4: "quarter"}


@dataclass(slots=True)
class _Copy:
    kind: str
    nbytes: int
    flat: str
    unit: str


class Frees:
    """The copies that ranks free, in the order of the page's events."""

    def __init__(self, layout: Layout, units: Mapping[str, Sequence[str]], ranks: Sequence[int]) -> None:
        self.layout, self.units, self.ranks = layout, units, ranks
        self._live: dict[tuple[int, int], _Copy] = {}
        self._turns: Counter[tuple[int, str, str, str]] = Counter()
        self._found: dict[tuple[object, ...], list[tuple[int, int, int, str]]] = {}  # event, rank, bytes and what

    def add(self, at: int, rank: int, event: Event, flat: str | None) -> None:
        """Read the page's event number `at`. `flat`: the flat buffer that an allocation is of."""
        match event:
            case Alloc(memory=memory) if memory == DEVICE and flat is not None:
                self._live[rank, event.id] = _Copy(event.kind, event.nbytes, flat, event.scope.unit)
            case Retag() if (copy := self._live.get((rank, event.id))) is not None:
                copy.kind = event.kind
            case Free(memory=memory) if memory == DEVICE:
                copy = self._live.pop((rank, event.id), None)
                if copy is not None and copy.nbytes and copy.kind in COPIES:
                    self._free(at, rank, event, copy)

    def groups(self) -> list[tuple[list[int], str, list[str]]]:
        """Return the frees that belong together: the events of all ranks that free a unit's copy, a sentence for them
        together, and what each of the events frees."""
        return [
            ([at for at, *_ in group], self._sentence(group), [what for *_, what in group])
            for group in self._found.values()
        ]

    def _free(self, at: int, rank: int, event: Free, copy: _Copy) -> None:
        state = COPIES[copy.kind]
        row = self.layout.rows(copy.flat).get(state)
        others = (one for (other, _), one in self._live.items() if other == rank)
        if row is None or row.is_whole or any((one.flat, one.kind) == (copy.flat, copy.kind) for one in others):
            return
        stage = self.layout.mesh.index(rank, "pp")
        sizes = [part.stop - part.start for part in self.layout.parts(stage, copy.flat, state)]
        share = _PARTS.get(len(sizes), f"1/{len(sizes)}") if len({*sizes}) == 1 else "local shard"
        unit = event.scope.unit if copy.flat in self.units.get(event.scope.unit, ()) else copy.flat
        what = f"{copy.nbytes:,} B of {unit}'s {_WORDS[state]}" + (f" and keeps its {share}" if len(sizes) > 1 else "")
        own = (rank, copy.kind, copy.unit, copy.flat)
        self._turns[own] += 1
        self._found.setdefault((stage, *own[1:], self._turns[own]), []).append((at, rank, copy.nbytes, what))

    def _sentence(self, group: Sequence[tuple[int, int, int, str]]) -> str:
        ranks = [rank for _, rank, _, _ in group]
        stage = self.layout.mesh.index(ranks[0], "pp")
        peers = [rank for rank in self.ranks if self.layout.mesh.index(rank, "pp") == stage]
        of_stage = f" of pipeline stage {stage}" if len(peers) < len(self.ranks) else ""
        who = f"Each rank{of_stage}" if len(ranks) == len(peers) else f"Rank {ranks[0]}"
        if 1 < len(ranks) < len(peers):
            who = f"Each of the ranks {', '.join(map(str, ranks))}"
        most = max(group, key=lambda one: one[2])
        return f"{who} frees {'' if len({one[2] for one in group}) == 1 else 'up to '}{most[3]}."
