"""The exercise on slice bounds: properties that slices must have, checked for each size, so that nothing here contains
the answer.

Slices of equal length, one after the other from 0, that reach the end and are no longer than needed: only one partition
has these properties.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from zerosim.grading.adapting import function_of, is_pair
from zerosim.grading.asking import Examination, Keep, Wrong
from zerosim.grading.plain import shown

SIZES = ((12, 4), (10, 4), (7, 3), (3, 4), (1, 1), (5, 8))
"""The (numel, N) of the questions: dividing, not dividing, more ranks than elements."""


def _sizes(seed: int) -> Sequence[tuple[int, int]]:
    draw = random.Random(seed)
    drawn = [(draw.randint(1, 40), draw.randint(2, 9)) for _ in range(4)]
    return (*SIZES[:2], *drawn) if seed else SIZES


def _ask(answer: Any, question: Any, keep: Keep) -> None:
    numel, ranks = question
    cut = function_of(answer, "slice_of(numel, rank, world_size)")
    for rank in range(ranks):
        keep(cut(numel, rank, ranks))


def _words(question: Any, came: Sequence[Any]) -> str:
    numel, ranks = question
    return f"slice_of({numel}, {min(len(came), ranks - 1)}, {ranks})"


def wrong(question: Any, came: Sequence[Any]) -> Wrong | None:
    """Return the first property that slices lack, of the ranks that have replied."""
    numel, ranks = question
    for rank, pair in enumerate(came):
        call = f"slice_of({numel}, {rank}, {ranks})"
        if not is_pair(pair):
            return f"{call} is {shown(pair)}", "return a pair of whole numbers: return start, stop"
        start, stop = pair
        end, length = came[rank - 1][1] if rank else 0, came[0][1] - came[0][0]
        if stop < start:
            return f"{call} is {pair}, which stops before it starts", "start and stop count elements from 0"
        if start != end:
            what = "but element 0 must come first" if not rank else f"and rank {rank - 1} stops at {end}"
            way = "overlap" if start < end else "leave a gap"
            words = f"{call} is {pair}: it starts at {start}, {what}"
            return words, f"slices lie one after the other from 0: these {way}" if rank else "rank 0 starts at 0"
        if stop - start != length:
            words = f"{call} is {pair}, {stop - start} elements long, and rank 0's slice is {length} long"
            return words, "all slices must have the same length, the last one too: elements past numel are padding"
    if len(came) < ranks:
        return None
    last = came[-1][1]
    words = f"slice_of({numel}, {ranks - 1}, {ranks}), the last rank's, is {came[-1]}"
    if last < numel:
        lost = f"element {last} belongs" if numel - last == 1 else f"elements {last} to {numel - 1} belong"
        return f"{words}: {lost} to no rank", "N equal slices must cover numel: which way do you round?"
    if last - ranks >= numel:
        return f"{words}: slices one element shorter also cover {numel}", "make the slices no longer than they must be"
    return None


EXAMINATION = Examination(
    _sizes,
    _ask,
    _words,
    wrong,
    "an endless loop, or a sleep: no loop is needed, for a slice's start and stop are two products",
)
