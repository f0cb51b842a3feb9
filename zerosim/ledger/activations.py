"""A reader of a rank's record: the buffers that each op saves for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerosim.device.events import Event, Free, Save
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
                here, ids = event, event.ids
                found = here.stretch.once(_saves_of)
                self.read(here.placed(one) for one in found if type(one) is Save or ids[one.id] in self._charged)
            elif type(event) is Save:
                self._save(event)
            elif isinstance(event, Free) and event.id in self._charged:
                self._charged.remove(event.id)
                scope = event.scope
                if scope.phase == "forward" and (scope.block, "forward") in self._rows:
                    self._rows[scope.block, "forward"].pop(event.id, None)  # dropped before its forward ended

    def _save(self, event: Save) -> None:
        scope = event.scope
        where, moment = (scope.block, scope.phase), (scope.step, scope.slot)
        if self._moments.get(where) != moment:
            self._moments[where], self._rows[where] = moment, {}
        if event.id not in self._charged:
            self._charged.add(event.id)
            self._rows[where][event.id] = SavedRow(event.op, event.what, event.nbytes)


def _saves_of(stretch: Stretch) -> list[Save | Free]:
    """Return the events of a stretch that this ledger reads."""
    return [event for event in stretch.events if isinstance(event, (Save, Free))]
