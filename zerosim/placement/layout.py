"""Who holds what: every rank's part of every flat buffer, for parameters, gradients and optimizer states.

A value made of a mesh, the flat buffers and three rows, one for each model state of the ZeRO paper (section 5):

                param         grad          optim
    stage 0     Whole         Whole         Whole
    stage 1     Whole         Whole         EvenSlices
    stage 2     Whole         EvenSlices    EvenSlices
    stage 3     EvenSlices    EvenSlices    EvenSlices

What is not cut over an axis is held in copies along it. Nobody else decides who holds what: placing, the norm, worlds
of shapes, results, the stepper and the comparison with formulas ask here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerosim.errors import PlacementError
from zerosim.placement.mesh import Mesh
from zerosim.placement.partition import Partition, Slice, WholeUnits, shares
from zerosim.placement.spec import FlatSpec

STATES = ("param", "grad", "optim")


@dataclass(frozen=True, slots=True)
class Row:
    """How one state is held: the rule that cuts it, and the axes that it is cut over."""

    partition: Partition
    axes: tuple[str, ...] = ("dp_shard",)


Rows = Mapping[str, Row]
"""One row for each of STATES."""


class Piece(NamedTuple):
    """A part of a flat buffer as one rank holds it, and its values: a flat host array, padding included."""

    rank: int
    flat: str
    part: Slice
    values: Any


class Layout:
    """A mesh, the flat buffers that lie on it, and the rows that say who holds what of them.

    In what it is asked, `state` is one of STATES, `name` that of a flat, `rank` one of the mesh's.
    """

    def __init__(self, mesh: Mesh, flats: Sequence[FlatSpec], rows: Rows) -> None:
        self.mesh = mesh
        self.flats = {flat.name: flat for flat in flats}
        self.rows = dict(rows)
        self._numels = tuple(flat.numel for flat in flats)
        self._which = {name: which for which, name in enumerate(self.flats)}

    def part(self, rank: int, name: str, state: str) -> Slice:
        """What a rank holds of a flat buffer's param, grad or optim."""
        row = self.rows[state]
        index, size = self.mesh.index(rank, *row.axes), self.mesh.size(*row.axes)
        return row.partition.part(self._numels, self._which[name], index, size)

    def padded(self, name: str, state: str) -> int:
        """Elements of a whole buffer whose parts those are, padding included."""
        row = self.rows[state]
        return row.partition.padded(self._numels[self._which[name]], self.mesh.size(*row.axes))

    def owner(self, name: str) -> int | None:
        """Of a partition into whole units: where in its group the member stands that updates this one."""
        row = self.rows["optim"]
        if not isinstance(row.partition, WholeUnits):
            return None
        return row.partition.owner(self._numels, self._which[name], self.mesh.size(*row.axes))

    def classes(self, uneven: Collection[tuple[tuple[str, ...], int]], around: Sequence[int] = (0,)) -> list[int]:
        """For each rank the lowest one that it cannot differ from in bytes and traffic.

        `uneven` are the all-reduces whose elements the group does not divide, as (axes, elements): members add unlike
        shares. `around` says whose parts a member's record depends on beside its own: (-1, 0, 1) for a ring, which
        passes its neighbours' on.
        """
        axes = {row.axes for row in self.rows.values()} | {axes for axes, _ in uneven}
        alike = [(along, self._alike(along, uneven, around)) for along in axes]
        seen: dict[Hashable, int] = {}
        index = self.mesh.index
        return [
            seen.setdefault(tuple([kinds[index(rank, *along)] for along, kinds in alike]), rank)
            for rank in range(self.mesh.world_size)
        ]

    def _alike(
        self, axes: tuple[str, ...], uneven: Collection[tuple[tuple[str, ...], int]], around: Sequence[int]
    ) -> list[Hashable]:
        """For each place along these axes what it may differ in from others: its own parts and shares, and those
        around it."""
        size = self.mesh.size(*axes)
        rules = {row.partition for row in self.rows.values() if row.axes == axes}
        columns: list[Sequence[Hashable]] = [rule.kinds(self._numels, size) for rule in rules]
        columns += [shares(numel, size) for along, numel in uneven if along == axes]
        own = list(zip(*columns, strict=True)) if columns else [()] * size
        return [tuple([own[(index + step) % size] for step in around]) for index in range(size)]

    def assemble(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Every weight by name, as host arrays, from pieces that describe themselves; copies must be equal to the bit.

        Raises: PlacementError naming rank and tensor where nobody holds an element, or two ranks hold it differently.
        """
        found: dict[str, list[Piece]] = {name: [] for name in self.flats}
        for piece in pieces:
            if piece.part.size:
                found[piece.flat].append(piece)
        weights: dict[str, Any] = {}
        for flat in self.flats.values():
            values = _joined(flat, sorted(found[flat.name], key=lambda piece: (piece.part.start, piece.rank)))
            for weight, offset in zip(flat.weights, flat.offsets, strict=True):
                weights[weight.name] = values[offset : offset + weight.numel].reshape(weight.shape)
        return weights


def _joined(flat: FlatSpec, pieces: list[Piece]) -> Any:
    """The whole of a flat buffer. `pieces` are in the order of where they start."""
    import numpy as np

    if len(pieces) == 1 and pieces[0].part.start == 0 and pieces[0].part.stop >= flat.numel:
        return pieces[0].values[: flat.numel]
    end, whole = 0, np.empty(flat.numel, pieces[0].values.dtype if pieces else np.float32)
    writers: list[tuple[int, int]] = []  # (where it ends, whose it is), in order
    for rank, _, part, values in pieces:
        stop = min(part.stop, flat.numel)
        if part.start > end:
            break
        shared = min(end, stop)
        ours, theirs = values[: shared - part.start], whole[part.start : shared]
        if not np.array_equal(_bits(ours), _bits(theirs)):
            at = part.start + int(np.flatnonzero(_bits(ours) != _bits(theirs))[0])
            first = next(writer for limit, writer in writers if at < limit)
            raise PlacementError(
                f"rank {rank} and rank {first} hold different values of {_where(flat, at)}: copies of a weight must be "
                "the same to the bit; were their gradients reduced over all ranks that hold one?",
                rank=rank,
            )
        if stop > end:
            whole[end:stop] = values[end - part.start : stop - part.start]
            writers.append((stop, rank))
            end = stop
    if end < flat.numel:
        raise PlacementError(f"no rank holds {_where(flat, end)}: the ranks' parts must cover every weight")
    return whole


def _bits(values: Any) -> Any:
    return values.view(f"u{values.itemsize}")


def _where(flat: FlatSpec, at: int) -> str:
    """'element 3 of h.0.ln_1.weight', for an element of the flat buffer."""
    [overlap] = flat.within(Slice(at, at + 1, flat.numel))
    return f"element {overlap.start} of {overlap.weight.name}"
