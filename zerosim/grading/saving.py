"""Exercises on checkpoints: a state cut for another number of ranks, and the numbers that no rank's file has."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown

_OLD = -1.0
"""What stands in the padding of saved pieces; the numbers of a state are larger."""


# -- a state for other ranks -------------------------------------------------------------------------
def states(seed: int) -> list[tuple[Any, ...]]:
    draw, found = random.Random(31 + seed), []
    for words, numels, before, after in (
        ("", (10, 11, 14), 4, 2),
        ("", (9, 10, 11), 2, 4),
        (", a rank of padding alone", (7, 8, 13), 6, 4),
        (", files in another order", (10, 13, 16), 3, 6),
        ("", (7, 11, 13), 1, 5),
    ):
        numel = draw.choice(numels)
        size = -(-numel // before)
        padded = [*draw.sample(range(10, 100), numel), *[_OLD] * (before * size - numel)]
        pieces = [(at, at + size, np.array(padded[at : at + size], np.float32)) for at in range(0, before * size, size)]
        if "order" in words:
            pieces.append(pieces.pop(0))
        found.append((f"{numel} numbers, {before} ranks to {after}{words}", pieces, numel, after))
    return found


def wrong_pieces(asked: str, pieces: list[Any], numel: int, ranks: int, came: Any) -> Wrong | None:
    if not isinstance(came, list | tuple) or len(came) != ranks:
        return f"{asked}: {shown(came)[:80]}", f"return {ranks} pieces, one for each rank"
    size = -(-numel // ranks)
    state = np.concatenate([values for _, _, values in sorted(pieces, key=lambda one: one[0])])[:numel]
    wanted = np.concatenate([state, np.zeros(ranks * size - numel)])
    for rank, piece in enumerate(came):
        if not isinstance(piece, list | tuple) or len(piece) != 3 or not all(map(_is_whole, piece[:2])):
            return f"{asked}: rank {rank} has {shown(piece)[:80]}", "a piece is start, stop and values"
        start, stop, values = int(piece[0]), int(piece[1]), np.asarray(piece[2])
        if (start, stop) != (rank * size, (rank + 1) * size):
            words = f"{asked}: rank {rank} has numbers {start} to {stop}, expected {rank * size} to {(rank + 1) * size}"
            return words, _of_bounds((start, stop), values.size, rank, pieces, numel, ranks)
        if values.dtype.kind not in "fiu" or values.shape != (size,):
            words = f"{asked}: rank {rank} has values {values.dtype} {values.shape}, expected {size} numbers"
            return words, _FILL if values.shape == (max(0, min(stop, numel) - start),) else _ONE_ROW
        if values.dtype != np.float32:
            return f"{asked}: rank {rank} has values {values.dtype}, expected float32", _DTYPE
        for at in (int(one) + start for one in np.flatnonzero(values != wanted[start:stop])):
            got, right = float(values[at - start]), _place(float(wanted[at]), state, at >= numel)
            words = f"{asked}: rank {rank}'s number {at} is {_place(got, state, got == 0)}, expected {right}"
            return words, _of_value(got, at, pieces, numel)
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _of_bounds(got: tuple[int, int], count: int, rank: int, pieces: Sequence[Any], numel: int, ranks: int) -> str:
    size, least, padded = -(-numel // ranks), numel // ranks, max(stop for _, stop, _ in pieces)
    if got in ((rank * least, (rank + 1) * least), (rank * least, numel)):
        return f"{numel} // {ranks} leaves a remainder that no rank has: round up, and fill the last ranks up"
    if got == (rank * size, min(numel, (rank + 1) * size)) or got[0] >= numel:
        return f"each rank has equally many numbers, {size}: padding counts"
    if got == (rank * size, (rank + 1) * size - 1):
        return "stop is the first number that a rank does not have"
    if got == (rank * -(-padded // ranks), (rank + 1) * -(-padded // ranks)) and count == got[1] - got[0]:
        return f"the old padding is no part of the state: cut {numel} numbers, not {padded}"
    return f"rank r has numbers r * {size} to (r + 1) * {size}, and rank 0's piece comes first"


def _place(value: float, state: Any, is_padding: bool) -> str:
    """Return a value in words, by its place in the state."""
    if is_padding:
        return "0" if value == 0 else f"{value:g}"
    if value == _OLD:
        return "old padding"
    found = np.flatnonzero(state == value)
    return f"number {found[0]} of the state" if found.size else f"{value:g}, which is in no piece"


def _of_value(got: float, at: int, pieces: Sequence[Any], numel: int) -> str:
    if got == _OLD:
        return f"padding of the old pieces lies behind number {numel - 1}: drop it before you cut again"
    if at >= numel:
        return f"the state ends at number {numel - 1}: what is behind it is new padding, and 0"
    if got == 0:
        return f"number {at} is in a piece: 0 is for padding alone"
    starts = [start for start, _, _ in pieces]
    return _SORT if starts != sorted(starts) else "join the pieces, drop the padding, and cut what is left"


_FILL = "fill the last ranks up with zeros, so that every rank has equally many numbers"
_DTYPE = "a state keeps its dtype: np.zeros and np.array make float64 unless you say otherwise"
_ONE_ROW = "values are one row of numbers, as many as stop - start"
_SORT = "files come in any order: sort the pieces by their starts before you join them"


# -- the missing shard -------------------------------------------------------------------------------
_Files = dict[int, list[tuple[str, int, int]]]


def folders(seed: int) -> list[tuple[Any, ...]]:
    draw = random.Random(32 + seed)
    found = []
    for words in ("a run is missing", "a file is missing", "a run ends early", "copies", "nothing is missing"):
        ranks = draw.choice((4, 5))
        each = draw.choice((8, 9, 10))
        # "a" ends within rank 0, "b" fills rank 1 and ends within rank 2, "c" and "d" the rest: padding is behind "d"
        sizes = {"a": each - 3, "b": each + 5, "c": 4, "d": (ranks - 2) * each - 8}
        files = _saved(sizes, ranks, each)
        if words == "a run is missing":
            files[2].remove(("c", 0, 4))
        elif words == "a file is missing":
            del files[1]
        elif words == "a run ends early":
            _shorten(files[2], "b", 1)
        elif words == "copies":
            _shorten(files[1], "b", 1)
            files[3].append(("b", 0, 2))
            files[3].append(("c", 1, 3))
        else:
            files[3].append(("b", 1, each))
            files[0].append(("d", 0, 2))
        files = {rank: draw.sample(runs, len(runs)) for rank, runs in reversed(files.items())}
        found.append((f"{words}, {ranks} ranks", files, sizes, ranks))
    return found


def _saved(sizes: Mapping[str, int], ranks: int, each: int) -> _Files:
    """Return what each rank's file has of tensors that lie one after the other."""
    files, at = _Files({rank: [] for rank in range(ranks)}), 0
    for name, numel in sizes.items():
        for rank in range(ranks):
            start, stop = (min(numel, max(0, edge * each - at)) for edge in (rank, rank + 1))
            if start < stop:
                files[rank].append((name, start, stop))
        at += numel
    return files


