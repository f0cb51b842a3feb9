"""The rotary positions of a block, from its model's numbers."""

from __future__ import annotations

from functools import cache

from zerosim.backends.forms import Rope
from zerosim.config.numbers import UNSCALED, Kind, Scaling
from zerosim.config.parts.model import ModelConfig
from zerosim.functional.rope_scaling import inverse_frequencies


def rope_of(sizes: ModelConfig, kind: Kind) -> Rope:
    """Return which columns of a head turn, and how fast. Blocks with a base of their own are not scaled."""
    numbers, columns = sizes.numbers, sizes.rotated
    rope = Rope(kind.rope_base, 0 if columns == sizes.head_dim else columns, sizes.decoder.interleaved)
    scaling = UNSCALED if kind.window and numbers.rope_local else numbers.scaling
    if scaling == UNSCALED:
        return rope
    frequencies, factor = _frequencies(scaling, kind.rope_base, columns, sizes.positions, sizes.seq)
    return rope._replace(frequencies=frequencies, factor=factor)


@cache  # the blocks of a model have the same
def _frequencies(
    scaling: Scaling, base: float, columns: int, positions: int, seq: int
) -> tuple[tuple[float, ...], float]:
    found, factor = inverse_frequencies(scaling.kind, dict(scaling.values), base, columns, positions, seq)
    return tuple(found), factor
