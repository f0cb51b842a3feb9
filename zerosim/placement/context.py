"""Which tokens of a row each rank of context parallelism has: a pure value.

Causal attention makes later tokens read more keys. In zig-zag order a row is cut into 2c pieces, and rank i has pieces
i and 2c - 1 - i, an early one and a late one: every rank then reads as many keys (Llama 3, arXiv 2407.21783, section
3.3.2; Megatron-Core and PyTorch do the same).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The cut of a row's tokens over `around` x `within` ranks. Keys and values go round the first; the second are
    neighbours, who exchange tokens for heads (Ulysses) and together have the place of one rank in the ring."""

    around: int = 1
    within: int = 1
    zigzag: bool = False

    @property
    def ranks(self) -> int:
        """The ranks that share a row."""
        return self.around * self.within

    @property
    def multiple(self) -> int:
        """The tokens of a row must be a multiple of this number."""
        turns = 2 if self.zigzag and self.around > 1 else 1
        return math.lcm(turns * self.around, self.ranks)

    def pieces(self, tokens: int, index: int) -> tuple[range, ...]:
        """Return the positions of rank `index` in a row of `tokens`, in their order."""
        place, inner = divmod(index, self.within)
        return tuple(_part(self.at(tokens, place), inner, tokens // self.ranks))

    def holder(self, tokens: int, token: int) -> tuple[int, int]:
        """Return which rank has a token of a row of `tokens`, and the number of tokens that it has before it."""
        for index in range(self.ranks):
            before = 0
            for piece in self.pieces(tokens, index):
                if token in piece:
                    return index, before + piece.index(token)
                before += len(piece)
        raise IndexError(f"token {token} of {tokens}")

    def at(self, tokens: int, place: int) -> tuple[range, ...]:
        """Return the positions of a place in the ring: those of its `within` ranks together."""
        if not self.zigzag or self.around == 1:
            each = tokens // self.around
            return (range(place * each, (place + 1) * each),)
        each = tokens // (2 * self.around)
        last = 2 * self.around - 1 - place
        return range(place * each, (place + 1) * each), range(last * each, (last + 1) * each)


def _part(pieces: tuple[range, ...], index: int, each: int) -> Iterator[range]:
    """Yield part `index` of pieces laid end to end and cut into parts of `each` tokens."""
    first, at = index * each, 0
    for piece in pieces:
        start, stop = max(first - at, 0), min(first + each - at, len(piece))
        if start < stop:
            yield piece[start:stop]
        at += len(piece)


WHOLE_ROWS = ContextCut()
