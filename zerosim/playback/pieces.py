"""The pieces of a collective: in which round who sends whom which chunk, of which flat buffers.

As `comm/algorithms/ring.py` and `direct.py` send them: a test compares each rank's pieces with the messages recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerosim.device.events import Launch
from zerosim.dtypes import dtype
from zerosim.placement.layout import Layout
from zerosim.playback.order import call_of

MOST_MEMBERS = 16
"""A page draws the shards of groups of up to this number of ranks."""


class Hop(NamedTuple):
    """A chunk's way between two members of a group. `parts`: how many members' gradients it has added up."""

    round: int
    source: int
    target: int
    chunk: int
    parts: int = 1


def hops(op: str, algorithm: str, n: int, root: int = 0) -> list[Hop]:
    """Return the hops of a collective among n members; none for an algorithm that the page does not draw."""
    members = range(n)
    if algorithm not in ("ring", "direct") or n > MOST_MEMBERS:
        return []
    ring, last = algorithm == "ring", max(0, n - 1)
    match op:
        case "all_gather" if ring:
            return [Hop(step, at, (at + 1) % n, (at - step) % n) for step in range(last) for at in members]
        case "all_gather":
            return [Hop(0, at, to, at) for at in members for to in members if to != at]
        case "reduce_scatter" if ring:
            return [
                Hop(step, at, (at + 1) % n, (at - 1 - step) % n, step + 1) for step in range(last) for at in members
            ]
        case "reduce_scatter":
            return [Hop(0, at, to, to) for at in members for to in members if to != at]
        case "all_reduce":
            scatter, gather = (hops(half, algorithm, n) for half in ("reduce_scatter", "all_gather"))
            return scatter + [hop._replace(round=hop.round + (last if ring else 1)) for hop in gather]
        case "broadcast" if ring:
            return [Hop(step, (root + step) % n, (root + step + 1) % n, root) for step in range(last)]
        case "broadcast":
            return [Hop(0, root, to, root) for to in members if to != root]
        case "reduce" if ring:
            return [Hop(step, (root + step + 1) % n, (root + step + 2) % n, root, step + 1) for step in range(last)]
        case "reduce":
            return [Hop(0, at, root, root) for at in members if at != root]
    return []


def root_of(op: str, group: Sequence[int], joined: Mapping[int, Launch]) -> int:
    """Return the place of a broadcast's source or of a reduction's destination: it receives, or sends, nothing."""
    idle = (rank for rank, one in joined.items() if not (one.received_bytes if op == "broadcast" else one.sent_bytes))
    return group.index(next(idle, group[0]))


class Joined:
    """The calls of model states that ranks joined, and of which flat buffers they are."""

    def __init__(self, layout: Layout, units: Mapping[str, Sequence[str]]) -> None:
        self.layout, self.units = layout, units
        self._of: dict[int, dict[int, Launch]] = {}  # by call and rank
        self._alike: dict[tuple[object, ...], list[int]] = {}  # calls without a unit that only their order tells apart

    def add(self, call: int, rank: int, launch: Launch) -> None:
        """Note that a rank joined."""
        if launch.purpose == "states" and launch.op not in ("send", "recv"):
            if rank == launch.group[0]:
                self._alike.setdefault(self._likeness(launch), []).append(call)
            self._of.setdefault(call, {})[rank] = launch

    def travels(self) -> dict[int, tuple[list[Hop], str, list[str]]]:
        """Return each call's hops, the state that travels, and its flat buffers, where these are known."""
        found = {}
        for call, joined in self._of.items():
            launch = next(iter(joined.values()))
            op, _, group, _ = call_of(launch)
            state = "param" if op in ("all_gather", "broadcast") else "grad"
            flats = [name for name in self._flats(call, launch) if self._is_cut(name, state, group)]
            if flats and (ways := hops(op, launch.algorithm, len(group), root_of(op, group, joined))):
                found[call] = ways, state, flats
        return found

    def _likeness(self, launch: Launch) -> tuple[object, ...]:
        return (launch.op, launch.axis, launch.group, launch.scope, launch.payload_bytes)

    def _flats(self, call: int, launch: Launch) -> Sequence[str]:
        """Return the unit's flat buffers, or those of a pipeline stage: the only one, the one that the payload fits, or
        all if they are the payload together."""
        mesh = self.layout.mesh
        stage = self.layout.stages[mesh.index(launch.group[0], "pp")]
        names = [name for name in self.units.get(launch.scope.unit, stage) if name in stage]
        if launch.scope.unit and len(names) == 1:
            return names
        sizes = {name: self._padded(name) * dtype(launch.dtype).itemsize for name in names}
        fit = [name for name, size in sizes.items() if size == launch.payload_bytes]
        alike = self._alike.get(self._likeness(launch), [])
        if len(fit) == len(alike) and call in alike:
            last_first = launch.op in (
                "reduce_scatter",
                "all_reduce",
                "reduce",
            )  # backward goes through units in reverse
            return [fit[::-1][alike.index(call)] if last_first else fit[alike.index(call)]]
        return names if not fit and sum(sizes.values()) == launch.payload_bytes else []

    def _parts(self, name: str, state: str) -> list[int]:
        stage = next(stage for stage, names in enumerate(self.layout.stages) if name in names)
        return [part.stop for part in self.layout.parts(stage, name, state)]

    def _padded(self, name: str) -> int:
        return max(max(self._parts(name, state)) for state in self.layout.rows(name))

    def _is_cut(self, name: str, state: str, group: tuple[int, ...]) -> bool:
        """Return whether a call's members are the ranks that share a state's parts, each with one of them."""
        rows = self.layout.rows(name)
        cut = {one: row for one, row in rows.items() if not row.is_whole and len(self._parts(name, one)) == len(group)}
        row = rows.get(state) if state in cut or not cut else next(iter(cut.values()))
        return row is not None and tuple(self.layout.mesh.group(group[0], *row.axes)) == group
