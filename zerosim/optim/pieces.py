"""What the part of a flat buffer that a rank holds has of matrices: it may begin and end in the middle of a row.

And where an optimizer's numbers for rows and columns lie, in its arrays of states and in the sums that are exchanged.
No arrays, no memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zerosim.errors import InputError
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec


class Held(NamedTuple):
    """A tensor of which the own part has the elements [start, stop), at `at` in the part.

    `sums` is where its rows' sums begin in the buffer that is exchanged; `rows`, `columns` and `numbers` where its own
    begin in the arrays of states.
    """

    which: int
    weight: WeightSpec
    start: int
    stop: int
    at: int
    sums: int
    rows: int
    columns: int
    numbers: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_matrix(self) -> bool:
        return len(self.weight.shape) == 2


class Rectangle(NamedTuple):
    """Some columns of some rows of a matrix, which lie at `at` of a part of it."""

    at: int
    row: int
    rows: int
    column: int
    columns: int

    def of(self, part: Any) -> Any:
        """Its window of a flat array of the part."""
        return part[self.at : self.at + self.rows * self.columns].reshape(self.rows, self.columns)


def rectangles(one: Held) -> list[Rectangle]:
    """What the part has of the matrix: whole rows first, then what there is of the row before and of that after."""
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
    """How many rows and columns are summed. Raises: InputError for a tensor of three dimensions or more."""
    if len(weight.shape) > 2:
        raise InputError(f"{weight.name} {weight.shape}: Adafactor is for matrices and vectors; choose adamw")
    return sum(weight.shape) if len(weight.shape) == 2 else 0


def held_of(spec: FlatSpec, own: Slice) -> list[Held]:
    """The tensors of which a part has elements."""
    begin = [len(spec.weights)]
    for weight in spec.weights:
        begin.append(begin[-1] + sums_of(weight))
    found: list[Held] = []
    rows = columns = numbers = 0
    for which, weight, start, stop, at in spec.within(own):
        found.append(Held(which, weight, start, stop, at, begin[which], rows, columns, numbers))
        if found[-1].is_matrix:
            rows, columns = rows + weight.shape[0], columns + weight.shape[1]
        else:
            numbers += stop - start
    return found
