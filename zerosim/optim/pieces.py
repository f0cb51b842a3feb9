"""The matrices in a rank's slice of a flat buffer, which may begin and end in the middle of a row.

This module also places an optimizer's numbers for rows and columns in its arrays of states and in the exchanged sums.
It has no arrays and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import add
from typing import Any, NamedTuple

from zerosim.optim.states import StateArray, by_weight
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec


def is_matrix(weight: WeightSpec) -> bool:
    """Return whether a tensor has numbers for rows and columns: a matrix, or a stack of them."""
    return len(weight.shape) > 1


def is_no_matrix(weight: WeightSpec) -> bool:
    """Return whether it has a number for each of its elements."""
    return not is_matrix(weight)


class LocalPiece(NamedTuple):
    """A tensor whose elements [start, stop) are in the local slice, at `at`.

    `sums` is the start of its rows' sums in the exchanged buffer, behind which are its columns'; `places` are those of
    its numbers in the arrays of states. `number` is that of its first matrix among all, as which a vector counts too.
    """

    which: int
    weight: WeightSpec
    start: int
    stop: int
    at: int
    sums: int
    places: Mapping[str, slice]
    number: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_matrix(self) -> bool:
        return is_matrix(self.weight)

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of one matrix."""
        rows, columns = self.weight.shape[-2:]
        return rows, columns

    @property
    def numbers(self) -> slice:
        """The numbers of its matrices among all."""
        return slice(self.number, self.number + matrices_of(self.weight))

    def cuts(self) -> list[tuple[int, slice]]:
        """Return its matrices with elements here, by their numbers in the stack, and the places of these elements."""
        count = matrices_of(self.weight)
        size = self.weight.numel // count
        ends = [min(max(size * number, self.start), self.stop) - self.start for number in range(count + 1)]
        found = enumerate(map(slice, ends, ends[1:]))
        return [(number, each) for number, each in found if each.stop > each.start]


class Rectangle(NamedTuple):
    """Some columns of some rows of a matrix, at `at` of a slice. In a stack rows and columns are counted through."""

    at: int
    row: int
    rows: int
    column: int
    columns: int

    def of(self, part: Any) -> Any:
        """Return its view of the slice's flat array."""
        return part[self.at : self.at + self.rows * self.columns].reshape(self.rows, self.columns)


def rectangles(one: LocalPiece) -> list[list[Rectangle]]:
    """Return the slice's rectangles of each matrix: whole rows first, then the pieces of the rows before and after."""
    (rows, columns), found = one.matrix, list[list[Rectangle]]()
    for number, cut in one.cuts():
        before = one.start - number * rows * columns
        within = _rectangles(columns, cut.start + before, cut.stop + before)
        moved = (cut.start, number * rows, 0, number * columns, 0)
        found.append([Rectangle(*map(add, each, moved)) for each in within])
    return found


def _rectangles(width: int, start: int, stop: int) -> list[Rectangle]:
    """Return the rectangles of the elements [start, stop) of a matrix, whose slice begins there."""
    first, last = -(-start // width), stop // width
    if first > last:
        return [Rectangle(0, last, 1, start - last * width, stop - start)]
    found = [Rectangle(first * width - start, first, last - first, 0, width)] if first < last else []
    if start < first * width:
        found.append(Rectangle(0, first - 1, 1, start - (first - 1) * width, first * width - start))
    if stop > last * width:
        found.append(Rectangle(last * width - start, last, 1, 0, stop - last * width))
    return found


def matrices_of(weight: WeightSpec) -> int:
    """Return how many matrices a tensor has; a vector counts as one."""
    return prod(weight.shape[:-2])


def sums_of(weight: WeightSpec) -> int:
    """Return the numbers of summed rows and columns."""
    return matrices_of(weight) * sum(weight.shape[-2:]) if is_matrix(weight) else 0


def local_pieces(arrays: Sequence[StateArray], spec: FlatSpec, own: Slice) -> list[LocalPiece]:
    """Return the tensors with elements in a slice, whose states are in these arrays."""
    first = [0, *accumulate(map(matrices_of, spec.weights))]
    begin = [first[-1] + ended for ended in (0, *accumulate(map(sums_of, spec.weights)))]
    return [
        LocalPiece(*mine, begin[mine.which], places, first[mine.which]) for mine, places in by_weight(arrays, spec, own)
    ]
