"""What is placed: weights by name, and the flat buffer that a unit's weights lie in, one after the other.

A layout of names, shapes and offsets, as each rank of a tensor-parallel group holds it; it does not depend on how many
ranks share the data, save for padding at the end of a buffer in blocks. No memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from zerosim.placement.partition import Slice


@dataclass(frozen=True, slots=True)
class Split:
    """How the group along a mesh `axis` cuts a weight of this whole `shape` along `dim`.

    `parts` equal parts of the dim, such as q|k|v side by side, are cut apart, each into `pieces` equal pieces. With
    fewer pieces than ranks, neighbours hold copies of one (heads of keys and values). `padding` is added to the end of
    the dim first, so that pieces are equal (rows of a token table).
    """

    shape: tuple[int, ...]
    dim: int
    pieces: int
    parts: int = 1
    padding: int = 0
    axis: str = "tp"

    @property
    def step(self) -> int:
        """Length of one piece of one part."""
        return (self.shape[self.dim] + self.padding) // self.parts // self.pieces

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What each rank holds."""
        return (*self.shape[: self.dim], self.parts * self.step, *self.shape[self.dim + 1 :])

    def piece(self, index: int, size: int) -> int:
        """Which piece member `index` of `size` holds."""
        return index * self.pieces // size

    def copies(self, size: int) -> int:
        """How many neighbours hold the same piece."""
        return size // self.pieces

    def windows(self, index: int, size: int) -> list[tuple[slice, slice]]:
        """For each part where it lies along `dim` in what a member holds, and in the whole; padding is left out."""
        length, step, piece = self.shape[self.dim], self.step, self.piece(index, size)
        found = []
        for part in range(self.parts):
            start = part * step * self.pieces + piece * step
            stop = min(start + step, length)
            if start < stop:
                found.append((slice(part * step, part * step + stop - start), slice(start, stop)))
        return found

    def span(self, index: int, size: int) -> tuple[int, int]:
        """Of a weight that is cut in one part: where a member's piece begins in the whole, and its length without
        padding."""
        runs = self.windows(index, size)
        return (runs[0][1].start, runs[0][1].stop - runs[0][1].start) if runs else (self.shape[self.dim], 0)

    def take(self, whole: Any, index: int, size: int) -> Any:
        """What a member holds of a whole host array; zeros where there is padding."""
        import numpy as np

        local = np.zeros(self.local_shape, whole.dtype)
        for here, there in self.windows(index, size):
            local[self._at(here)] = whole[self._at(there)]
        return local

    def put(self, local: Any, whole: Any, index: int, size: int) -> None:
        """Store what a member holds in a whole host array."""
        for here, there in self.windows(index, size):
            whole[self._at(there)] = local[self._at(here)]

    def _at(self, run: slice) -> tuple[slice, ...]:
        return (*[slice(None)] * self.dim, run)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One parameter as a rank holds it. `std` is that of its initial normals; without it, `fill` is its value.

    split      how it is cut over the group along a mesh axis; without one, every member holds all of it
    summed     members work out shares of its gradient, which are to be added (sequence parallelism)
    embedding  its rows are looked up by number: tokens' or positions'
    numel      its elements
    """

    name: str
    shape: tuple[int, ...]
    std: float | None = None
    fill: float = 0.0
    split: Split | None = None
    summed: bool = False
    embedding: bool = False
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.split is None else self.split.shape

    @property
    def in_block(self) -> bool:
        """Whether it is a block's: not the table's, the positions', the last norm's or the head's."""
        return is_block(unit_of(self.name))

    def counts(self, index: int, size: int) -> bool:
        """Whether member `index` of a group of `size` that cuts weights counts it: of copies the first one does."""
        copies = size if self.split is None else self.split.copies(size)
        return index % copies == 0

    def sharers(self, size: int) -> int:
        """How many neighbours of such a group hold shares of the same gradient; 1: it is whole."""
        if self.summed:
            return size
        return 1 if self.split is None else self.split.copies(size)


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


def is_in_block(module: str) -> bool:
    """Whether a module is a block or part of one: h.3 and h.3.mlp.c_fc."""
    return any(part.isdigit() for part in module.split("."))


def unit_of(module: str) -> str:
    """The unit that a module belongs to: h.3 of h.3.mlp.c_fc; itself outside of the blocks."""
    head, dot, tail = module.partition(".")
    while dot:
        part, dot, tail = tail.partition(".")
        head = f"{head}.{part}"
        if part.isdigit():
            return head
    return module


def is_block(name: str) -> bool:
    """Whether a unit is one of a list of equal units, such as h.3 or layers.3; the others are the root's."""
    return name.rpartition(".")[2].isdigit()


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """The weights of one flat buffer, in their order.

    `module` is what is gathered with it: a unit or, where stage 3 gathers by leaf module, such a module, each of whose
    tensors has a buffer of its own. `numel` are the buffer's elements, gaps included.

    With a `block` each weight begins at a multiple of it, and the buffer's length is a multiple of `block * members`:
    that many even slices end where blocks of one weight do. The gaps that this leaves are padding, and nobody's.
    """

    name: str
    weights: tuple[WeightSpec, ...]
    module: str = ""
    block: int = 1
    members: int = 1
    offsets: tuple[int, ...] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        block, whole = self.block, self.block * self.members
        ends = list(accumulate((-(-weight.numel // block) * block for weight in self.weights), initial=0))
        object.__setattr__(self, "module", self.module or self.name)
        object.__setattr__(self, "offsets", tuple(ends[:-1]))
        object.__setattr__(self, "numel", -(-ends[-1] // whole) * whole)

    @property
    def unit(self) -> str:
        """The unit whose weights these are."""
        return unit_of(self.module)

    @property
    def axis(self) -> str:
        """The mesh axis that cuts its weights; tp where none is cut."""
        return next((weight.split.axis for weight in self.weights if weight.split is not None), "tp")

    @property
    def num_parameters(self) -> int:
        """Elements of its weights."""
        return sum(weight.numel for weight in self.weights)

    def padding(self, part: Slice) -> int:
        """How many elements of `part` are no weight's: in gaps, or past the buffer's end."""
        if self.block == self.members == 1:  # then there are no gaps
            return part.padding
        return part.size - sum(mine.numel for mine in self.within(part))

    def gaps(self, part: Slice) -> Iterator[tuple[int, int]]:
        """Where they lie in it, as [start, stop) from its beginning."""
        if not self.padding(part):
            return
        end = 0
        for mine in self.within(part):
            if end < mine.at:
                yield end, mine.at
            end = mine.at + mine.numel
        if end < part.size:
            yield end, part.size

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