def _shorten(runs: list[tuple[str, int, int]], name: str, by: int) -> None:
    at = next(number for number, run in enumerate(runs) if run[0] == name)
    runs[at] = (name, runs[at][1], runs[at][2] - by)


def _hole(files: _Files, sizes: Mapping[str, int], ranks: int) -> tuple[int, str, int, int] | None:
    """Return the rank, the tensor and the numbers that no file has."""
    each, at = -(-sum(sizes.values()) // ranks), 0
    for name, numel in sizes.items():
        runs = [range(start, stop) for own in files.values() for tensor, start, stop in own if tensor == name]
        left = sorted(set(range(numel)).difference(*runs))
        if left:
            return (at + left[0]) // each, name, left[0], left[-1] + 1
        at += numel
    return None


def wrong_hole(asked: str, files: _Files, sizes: dict[str, int], ranks: int, came: Any) -> Wrong | None:
    right = _hole(files, sizes, ranks)
    if came is None or right is None:
        if came is right:
            return None
        words = f"{asked}: {_named(came)}, expected {_named(right)}"
        return words, _NOTHING if right is None else _COVERED if _seems_whole(files, sizes) else _REACH
    is_four = isinstance(came, list | tuple) and len(came) == 4
    if not is_four or not isinstance(came[1], str) or not all(map(_is_whole, (came[0], *came[2:]))):
        return f"{asked}: {shown(came)[:80]}", "return rank, tensor, start, stop, or None"
    got = (int(came[0]), came[1], int(came[2]), int(came[3]))
    if got == right:
        return None
    words, at = f"{asked}: {_named(got)}, expected {_named(right)}", 0
    for name, numel in sizes.items():
        if name == right[1]:
            break
        at += numel
    if got[1] != right[1]:
        return words, _COVERED
    if at and got[2:] == (right[2] + at, right[3] + at):
        return words, "start and stop count from the tensor's beginning, not from the buffer's"
    if got[2:] == (right[2], right[3] - 1):
        return words, "stop is the first number that is there again"
    if got[2:] != right[2:]:
        return words, _REACH
    return words, _OWNER


def _named(one: Any) -> str:
    """Return a hole in words."""
    if one is None:
        return "nothing is missing"
    if not isinstance(one, list | tuple) or len(one) != 4:
        return shown(one)[:80]
    rank, name, start, stop = one
    return f"rank {shown(rank)[:20]}'s numbers {shown(start)[:20]} to {shown(stop)[:20]} of {shown(name)[:20]}"


def _seems_whole(files: _Files, sizes: Mapping[str, int]) -> bool:
    """Return whether there are as many numbers as there should be, copies counted twice."""
    return sum(stop - start for own in files.values() for _, start, stop in own) >= sum(sizes.values())


_NOTHING = "every number is in some file. That a rank has none of a tensor, or that two have one, is no hole"
_COVERED = "ask which numbers are there, not how many: copies count once, and a rank need not have some of each tensor"
_REACH = "sort all files' runs of a tensor by start, and remember how far they reach: up to its last number"
_OWNER = "the rank follows from the place in the buffer: (numbers of the tensors before + start) // numbers of a slice"
