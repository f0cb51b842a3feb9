"""Which layers each pipeline stage holds: runs of the model's units, in its order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from zerosim.errors import InputError


def cut_layers(
    layers: int, chunks: int, *, given: Sequence[int] | None = None, balance_ends: bool = False
) -> list[int]:
    """Layers of each chunk, in the model's order: those given, or as many on each.

    `balance_ends`: the token table and the head count as a layer each, so that the first and the last chunk have one
    less. Raises: InputError where they cannot be cut so.
    """
    if given is not None:
        if len(given) != chunks or sum(given) != layers or min(given) < 0:
            raise InputError(
                f"stage_layers {','.join(map(str, given))}: expected {chunks} numbers that make up {layers} layers"
            )
        return list(given)
    counted = layers + 2 * balance_ends
    each, rest = divmod(counted, chunks)
    if rest or (balance_ends and each < 1):
        ends = " and two ends" if balance_ends else ""
        high, more = divmod(layers, chunks)
        nearest = ",".join(str(high + (i < more)) for i in range(chunks))
        raise InputError(
            f"layers {layers}{ends} do not divide into {chunks} equal chunks: choose layers "
            f"{max(1, round(counted / chunks)) * chunks - 2 * balance_ends}, or pass --stage-layers {nearest}"
        )
    sizes = [each] * chunks
    if balance_ends:
        sizes[0] -= 1
        sizes[-1] -= 1
    return sizes


def cut_units(names: Sequence[str], sizes: Sequence[int], is_block: Callable[[str], bool]) -> list[range]:
    """Runs of units with so many blocks each: the first holds what stands before all blocks, the last what follows."""
    blocks = [i for i, name in enumerate(names) if is_block(name)]
    edges = [0]
    for count in accumulate(sizes[:-1]):
        edges.append(blocks[0] + count)
    return [range(start, stop) for start, stop in pairwise([*edges, len(names)])]
