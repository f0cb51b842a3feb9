"""Assemble whole weights from the ranks' pieces. Copies must be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zerosim.errors import PlacementError
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec


class Piece(NamedTuple):
    """One rank's piece of a flat buffer, and its values: a flat host array, padding included."""

    rank: int
    flat: str
    part: Slice
    values: Any


Decode = Callable[[WeightSpec, Any], Any]


def assemble(layout: Layout, pieces: Iterable[Piece], decode: Decode | None = None) -> dict[str, Any]:
    """Assemble every weight by name, as host arrays, from self-describing pieces; copies must be equal to the bit.
    `decode` returns the values of a weight stored as codes.

    Raises: PlacementError naming rank and tensor, if no rank holds an element, or two ranks hold it differently.
    """
    mesh, axes = layout.mesh, {name: flat.axis for name, flat in layout.flats.items()}
    found: dict[tuple[int, str, int], list[Piece]] = {
        (stage, name, index): []
        for stage, names in enumerate(layout.stages)
        for name in names
        for index in range(mesh.size(axes[name]))
    }
    for piece in pieces:
        if piece.part.size:
            place = mesh.index(piece.rank, "pp"), piece.flat, mesh.index(piece.rank, axes[piece.flat])
            found[place].append(piece)
    whole = _Whole()
    for (_, name, index), parts in found.items():
        flat, size = layout.flats[name], mesh.size(axes[name])
        parts.sort(key=lambda piece: (piece.part.start, piece.rank))
        values = _joined(flat, parts)
        for weight, offset in zip(flat.weights, flat.offsets, strict=True):
            local = values[offset : offset + weight.numel]
            if weight.format is not None and decode is not None:
                local = decode(weight, local)
            local = local.reshape(weight.shape)
            whole.put(weight, local, index, size, parts, offset)
    return {weight.name: whole.weights[weight.name] for flat in layout.flats.values() for weight in flat.weights}


class _Whole:
    """Whole weights, assembled from the pieces of tensor-parallel members, on every pipeline stage."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        # the owner of each piece of a weight
        self._writers: dict[tuple[str, int, tuple[int, int]], tuple[list[Piece], int]] = {}

    def put(self, weight: WeightSpec, local: Any, index: int, size: int, parts: list[Piece], offset: int) -> None:
        """Store the piece of one of `size` members, joined from `parts`, starting at `offset`.

        Raises: PlacementError if another member's copy of it differed.
        """
        import numpy as np

        split = weight.split
        if weight.tile is not None:  # whose number takes the member's place
            split, index, size = weight.tile.split, weight.tile.number, weight.tile.split.pieces
        piece = (weight.name, 0, (0, 0)) if split is None else (weight.name, split.piece(index, size), split.around)
        if piece not in self._writers:
            self._writers[piece] = parts, offset
            if split is None:
                self.weights[weight.name] = local
            else:
                whole = self.weights.setdefault(weight.name, np.zeros(weight.whole_shape, local.dtype))
                split.put(local, whole, index, size)
            return
        there = self.weights[weight.name] if split is None else split.take(self.weights[weight.name], index, size)
        differing = np.flatnonzero(_bits(local) != _bits(there))
        if differing.size:
            at = int(differing[0])
            first_parts, first_offset = self._writers[piece]
            rank, first = _holder(parts, offset + at), _holder(first_parts, first_offset + at)
            raise PlacementError(
                f"rank {rank} and rank {first} hold different values of element {at} of their part of {weight.name}: "
                "copies of a weight must be bit-identical. Were their gradients added over all ranks with a copy?",
                rank=rank,
            )


def _holder(parts: Sequence[Piece], at: int) -> int:
    """Return the rank whose slice of a flat buffer has element `at`."""
    return next(piece.rank for piece in parts if piece.part.start <= at < piece.part.stop)


def _joined(flat: FlatSpec, pieces: list[Piece]) -> Any:
    """Join the whole of a flat buffer. `pieces` are in the order of their starts."""
    import numpy as np

    if len(pieces) == 1 and pieces[0].part.start == 0 and pieces[0].part.stop >= flat.numel:
        return pieces[0].values[: flat.numel]
    end, whole = 0, np.empty(flat.numel, pieces[0].values.dtype if pieces else np.float32)
    writers: list[tuple[int, int]] = []  # (end, owner), in order
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
                "bit-identical. Were their gradients reduced over all ranks with a copy?",
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
    """Return 'element 3 of h.0.ln_1.weight' for an element of the flat buffer."""
    overlap = next(flat.within(Slice(at, at + 1, flat.numel)), None)
    if overlap is None:
        return f"element {at} of {flat.name}, which is padding"
    return f"element {overlap.start} of {overlap.weight.name}"
