"""A reader of a rank's record: the buffers that each op saves for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerosim.device.events import Event, Free, Save, Scope
from zerosim.device.stretches import Repeat, Stretch


class SavedRow(NamedTuple):
    """The buffers that one op saved for its backward. A buffer is charged once, to the op that saved it first."""

    op: str
    what: str
    nbytes: int


class ActivationLedger:
    """The buffers that each unit's forward saves for its backward, op by op, in the last microbatch read.

    Rows are in the order of saving. Parameters are excluded (they are model states), and so are
    buffers that a unit dropped again before its forward ended. A block's leaf modules count as the block.
    """

    folds = True

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[int, SavedRow]] = {}
        self._moments: dict[tuple[str, str], tuple[int, int]] = {}
        self._charged: set[int] = set()

    def saved(self) -> dict[str, tuple[SavedRow, ...]]:
        """Return the saved rows by unit, in forward's order, when its forward ends."""
        return self.saved_by_phase("forward")

    def saved_again(self) -> dict[str, tuple[SavedRow, ...]]:
        """Return the rows by unit, in backward's order, that a fully recomputed unit's second forward saved."""
        return self.saved_by_phase("backward")

    def saved_by_phase(self, phase: str) -> dict[str, tuple[SavedRow, ...]]:
        return {unit: tuple(rows.values()) for (unit, during), rows in self._rows.items() if during == phase}

    def read(self, events: Iterable[Event | Repeat]) -> None:
        for event in events:
            if isinstance(event, Repeat):
                (step, phase, block, slot), stretch, ids = event[:3]
                for module, number, row in stretch.once(_saves_of):
                    if row is not None or ids[number] in self._charged:
                        self._take(Scope(step, phase, block + module, slot), ids[number], row)
            elif type(event) is Save:
                self._take(event.scope, event.id, SavedRow(event.op, event.what, event.nbytes))
            elif isinstance(event, Free) and event.id in self._charged:
                self._take(event.scope, event.id, None)

    def _take(self, scope: Scope, id: int, row: SavedRow | None) -> None:
        """Charge a buffer to the op that saved it first; without a row, a charged one is freed."""
        if row is None:
            self._charged.remove(id)
            if scope.phase == "forward" and (scope.block, "forward") in self._rows:
                self._rows[scope.block, "forward"].pop(id, None)  # dropped before its forward ended
            return
        where, moment = (scope.block, scope.phase), (scope.step, scope.slot)
        if self._moments.get(where) != moment:
            self._moments[where], self._rows[where] = moment, {}
        if id not in self._charged:
            self._charged.add(id)
            self._rows[where][id] = row


def _saves_of(stretch: Stretch) -> list[tuple[str, int, SavedRow | None]]:
    """Return the buffers that a stretch saves, with their rows, and those that it frees, by module and number."""
    return [
        (one.scope.unit, one.id, SavedRow(one.op, one.what, one.nbytes) if isinstance(one, Save) else None)
        for one in stretch.events
        if isinstance(one, (Save, Free))
    ]
