"""The most bytes that pass through a unit on a rank: the scale of the page's activations."""

from __future__ import annotations

from collections import Counter

from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Event, Free
from zerosim.placement.memories import DEVICE

PASSING = (Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.KEPT, Kind.TEMP, Kind.COMM)
"""Kinds of bytes that no model state holds."""


class Passing:
    """Live bytes of these kinds by rank and unit, and their maximum."""

    def __init__(self) -> None:
        self.most = 1
        self._live: dict[tuple[int, int], tuple[str, int]] = {}  # units and bytes, by rank and id
        self._sums = Counter[tuple[int, str]]()

    def add(self, rank: int, event: Event) -> None:
        """Read an event of a rank."""
        if isinstance(event, Alloc) and event.memory == DEVICE and event.kind in PASSING:
            unit = event.scope.unit
            self._live[rank, event.id] = unit, event.nbytes
            self._sums[rank, unit] += event.nbytes
            self.most = max(self.most, self._sums[rank, unit])
        elif isinstance(event, Free) and event.memory == DEVICE and (rank, event.id) in self._live:
            unit, nbytes = self._live.pop((rank, event.id))
            self._sums[rank, unit] -= nbytes
