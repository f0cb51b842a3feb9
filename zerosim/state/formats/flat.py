"""Where DeepSpeed's flat buffers have each parameter: two layouts, of ZeRO 1 and 2 and of ZeRO 3.

    ZeRO 1, 2   a parameter group's weights one after the other, cut into N equal parts: a weight may straddle ranks
    ZeRO 3      each weight cut into N parts of ceil(numel / N); a rank's parts one after the other, in sub-groups

Source: DeepSpeed 0.19.8, deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import Stored
from zerosim.state.formats.whole import Tensor, joined

Shapes = Mapping[str, tuple[int, ...]]
Slices = Mapping[str, tuple[int, int]]
"""First element and count of a rank's slice of each weight."""


def cut(buffers: Sequence[Stored], first: int, count: int) -> Iterator[Stored]:
    """Yield elements [first, first + count) of buffers that stand one after the other, piece by piece."""
    for buffer in buffers:
        here = min(count, buffer.numel - first)
        if here > 0 and first >= 0:
            yield buffer.narrow(first, here)
            first, count = 0, count - here
        else:
            first -= buffer.numel
        if not count:
            return


def of_group(parts: Sequence[Stored], shapes: Shapes, paddings: Sequence[int], where: str) -> dict[str, Tensor]:
    """Return the weights of a group at stages 1 and 2, out of each rank's part of its flat buffer.

    `paddings`: elements after each weight (parameter_alignment). Raises: InputError for parts that are too short.
    """
    first, found = 0, dict[str, Tensor]()
    for number, (name, shape) in enumerate(shapes.items()):
        count = math.prod(shape)
        found[name] = _joined(list(cut(parts, first, count)), name, shape, where)
        first += count + (paddings[number] if number < len(paddings) else 0)
    return found


def of_slices(parts: Sequence[Stored], slices: Sequence[Slices], shapes: Shapes, where: str) -> dict[str, Tensor]:
    """Return the weights of a group at stages 1 and 2, where each rank says which elements of its part are whose.

    round_robin_gradients puts weights in another order than their shapes stand in. Raises: InputError for a part that
    is too short.
    """
    found = dict[str, Tensor]()
    for name, shape in shapes.items():
        own = [(part, one[name]) for part, one in zip(parts, slices, strict=True) if name in one]
        found[name] = _joined([part.narrow(*piece) for part, piece in own if piece[1]], name, shape, where)
    return found


def of_ranks(ranks: Sequence[Sequence[Stored]], shapes: Shapes, where: str) -> dict[str, Tensor]:
    """Return the weights at stage 3, out of each rank's sub-groups. Raises: InputError where they do not fit."""
    first, found, available = 0, dict[str, Tensor](), sum(one.numel for one in ranks[0])
    for name, shape in shapes.items():
        count = math.prod(shape)
        share = -(-count // len(ranks))
        pieces = list[Stored]()
        for rank, buffers in enumerate(ranks):
            own = max(0, min(share, count - rank * share))
            pieces += cut(buffers, first, own)
        found[name] = _joined(pieces, name, shape, where)
        first += share
    if first != available:
        raise InputError(
            f"{where}: its flat groups have {available:,} elements a rank, and the weights need {first:,}: the files "
            "are not of one checkpoint"
        )
    return found


def _joined(pieces: Sequence[Stored], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    try:
        if not pieces and not math.prod(shape):
            raise InputError(f"{printable(name[:200])} has no elements")
        return joined([piece.named(name) for piece in pieces], name, shape)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
