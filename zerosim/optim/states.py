"""An optimizer's states, by weight: which weights have numbers in an array of states, and where.

A rank has a slice of a flat buffer, and so an array of states has numbers of several weights, one after the other.
With these places a rank's arrays are taken apart by weight, assembled (`placement/assemble.py`), and cut for another
number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Literal, NamedTuple

from zerosim.dtypes import DType
from zerosim.placement.formats import DYNAMIC8
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, Overlap, WeightSpec
from zerosim.placement.split import Split

Follows = Literal["elements", "blocks", "rows", "columns"]
Of = Callable[[WeightSpec], bool]


class StateArray(NamedTuple):
    """One array of states, zeroed before step 1: its name (PyTorch's), its elements, and the padding among them.

    follows  what a weight has a number for: its elements, its quantisation blocks, its rows or its columns. A rank with
             any piece of a matrix, or of a stack of them, has the numbers of all its rows and columns
    of       returns whether a weight has numbers here. Without it all have, where the slice has their elements
    paged    whether it is in pages of the driver (`device/paging.py`)
    """

    name: str
    numel: int
    dtype: DType
    padding: int = 0
    follows: Follows = "elements"
    of: Of | None = None
    paged: bool = False

    def numbers(self, mine: Overlap) -> tuple[int, int]:
        """Return which of a weight's numbers belong to a slice of it, as [start, stop)."""
        if self.follows == "elements":
            return mine.start, mine.stop
        if self.follows == "blocks":
            return mine.start // DYNAMIC8.block, DYNAMIC8.blocks(mine.stop)
        *stack, rows, columns = mine.weight.shape
        return 0, prod(stack) * (rows if self.follows == "rows" else columns)

    def spec(self, weight: WeightSpec) -> WeightSpec:
        """Return the whole state of a weight as a weight, which is cut alike. Ranks that cut the weight have separate
        blocks, rows and columns: the whole has them one after the other."""
        name = f"{weight.own_name}.{self.name}"
        if self.follows == "elements":
            return WeightSpec(name, weight.shape, splits=weight.splits)
        _, count = self.numbers(Overlap(0, weight, 0, weight.numel, 0))
        shape, splits = (count,), list[Split]()
        for split in reversed(weight.splits):
            count *= split.pieces
            splits.insert(0, Split((count,), 0, split.pieces, axis=split.axis))
        return WeightSpec(name, shape, splits=tuple(splits))


def by_weight(arrays: Sequence[StateArray], spec: FlatSpec, own: Slice) -> Iterator[tuple[Overlap, dict[str, slice]]]:
    """Yield the weights in a slice, each with the place of its numbers in the arrays that have some."""
    ends = defaultdict[str, int](int)
    for mine in spec.within(own):
        found, has = dict[str, slice](), dict[Of | None, bool]()
        for array in arrays:
            name, of = array.name, array.of
            if of not in has:
                has[of] = of is None or of(mine.weight)
            if not has[of]:
                continue
            start, stop = (mine.start, mine.stop) if array.follows == "elements" else array.numbers(mine)
            at = mine.at if of is None else ends[name]
            found[name], ends[name] = slice(at, at + stop - start), at + stop - start
        yield mine, found


def sized(arrays: Sequence[StateArray], spec: FlatSpec, own: Slice) -> list[StateArray]:
    """Return the arrays with the elements that a slice has in each."""
    ends = defaultdict[str, int](int)
    for _, places in by_weight(arrays, spec, own):
        for name in places:
            ends[name] = places[name].stop
    return [StateArray(array.name, ends[array.name], *array[2:]) for array in arrays]
