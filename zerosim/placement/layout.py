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
    """A mesh, the flat buffers that lie on it, and the rows that say who holds what of them.

    In what it is asked, `state` is one of STATES, `name` that of a flat, `rank` one of the mesh's.
    `stages` are the buffers of each pipeline stage by name, in its order; without it, every one is on all of them.
    """

    def __init__(
        self, mesh: Mesh, flats: Sequence[FlatSpec], rows: Rows, stages: Sequence[Sequence[str]] | None = None
    ) -> None:
        self.mesh = mesh
        self.flats = {flat.name: flat for flat in flats}
        self.rows = dict(rows)
        self.stages = [tuple(names) for names in stages or [list(self.flats)] * mesh.pp]
        self._numels = [tuple(self.flats[name].numel for name in names) for names in self.stages]
        self._which = [{name: which for which, name in enumerate(names)} for names in self.stages]

    def part(self, rank: int, name: str, state: str) -> Slice:
        """What a rank holds of a flat buffer of its stage: of its param, grad or optim."""
        row, stage = self.rows[state], self.mesh.index(rank, "pp")
        index, size = self.mesh.index(rank, *row.axes), self.mesh.size(*row.axes)
        return row.partition.part(self._numels[stage], self._which[stage][name], index, size)

    def holders(self, name: str) -> list[int]:
        """The ranks on whose pipeline stage a flat buffer lies."""
        ranks, index = range(self.mesh.world_size), self.mesh.index
        return [rank for rank in ranks if name in self._which[index(rank, "pp")]]

    def padded(self, name: str, state: str) -> int:
        """Elements of a whole buffer whose parts those are, padding included."""
        row = self.rows[state]
        return row.partition.padded(self.flats[name].numel, self.mesh.size(*row.axes))

    def owner(self, name: str) -> int | None:
        """Of a partition into whole units: where in its group the member stands that updates this one."""
        row = self.rows["optim"]
        if not isinstance(row.partition, WholeUnits):
            return None
        stage = next(stage for stage, names in enumerate(self.stages) if name in names)
        return row.partition.owner(self._numels[stage], self._which[stage][name], self.mesh.size(*row.axes))

    def is_counted(self, stage: int, name: str) -> bool:
        """Whether this stage counts a flat buffer: of a tied table on two stages the first one does."""
        return all(name not in names for names in self.stages[:stage])

    def classes(
        self,
        uneven: Collection[tuple[tuple[str, ...], int]],
        around: Sequence[int] = (0,),
        *,
        by_tensor: bool = False,
    ) -> list[int]:
        """For each rank the lowest one that it cannot differ from in bytes and traffic.

        `uneven` are the all-reduces whose elements the group does not divide, as (axes, elements): members add unlike
        shares. `around` says whose parts a member's record depends on beside its own: (-1, 0, 1) for a ring, which
        passes its neighbours' on. `by_tensor`: what an optimizer keeps of a part depends on the tensors in it.
        """
        axes = {row.axes for row in self.rows.values()} | {axes for axes, _ in uneven}
        alike = [
            [(along, self._alike(stage, along, uneven, around, by_tensor)) for along in axes]
            for stage in range(self.mesh.pp)
        ]
        seen: dict[Hashable, int] = {}
        index = self.mesh.index
        return [
            seen.setdefault((stage, *[kinds[index(rank, *along)] for along, kinds in alike[stage]]), rank)
            for rank in range(self.mesh.world_size)
            for stage in [index(rank, "pp")]
        ]

    def _alike(
        self,
        stage: int,
        axes: tuple[str, ...],
        uneven: Collection[tuple[tuple[str, ...], int]],
        around: Sequence[int],
        by_tensor: bool,
    ) -> list[Hashable]:
        """For each place along these axes what it may differ in from others: its own parts and shares, and those
        around it."""
        size = self.mesh.size(*axes)
        rules = {row.partition for row in self.rows.values() if row.axes == axes}
        columns: list[Sequence[Hashable]] = [rule.kinds(self._numels[stage], size) for rule in rules]
        columns += [shares(numel, size) for along, numel in uneven if along == axes]
        if self.rows["optim"].axes == axes:
            columns += self._shared(stage, size)
            columns += self._tensors(stage, size) if by_tensor else []
        own = list(zip(*columns, strict=True)) if columns else [()] * size
        return [tuple([own[(index + step) % size] for step in around]) for index in range(size)]

    def _shared(self, stage: int, size: int) -> list[Sequence[Hashable]]:
        """For each kind of flat buffer what of each member's part tensor-parallel ranks hold shares of gradients of."""
        tp, rule, seen = self.mesh.tp, self.rows["optim"].partition, set[Hashable]()
        columns: list[Sequence[Hashable]] = []
        for which, name in enumerate(self.stages[stage]):
            flat = self.flats[name]
            runs = tuple((weight.numel, weight.sharers(tp)) for weight in flat.weights)
            if runs in seen or all(sharers == 1 for _, sharers in runs):
                continue
            if isinstance(rule, EvenSlices):  # equal buffers are cut alike
                seen.add(runs)
            parts = (rule.part(self._numels[stage], which, index, size) for index in range(size))
            columns.append([_shares_within(flat, part, tp) for part in parts])
        return columns

    def _tensors(self, stage: int, size: int) -> list[Sequence[Hashable]]:
        """For each kind of flat buffer what each member's part has of which tensors."""
        rule, columns = self.rows["optim"].partition, list[Sequence[Hashable]]()
        kinds = {tuple(w.shape for w in self.flats[name].weights): name for name in self.stages[stage]}
        for name in kinds.values() if isinstance(rule, EvenSlices) else ():  # whole buffers differ by their owners
            flat, which = self.flats[name], self._which[stage][name]
            parts = (rule.part(self._numels[stage], which, index, size) for index in range(size))
            columns.append([tuple((mine.weight.shape, mine.numel) for mine in flat.within(part)) for part in parts])
        return columns

    def assemble(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Every weight by name, as host arrays, from pieces that describe themselves; copies must be equal to the bit.

        Raises: PlacementError naming rank and tensor where nobody holds an element, or two ranks hold it differently.
        """
        size, index = self.mesh.tp, self.mesh.index
        found: dict[tuple[int, str, int], list[Piece]] = {
            (stage, name, tp): [] for stage, names in enumerate(self.stages) for name in names for tp in range(size)
        }
        for piece in pieces:
            if piece.part.size:
                found[index(piece.rank, "pp"), piece.flat, index(piece.rank, "tp")].append(piece)
        whole = _Whole(size)
        for (_, name, tp), parts in found.items():
            flat = self.flats[name]
            parts.sort(key=lambda piece: (piece.part.start, piece.rank))
            values = _joined(flat, parts)
            for weight, offset in zip(flat.weights, flat.offsets, strict=True):
                local = values[offset : offset + weight.numel].reshape(weight.shape)
                whole.put(weight, local, tp, parts, offset)
        return {weight.name: whole.weights[weight.name] for flat in self.flats.values() for weight in flat.weights}


def _shares_within(flat: FlatSpec, part: Slice, tp: int) -> Hashable:
    """Elements by the number of ranks that share their gradient, in the order of the weights."""
    return tuple((mine.weight.sharers(tp), mine.numel) for mine in flat.within(part) if mine.weight.sharers(tp) > 1)


class _Whole:
    """Whole weights, put together from what the members of tensor-parallel groups hold of them, on every stage."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.weights: dict[str, Any] = {}
        self._writers: dict[tuple[str, int], tuple[list[Piece], int]] = {}  # whose a piece of a weight is

    def put(self, weight: WeightSpec, local: Any, index: int, parts: list[Piece], offset: int) -> None:
        """Store one member's piece, put together of `parts`, where it begins at `offset`.

        Raises: PlacementError where another member's copy of it was different.
        """
        import numpy as np

        split, piece = weight.split, 0 if weight.split is None else weight.split.piece(index, self.size)
        if (weight.name, piece) not in self._writers:
            self._writers[weight.name, piece] = parts, offset
            if split is None:
                self.weights[weight.name] = local
            else:
                whole = self.weights.setdefault(weight.name, np.zeros(weight.whole_shape, local.dtype))
                split.put(local, whole, index, self.size)
            return
        there = self.weights[weight.name] if split is None else split.take(self.weights[weight.name], index, self.size)
        differing = np.flatnonzero(_bits(local) != _bits(there))
        if differing.size:
            at = int(differing[0])
            first_parts, first_offset = self._writers[weight.name, piece]
            rank, first = _holder(parts, offset + at), _holder(first_parts, first_offset + at)
            raise PlacementError(
                f"rank {rank} and rank {first} hold different values of element {at} of their part of {weight.name}: "
                "copies of a weight must be the same to the bit; were their gradients added over all ranks that hold "
                "one?",
                rank=rank,
            )


def _holder(parts: Sequence[Piece], at: int) -> int:
    """The rank whose part of a flat buffer has element `at`."""
    return next(piece.rank for piece in parts if piece.part.start <= at < piece.part.stop)


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
    overlap = next(flat.within(Slice(at, at + 1, flat.numel)), None)
    if overlap is None:
        return f"element {at} of {flat.name}, which is padding"
    return f"element {overlap.start} of {overlap.weight.name}"
