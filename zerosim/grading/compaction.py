"""The exercise on defragmentation: moves that bring all live parts to the start of a region.

An answer is first asked about regions, and its moves are carried out. Then it trains: every device of a run has a
region no larger than its peak, and each compaction is checked there, too. Source: ZeRO (arXiv 1910.02054), section 6.3.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from zerosim.device.allocators.arena import Arena, Moves, compacted
from zerosim.errors import InputError
from zerosim.grading.adapting import function_of
from zerosim.grading.asking import Wrong
from zerosim.grading.plain import plain, shown
from zerosim.grading.trial import Own
from zerosim.train.plan import peak_of

SMALL: tuple[dict[int, int], ...] = (
    {}, {0: 10}, {10: 20}, {0: 10, 20: 10}, {5: 30}, {10: 20, 60: 20}, {60: 20, 10: 20, 40: 5}, {20: 9, 0: 20},
)  # fmt: skip
"""Sizes of the live parts, by address."""
_DRAWN = 20


def region(answer: Any) -> Own:
    """Make a run on devices whose memory the given function compacts. Raises: InputError for anything but a
    function."""
    compact = function_of(answer, "my_compaction(live)")

    def checked(live: Mapping[int, int]) -> Moves:
        moves = plain(compact(dict(live)))
        if words := _wrong_moves(live, moves):
            raise InputError(f"of {len(live)} live buffers {words}")
        return [(source, target, size) for source, target, size in moves]

    return Own(allocator=lambda config: Arena(peak_of(config), compact=checked))


def regions(seed: int) -> list[tuple[str, dict[int, int]]]:
    """Yield small regions first, then drawn ones."""
    draw, regions = random.Random(4 + seed), list(SMALL)
    for _ in range(_DRAWN):
        starts = sorted(draw.sample(range(0, 1000, 10), 25))
        live = [(start, draw.randint(1, 10)) for start in starts]
        regions.append(dict(draw.sample(live, len(live))))
    many = "my_compaction of {} live buffers"
    return [(f"my_compaction({live})" if len(live) < 5 else many.format(len(live)), live) for live in regions]


def wrong(asked: str, live: dict[int, int], moves: Any) -> Wrong | None:
    """Carry out each move, and return the first error."""
    if not (words := _wrong_moves(live, moves)):
        return None
    return f"{asked}: {words}", "each move goes down, to the end of the buffers already in place; draw it"


def _wrong_moves(live: Mapping[int, int], moves: Any) -> str:
    """Return the error in moves, which are carried out on a region whose every byte holds its own address; '' for
    none."""
    if not isinstance(moves, list) or not all(_is_move(move) for move in moves):
        return f"gave {shown(moves)[:80]}, expected a list of (source, target, size)"
    places, total = {address: address for address in live}, sum(live.values())
    memory = np.arange(max([total, *(address + size for address, size in live.items())], default=0))
    for source, target, size in moves:
        if live.get(source) != size or places[source] != source:
            return f"the move {(source, target, size)} does not move one live buffer, as a whole and only once"
        if not 0 <= target <= len(memory) - size:
            return f"the move {(source, target, size)} leaves the region"
        memory[target : target + size] = memory[source : source + size].copy()
        places[source] = target
    for address, place in places.items():
        if not np.array_equal(memory[place : place + live[address]], np.arange(address, address + live[address])):
            return f"bytes of the buffer at {address} were overwritten"
    high = max((place + live[address] for address, place in places.items()), default=0)
    if high != total:
        return f"{total:,} B are live but end at {high:,}: holes are left between them"
    moved, least = (sum(size for _, _, size in some) for some in (moves, compacted(live)))
    return f"{moved:,} B were moved, but {least:,} B are enough" if moved > least else ""


def _is_move(move: Any) -> bool:
    return isinstance(move, tuple) and len(move) == 3 and all(type(one) is int for one in move)
