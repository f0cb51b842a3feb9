"""What is placed: weights by name, and the flat buffer that a unit's weights lie in, one after the other.

A layout of names, shapes and offsets that does not depend on how many ranks there are. No memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from zerosim.placement.partition import Slice


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter. `std` is that of its initial normals; without it, `fill` is its value."""

    name: str
    shape: tuple[int, ...]
    std: float | None = None
    fill: float = 0.0

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class Overlap(NamedTuple):
    """What of a part of a flat buffer is weight number `which`: its elements [start, stop), at `at` in the part."""

    which: int
    weight: WeightSpec
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Elements of the weight that the part holds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """The weights of one flat buffer, in their order."""

    name: str
    weights: tuple[WeightSpec, ...]
    offsets: tuple[int, ...] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        ends = list(accumulate((weight.numel for weight in self.weights), initial=0))
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "numel", ends[-1])

    def within(self, part: Slice) -> Iterator[Overlap]:
        """The weights of which `part` holds elements, in their order. Padding is nobody's."""
        for which in range(len(self.weights)):
            overlap = self.overlap(part, which)
            if overlap is not None:
                yield overlap

    def overlap(self, part: Slice, which: int) -> Overlap | None:
        """What `part` holds of one weight; None for nothing."""
        weight, offset = self.weights[which], self.offsets[which]
        start, stop = max(part.start, offset), min(part.stop, offset + weight.numel)
        return Overlap(which, weight, start - offset, stop - offset, start - part.start) if start < stop else None
