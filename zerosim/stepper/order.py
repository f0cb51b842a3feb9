"""The order in which ranks are stepped, unless the caller names one.

The rank that went last goes on until it waits for others. Then the lowest rank that can go does; so too when every rank
is waiting at the next collective. No rank begins a new step before all have ended the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerosim.device.events import Event, Launch


class Order:
    """`pending` is, by rank, its next event; None for a rank that waits for others or has finished."""

    def __init__(self, ranks: int) -> None:
        self.turn = 0  # the rank whose turn it is, if it can go
        self._has_begun = [False] * ranks  # its first step
        self._joined = [0] * ranks  # how many collectives

    def note(self, rank: int, event: Event) -> None:
        """Note that an event of that rank happens now."""
        self.turn = rank
        self._has_begun[rank] = self._has_begun[rank] or event.scope.step >= 0
        self._joined[rank] += isinstance(event, Launch)

    def step_of(self, rank: int, event: Event) -> float:
        """Return the step of a coming event: initialization is part of the first step, events after the last step are
        in none."""
        if event.scope.step >= 0:
            return event.scope.step
        return math.inf if self._has_begun[rank] else 0

    def next_rank(self, pending: Sequence[Event | None]) -> int | None:
        """Return the rank whose event comes next: of the ranks in the earliest step the one that went last, else the
        lowest."""
        able = self._earliest(pending)
        is_on = self.turn in able and self.late(pending, max(self._joined))
        return self.turn if is_on else min(able, default=None)

    def next_collective(self, pending: Sequence[Event | None]) -> int:
        """Return the number of the first collective that no rank has joined and at which not all ranks are waiting
        yet."""
        number = max(self._joined)
        return number if self.late(pending, number) else number + 1

    def late(self, pending: Sequence[Event | None], number: int) -> list[int]:
        """Return the ranks that have not come to their collective of that number, counted from 0."""
        return [
            rank
            for rank, event in enumerate(pending)
            if self._joined[rank] < number or (self._joined[rank] == number and not isinstance(event, Launch))
        ]

    def next_late(self, pending: Sequence[Event | None], number: int) -> int | None:
        """Return the rank whose event brings all nearer to that collective: the lowest of those that have not come to
        it.

        If all of them wait for others, return the lowest rank that can go; None if no rank is late, or none can go.
        """
        late = self.late(pending, number)
        able = self._earliest([event if rank in late else None for rank, event in enumerate(pending)])
        return min(able or self._earliest(pending), default=None) if late else None

    def _earliest(self, pending: Sequence[Event | None]) -> list[int]:
        """Return the ranks in the earliest step, of those that can go."""
        steps = {rank: self.step_of(rank, event) for rank, event in enumerate(pending) if event is not None}
        first = min(steps.values(), default=0)
        return [rank for rank, step in steps.items() if step == first]
