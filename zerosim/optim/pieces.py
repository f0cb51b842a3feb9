"""The matrices in a rank's slice of a flat buffer, which may begin and end in the middle of a row.

This module also places an optimizer's numbers for rows and columns in its arrays of states and in the exchanged sums.
It has no arrays and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.errors import InputError
from zerosim.optim.states import StateArray, by_weight
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec


def is_matrix(weight: WeightSpec) -> bool:
    """Return whether a tensor has numbers for rows and columns. Raises: InputError for three dimensions or more."""
    if len(weight.shape) > 2:
        raise InputError(f"{weight.name} {weight.shape}: Adafactor is for matrices and vectors; choose adamw")
    return len(weight.shape) == 2


def is_no_matrix(weight: WeightSpec) -> bool:
    """Return whether it has a number for each of its elements."""
    return not is_matrix(weight)


class LocalPiece(NamedTuple):
    """A tensor whose elements [start, stop) are in the local slice, at `at`.

    `sums` is the start of its rows' sums in the exchanged buffer; `places` are those of its numbers in the arrays of
    states.
    """

    which: int
    weight: WeightSpec
    start: int
    stop: int
    at: int
    sums: int
    places: Mapping[str, slice]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_matrix(self) -> bool:
        return len(self.weight.shape) == 2


class Rectangle(NamedTuple):
    """Some columns of some rows of a matrix, at `at` of a slice."""

    at: int
    row: int
    rows: int
    column: int
    columns: int

    def of(self, part: Any) -> Any:
        """Return its view of the slice's flat array."""
        return part[self.at : self.at + self.rows * self.columns].reshape(self.rows, self.columns)


def rectangles(one: LocalPiece) -> list[Rectangle]:
    """Yield the slice's rectangles of the matrix: whole rows first, then the pieces of the rows before and after."""
    width = one.weight.shape[1]
    first, last = -(-one.start // width), one.stop // width
    if first > last:
        return [Rectangle(0, last, 1, one.start - last * width, one.numel)]
    found = [Rectangle(first * width - one.start, first, last - first, 0, width)] if first < last else []
    if one.start < first * width:
        found.append(Rectangle(0, first - 1, 1, one.start - (first - 1) * width, first * width - one.start))
    if one.stop > last * width:
        found.append(Rectangle(last * width - one.start, last, 1, 0, one.stop - last * width))
    return found


def sums_of(weight: WeightSpec) -> int:
    """Return the numbers of summed rows and columns."""
    return sum(weight.shape) if is_matrix(weight) else 0


def local_pieces(arrays: Sequence[StateArray], spec: FlatSpec, own: Slice) -> list[LocalPiece]:
    """Return the tensors with elements in a slice, whose states are in these arrays."""
    begin = [len(spec.weights)]
    for weight in spec.weights:
        begin.append(begin[-1] + sums_of(weight))
    return [LocalPiece(*mine, begin[mine.which], places) for mine, places in by_weight(arrays, spec, own)]
