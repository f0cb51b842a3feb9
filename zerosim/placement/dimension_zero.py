"""FSDP2's partition: each tensor is cut along dimension 0, and padded so that every rank has as many rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zerosim.placement.partition import EvenSlices, Slice, shares, slice_size


@dataclass(frozen=True, slots=True)
class RowSlices(EvenSlices):
    """One tensor is cut between rows of `row` elements into slices of equally many rows, as fully_shard cuts dimension
    0. With fewer rows than members some members have nothing but padding, for which they have no optimizer states."""

    row: int = 1

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        step = self.padded(numels[which], size) // size
        return Slice(index * step, (index + 1) * step, numels[which])

    def padded(self, numel: int, size: int) -> int:
        return slice_size(numel, self.row * size) * self.row * size

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        return list(zip(*(shares(numel // self.row, size) for numel in dict.fromkeys(numels)), strict=True))
