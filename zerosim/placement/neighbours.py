"""hpZ's partition (ZeRO++, arXiv 2306.10209): even slices, of which each member holds several neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zerosim.placement.partition import Slice, shares, slice_size


@dataclass(frozen=True, slots=True)
class NeighbouringSlices:
    """Every buffer is cut into `pieces` slices for each member; a member holds neighbouring ones."""

    pieces: int

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        step = slice_size(numels[which], size * self.pieces) * self.pieces
        return Slice(index * step, (index + 1) * step, numels[which])

    def padded(self, numel: int, size: int) -> int:
        return slice_size(numel, size * self.pieces) * size * self.pieces

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        return list(zip(*(self._held(numel, size) for numel in dict.fromkeys(numels)), strict=True)) or [None] * size

    def _held(self, numel: int, size: int) -> list[int]:
        """Return the elements of each member's part that are not padding."""
        slices, count = shares(numel, size * self.pieces), self.pieces
        return [sum(slices[at : at + count]) for at in range(0, len(slices), count)]
