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
from zerosim.placement.partition import EvenSlices, Partition, Slice, WholeUnits, shares
from zerosim.placement.spec import FlatSpec, WeightSpec

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
    """A mesh, the flat buffers that lie on it, and the rows that say who holds what of them."""

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
        if self.rows["optim"].axes == axes:
            columns += self._shared(size)
        own = list(zip(*columns, strict=True)) if columns else [()] * size
        return [tuple([own[(index + step) % size] for step in around]) for index in range(size)]

    def _shared(self, size: int) -> list[Sequence[Hashable]]:
        """For each kind of flat buffer what of each member's part tensor-parallel ranks hold shares of gradients of."""
        tp, rule, seen = self.mesh.tp, self.rows["optim"].partition, set[Hashable]()
        columns: list[Sequence[Hashable]] = []
        for which, flat in enumerate(self.flats.values()):
            runs = tuple((weight.numel, weight.sharers(tp)) for weight in flat.weights)
            if runs in seen or all(sharers == 1 for _, sharers in runs):
                continue
            if isinstance(rule, EvenSlices):  # equal buffers are cut alike
                seen.add(runs)
            parts = (rule.part(self._numels, which, index, size) for index in range(size))
            columns.append([_shares_within(flat, part, tp) for part in parts])
        return columns

    def assemble(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Every weight by name, as host arrays, from pieces that describe themselves; copies must be equal to the bit.

        Raises: PlacementError naming rank and tensor where nobody holds an element, or two ranks hold it differently.
        """
        size = self.mesh.tp
        found: dict[tuple[str, int], list[Piece]] = {(name, index): [] for name in self.flats for index in range(size)}
        for piece in pieces:
            if piece.part.size:
                found[piece.flat, self.mesh.index(piece.rank, "tp")].append(piece)
        weights: dict[str, Any] = {}
        for flat in self.flats.values():
            for index in range(size):
                parts = sorted(found[flat.name, index], key=lambda piece: (piece.part.start, piece.rank))
                values = _joined(flat, parts)
                for weight, offset in zip(flat.weights, flat.offsets, strict=True):
                    local = values[offset : offset + weight.numel].reshape(weight.shape)
                    at = _put(weights, weight, local, index, size)
                    if at is not None:
                        raise self._differing_copies(weight, at, parts, offset + at)
        return weights

    def _differing_copies(self, weight: WeightSpec, at: int, parts: Sequence[Piece], place: int) -> PlacementError:
        """Of a weight whose copy on some tensor-parallel rank has another element `at` than the first one's."""
        rank = next(piece.rank for piece in parts if piece.part.start <= place < piece.part.stop)
        group, index = self.mesh.group(rank, "tp"), self.mesh.index(rank, "tp")
        copies = len(group) if weight.split is None else weight.split.copies(len(group))
        return PlacementError(
            f"rank {rank} and rank {group[index // copies * copies]} hold different values of element {at} of their "
            f"part of {weight.name}: copies of a weight must be the same to the bit; were their gradients added over "
            "all tensor-parallel ranks that hold one?",
            rank=rank,
        )


def _shares_within(flat: FlatSpec, part: Slice, tp: int) -> Hashable:
    """Elements by the number of ranks that share their gradient, in the order of the weights."""
    return tuple((mine.weight.sharers(tp), mine.numel) for mine in flat.within(part) if mine.weight.sharers(tp) > 1)


def _put(weights: dict[str, Any], weight: WeightSpec, local: Any, index: int, size: int) -> int | None:
    """Store what member `index` of a tensor-parallel group holds of a weight, or compare it with what is there already:
    the first element that differs, None where none does."""
    import numpy as np

    if weight.split is not None and index % weight.split.copies(size) == 0:
        if weight.name not in weights:
            weights[weight.name] = np.zeros(weight.whole_shape, local.dtype)
        weight.split.put(local, weights[weight.name], index, size)
        return None
    there = weights.setdefault(weight.name, local)
    if weight.split is not None:
        there = weight.split.take(there, index, size)
    differing = np.flatnonzero(_bits(local) != _bits(np.ascontiguousarray(there)))
    return int(differing[0]) if differing.size else None


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
