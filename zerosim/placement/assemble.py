"""Assemble whole weights from the ranks' pieces, and cut them into pieces again. Copies must be equal to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.errors import PlacementError
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.placement.split import Cut, put, take


class Piece(NamedTuple):
    """One rank's piece of a flat buffer, and its values: a flat host array, padding included. `scales`: the buffer's,
    if they are whole on every rank."""

    rank: int
    flat: str
    part: Slice
    values: Any
    scales: Any = None


Decode = Callable[[WeightSpec, Any], Any]
Encode = Callable[[WeightSpec, Any], Any]


def assemble(layout: Layout, pieces: Iterable[Piece], decode: Decode | None = None) -> dict[str, Any]:
    """Assemble every weight by name, as host arrays, from self-describing pieces; copies must be equal to the bit.
    `decode` returns the values of a weight stored as codes.

    Raises: PlacementError naming rank and tensor, if no rank holds an element, or two ranks hold it differently.
    """
    import numpy as np

    mesh, axes = layout.mesh, {name: flat.cut_axes for name, flat in layout.flats.items()}
    found: dict[tuple[int, str, int], list[Piece]] = {
        (stage, name, index): []
        for stage, names in enumerate(layout.stages)
        for name in names
        for index in range(mesh.size(*axes[name]))
    }
    for piece in pieces:
        if piece.part.size:
            place = mesh.index(piece.rank, "pp"), piece.flat, mesh.index(piece.rank, *axes[piece.flat])
            found[place].append(piece)
    whole = _Whole()
    for (_, name, _), parts in found.items():
        flat = layout.flats[name]
        parts.sort(key=lambda piece: (piece.part.start, piece.rank))
        values, at = _joined(flat, parts), 0
        for weight, offset in zip(flat.weights, flat.offsets, strict=True):
            local = values[offset : offset + weight.numel]
            if weight.format is not None and decode is not None:
                if (scales := parts[0].scales) is not None:
                    first, at = at, at + weight.format.beside(math.prod(weight.shape))
                    local = np.concatenate([scales[first:at], local])
                local = decode(weight, local)
            local = local.reshape(weight.shape)
            whole.put(weight, local, weight.cuts(mesh, parts[0].rank), parts, offset)
    return {weight.name: whole.weights[weight.name] for flat in layout.flats.values() for weight in flat.weights}


def cut(layout: Layout, whole: Mapping[str, Any], rank: int, encode: Encode | None = None) -> Iterator[Piece]:
    """Yield a rank's pieces of whole weights, buffer by buffer: the inverse of `assemble`. Padding is zero. `encode`
    returns the codes of a weight stored as codes."""
    import numpy as np

    for name in layout.stages[layout.mesh.index(rank, "pp")]:
        flat, part = layout.flats[name], layout.own(rank, name)
        found = dict[int, Any]()
        for mine in flat.within(part):
            local = take(whole[mine.weight.name], mine.weight.cuts(layout.mesh, rank))
            if mine.weight.format is not None and encode is not None:
                local = encode(mine.weight, local)[mine.weight.format.beside(local.size) :]
            found[mine.at] = local.reshape(-1)[mine.start : mine.stop]
        values = np.zeros(part.size, next(iter(found.values())).dtype if found else np.float32)
        for at, local in found.items():
            values[at : at + local.size] = local
        yield Piece(rank, name, part, values)


class _Whole:
    """Whole weights, assembled from the pieces of ranks that cut them, on every pipeline stage."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        # the owner of each piece of a weight
        self._writers: dict[tuple[Hashable, ...], tuple[list[Piece], int]] = {}

    def put(self, weight: WeightSpec, local: Any, cuts: list[Cut], parts: list[Piece], offset: int) -> None:
        """Store what these cuts leave of a weight, joined from `parts`, starting at `offset`.

        Raises: PlacementError if another member's copy of it differed.
        """
        import numpy as np

        piece = (weight.name, *[cut.piece for cut in cuts])
        if piece not in self._writers:
            self._writers[piece] = parts, offset
            if not cuts:
                self.weights[weight.name] = local
            else:
                whole = self.weights.setdefault(weight.name, np.zeros(weight.whole_shape, local.dtype))
                put(local, whole, cuts)
            return
        there = take(self.weights[weight.name], cuts)
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
    for rank, _, part, values, _ in pieces:
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
