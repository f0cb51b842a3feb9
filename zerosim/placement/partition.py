"""Three rules for a group member's slice of a flat buffer.

Whole        every member holds all of it
EvenSlices   N equal slices, the last ones padded (ZeRO's implementations)
WholeUnits   a unit belongs to one member (the wording of the ZeRO paper, section 5)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Slice:
    """The slice [start, stop) of a flat buffer, in elements; elements past `numel` are padding.

    Gaps between weights are padding too, which `FlatSpec.padding` counts.
    """

    start: int
    stop: int
    numel: int

    @property
    def size(self) -> int:
        """The number of elements, padding included."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """The number of elements past the buffer's end."""
        return self.stop - max(self.start, min(self.stop, self.numel))


class Partition(Protocol):
    """Cuts flat buffers of these sizes, in elements, over a group. A pure rule, which compares by value."""

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        """Return member `index` of `size`'s slice of buffer `which`."""
        ...

    def padded(self, numel: int, size: int) -> int:
        """Return the elements of a whole buffer, padding included."""
        ...

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        """Return a key for each member, equal for members whose slices have the same sizes and padding."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Every member holds all of every buffer."""

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        return whole(numels[which])

    def padded(self, numel: int, size: int) -> int:
        return numel

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        return [None] * size


@dataclass(frozen=True, slots=True)
class EvenSlices:
    """Every buffer is cut into slices of one length, one for each member in order."""

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        return slice_of(numels[which], index, size)

    def padded(self, numel: int, size: int) -> int:
        return slice_size(numel, size) * size

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        return list(zip(*(shares(numel, size) for numel in dict.fromkeys(numels)), strict=True)) or [None] * size


@dataclass(frozen=True, slots=True)
class WholeUnits:
    """Assigns units by size, the largest first, each to the member with the fewest elements so far."""

    def part(self, numels: Sequence[int], which: int, index: int, size: int) -> Slice:
        is_owner = self.owner(numels, which, size) == index
        return whole(numels[which]) if is_owner else nothing(numels[which])

    def padded(self, numel: int, size: int) -> int:
        return numel

    def kinds(self, numels: Sequence[int], size: int) -> Sequence[Hashable]:
        owned: list[list[int]] = [[] for _ in range(size)]
        for which, owner in enumerate(assign_owners(tuple(numels), size)):
            owned[owner].append(which)
        return [tuple(units) for units in owned]

    def owner(self, numels: Sequence[int], which: int, size: int) -> int:
        """Return the member that holds buffer `which`."""
        return assign_owners(tuple(numels), size)[which]


def slice_size(numel: int, world_size: int) -> int:
    """Return the elements of each rank's slice: numel / N, rounded up."""
    return -(-numel // world_size)


def shares(numel: int, size: int) -> list[int]:
    """Return the elements of each member's slice without padding: ceil(numel / size), or the remainder.

    A member also adds this many elements in an all-reduce of `numel`.
    """
    step = slice_size(numel, size)
    whole_slices, rest = divmod(numel, step) if step else (size, 0)
    return ([step] * whole_slices + [rest] + [0] * size)[:size]


def slice_of(numel: int, rank: int, world_size: int) -> Slice:
    """Return the rank's slice of `numel` elements. The last slices may be partly or wholly padding."""
    size = slice_size(numel, world_size)
    return Slice(rank * size, (rank + 1) * size, numel)


def whole(numel: int) -> Slice:
    """Return the slice of all `numel` elements."""
    return Slice(0, numel, numel)


def nothing(numel: int) -> Slice:
    """Return the empty slice of `numel` elements."""
    return Slice(0, 0, numel)


@lru_cache(maxsize=64)
def assign_owners(sizes: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Assign owners: the largest buffer first, each to the rank with the fewest elements, the lowest of several."""
    load = [0] * world_size
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += sizes[index]
    return tuple(owners)
