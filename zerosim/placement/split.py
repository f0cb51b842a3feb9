"""How a weight is cut: over groups that divide its layers' work, or into tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerosim.errors import InputError
from zerosim.placement.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Split:
    """The cut of a weight of this whole `shape` along `dim` by the group along a mesh `axis` (of a tile: by none).

    `parts` equal parts of the dim, such as q|k|v side by side, are cut separately, each into `pieces` equal pieces.
    With fewer pieces than ranks, neighbours hold copies of one (heads of keys and values). `padding` is added to the
    end of the dim first, so that pieces are equal (rows of a token table). `lengths` are those of unequal parts, such
    as q|k|v where queries share heads of keys and values. With `around` these are a run of the weight's parts: so many
    of the dim before and after them are cut into another number of pieces, as weights of their own.

    Raises: InputError for lengths that do not fill the dim, or cannot be cut.
    """

    shape: tuple[int, ...]
    dim: int
    pieces: int
    parts: int = 1
    padding: int = 0
    axis: str = ""
    lengths: tuple[int, ...] = ()
    around: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.lengths and sum(self.lengths) + sum(self.around) != self.shape[self.dim]:
            raise InputError(f"a weight's parts of {self.lengths} do not fill its {self.shape[self.dim]}")
        if any(length % self.pieces for length in self.lengths):
            raise InputError(
                f"a fused weight's parts of {self.lengths} cannot each be cut over {self.pieces} ranks: "
                f"choose a --{self.axis} that divides them"
            )

    @property
    def steps(self) -> list[int]:
        """The length of one piece of each part."""
        length = self.shape[self.dim] + self.padding
        each = self.lengths or (length // self.parts,) * self.parts
        return [part // self.pieces for part in each]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on each rank."""
        return (*self.shape[: self.dim], sum(self.steps), *self.shape[self.dim + 1 :])

    def piece(self, index: int, size: int) -> int:
        """Return the number of member `index` of `size`'s piece."""
        return index * self.pieces // size

    def copies(self, size: int) -> int:
        """Return how many neighbours hold the same piece."""
        return size // self.pieces

    def windows(self, index: int, size: int) -> list[tuple[slice, slice]]:
        """Yield for each part its range along `dim` on a member, and in the whole, without padding."""
        length, piece, at, found = self.shape[self.dim], self.piece(index, size), 0, []
        for step in self.steps:
            start = self.around[0] + at * self.pieces + piece * step
            stop = min(start + step, length)
            if start < stop:
                found.append((slice(at, at + stop - start), slice(start, stop)))
            at += step
        return found

    def span(self, index: int, size: int) -> tuple[int, int]:
        """Return, for a weight cut in one part, the start of a member's piece, and its length without padding."""
        runs = self.windows(index, size)
        return (runs[0][1].start, runs[0][1].stop - runs[0][1].start) if runs else (self.shape[self.dim], 0)

    def take(self, whole: Any, index: int, size: int) -> Any:
        """Cut a member's piece out of a whole host array; padding is zero."""
        import numpy as np

        local = np.zeros(self.local_shape, whole.dtype)
        for here, there in self.windows(index, size):
            local[self._at(here)] = whole[self._at(there)]
        return local

    def put(self, local: Any, whole: Any, index: int, size: int) -> None:
        """Store a member's piece in a whole host array."""
        for here, there in self.windows(index, size):
            whole[self._at(there)] = local[self._at(here)]

    def _at(self, run: slice) -> tuple[slice, ...]:
        return (*[slice(None)] * self.dim, run)


class Tile(NamedTuple):
    """One tile of a weight: the `number`th of the equal tiles into which `split` cuts it, counted from 0. Each tile has
    its own flat buffer, and every rank works on all tiles, one after the other (`nn/tiles.py`)."""

    split: Split
    number: int


Splits = tuple[Split, ...]
"""A weight's cuts, along an axis each. Each one cuts what the one before it leaves of the weight."""


class Cut(NamedTuple):
    """A split, and whose piece it is: member number `member` of `members`."""

    split: Split
    member: int
    members: int

    @property
    def piece(self) -> tuple[int, tuple[int, int]]:
        """What distinguishes the member's piece from others of the weight. Copies are equal."""
        return self.split.piece(self.member, self.members), self.split.around


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSpec:
    """What a parameter is cut along.

    splits  its cuts over the groups along mesh axes, in order; members along other axes hold copies
    summed  axes whose members compute shares of its gradient, which must be added (sequence parallelism)
    tile    the tile of the weight of this name that it is; None: it is the weight
    """

    splits: Splits = ()
    summed: tuple[str, ...] = ()
    tile: Tile | None = None

    def cuts(self, mesh: Mesh, rank: int) -> list[Cut]:
        """Return the cuts from the whole weight to what a rank holds; a tile's number takes the member's place."""
        found = [Cut(split, mesh.index(rank, split.axis), mesh.size(split.axis)) for split in self.splits]
        return found if self.tile is None else [*found, Cut(*self.tile, self.tile.split.pieces)]

    def copies(self, mesh: Mesh, axis: str) -> int:
        """Return how many neighbours along an axis hold the same piece."""
        for split in self.splits:
            if split.axis == axis:
                return split.copies(mesh.size(axis))
        return mesh.size(axis)

    def counts(self, mesh: Mesh, rank: int, axes: Sequence[str]) -> bool:
        """Return whether a rank of a group along `axes` counts it: the first of several copies counts."""
        return sum([mesh.index(rank, axis) % self.copies(mesh, axis) for axis in axes]) == 0

    def shared_over(self, mesh: Mesh) -> Iterator[tuple[str, int]]:
        """Yield each axis along which neighbours hold shares of its gradient, with their number."""
        for axis in self.summed:
            yield axis, mesh.size(axis)
        for split in self.splits:
            if split.pieces < (size := mesh.size(split.axis)) and split.axis not in self.summed:
                yield split.axis, split.copies(size)


def take(whole: Any, cuts: Sequence[Cut]) -> Any:
    """Take out of a whole host array what is left of it after these cuts."""
    for split, member, members in cuts:
        whole = split.take(whole, member, members)
    return whole


def put(local: Any, whole: Any, cuts: Sequence[Cut]) -> None:
    """Store what is left after these cuts in the whole host array."""
    *outer, (split, member, members) = cuts
    around = take(whole, outer)
    split.put(local, around, member, members)
    if outer:
        put(around, whole, outer)


def own_suffix(splits: Splits, tile: Tile | None) -> str:
    """Return what distinguishes weights of one name: tiles, and runs of parts."""
    if tile is not None:
        return f".tile{tile.number}"
    for split in splits:
        if split.around != (0, 0):
            return f".from{split.around[0]}"
    return ""
