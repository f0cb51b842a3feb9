"""Weights by name, and the flat buffer that holds a unit's weights, one after the other.

These are names, shapes and offsets, as on each rank of a tensor-parallel group. They do not depend on the number of
data-parallel ranks, except for padding at the end of a buffer in blocks. They need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zerosim.placement.block import Role
from zerosim.placement.formats import Format
from zerosim.placement.mesh import CUTS, EXPERT_CUTS, STATES
from zerosim.placement.partition import Slice
from zerosim.placement.split import CutSpec, own_suffix


@dataclass(frozen=True, slots=True)
class WeightSpec(CutSpec):
    """One parameter as a rank holds it. `std` belongs to its initial normals; without it, `fill` is its value.

    embedding  its rows are looked up by number: tokens' or positions'
    format     of its bytes, if it is stored as codes (`formats.py`); None: in the buffer's dtype
    role       what it is to its block; `reads_input`: its gradient reads its map's input (no bias's, no adapter's B)
    numel      its elements in the flat buffer
    """

    name: str
    shape: tuple[int, ...]
    std: float | None = None
    fill: float = 0.0
    embedding: bool = False
    format: Format | None = None
    role: Role | None = None
    reads_input: bool = True
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel if self.format is None else self.format.nbytes(numel))

    @property
    def own_name(self) -> str:
        """The name; of a tile, with its number; of a run of parts that is cut separately, with where it begins."""
        return self.name + own_suffix(self.splits, self.tile)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        splits = self.splits or (() if self.tile is None else (self.tile.split,))
        return splits[0].shape if splits else self.shape

    @property
    def in_block(self) -> bool:
        """Whether it belongs to a block, not to the table, the positions, the last norm or the head."""
        return is_block(unit_of(self.name))


class Overlap(NamedTuple):
    """The elements [start, stop) of weight number `which` in a slice of a flat buffer, at `at` in the slice."""

    which: int
    weight: WeightSpec
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """The weight's elements in the slice."""
        return self.stop - self.start


def is_in_block(module: str) -> bool:
    """Return whether a module is a block or inside one: h.3 and h.3.mlp.c_fc."""
    return any(part.isdigit() for part in module.split("."))


@lru_cache(maxsize=4096)
def unit_of(module: str) -> str:
    """Return a module's unit: h.3 for h.3.mlp.c_fc; the module itself outside the blocks."""
    head, dot, tail = module.partition(".")
    while dot:
        part, dot, tail = tail.partition(".")
        head = f"{head}.{part}"
        if part.isdigit():
            return head
    return module


def is_block(name: str) -> bool:
    """Return whether a unit is one of a list of equal units, such as h.3 or layers.3; the others belong to the root."""
    return name.rpartition(".")[2].isdigit()


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """The weights of one flat buffer, in their order.

    `module` is gathered together with it: a unit or, if ZeRO-3 gathers by leaf module, such a module, each of whose
    tensors has its own buffer. `numel` counts the buffer's elements, gaps included.

    With a `block` each weight begins at a multiple of it, and the buffer's length is a multiple of `block * members`:
    that many even slices end at blocks of one weight. The resulting gaps are padding, and belong to no weight.
    All of its weights are trained, or none. `axes`: those that cut its states.
    """

    name: str
    weights: tuple[WeightSpec, ...]
    module: str = ""
    block: int = 1
    members: int = 1
    is_trained: bool = True
    axes: tuple[str, ...] = STATES
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
        """The unit of these weights."""
        return unit_of(self.module)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the work of its layers, and any others that cut its weights."""
        cuts = CUTS if self.axes == STATES else EXPERT_CUTS
        return tuple(dict.fromkeys([*cuts, *[split.axis for weight in self.weights for split in weight.splits]]))

    @property
    def num_parameters(self) -> int:
        """The elements of its weights."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def scale_bytes(self) -> int:
        """The bytes of scales that are apart from its codes."""
        return sum(one.format.beside(math.prod(one.shape)) for one in self.weights if one.format is not None)

    def padding(self, part: Slice) -> int:
        """Return the padding in `part`: elements in gaps, or past the buffer's end."""
        if self.block == self.members == 1:  # then there are no gaps
            return part.padding
        return part.size - sum(mine.numel for mine in self.within(part))

    def gaps(self, part: Slice) -> Iterator[tuple[int, int]]:
        """Yield the gaps in it, as [start, stop) from its beginning."""
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
        """Yield the weights with elements in `part`, in order, without padding."""
        for which in range(len(self.weights)):
            overlap = self.overlap(part, which)
            if overlap is not None:
                yield overlap

    def overlap(self, part: Slice, which: int) -> Overlap | None:
        """Return `part`'s elements of one weight; None if it has none."""
        weight, offset = self.weights[which], self.offsets[which]
        start, stop = max(part.start, offset), min(part.stop, offset + weight.numel)
        return Overlap(which, weight, start - offset, stop - offset, start - part.start) if start < stop else None
