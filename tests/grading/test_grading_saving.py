"""Exercises 44 and 45: typical mistakes with pieces of a checkpoint, and what is said of each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from forty import solution as text_of_solution
from grading_here import assert_told, grade


def right(name: str, *of: Any) -> Any:
    """The published solution's."""
    names: dict[str, Any] = {}
    exec(text_of_solution(name), names)
    return names[f"my_{name}"](*of)


def even(values: Any, ranks: int, size: int) -> Any:
    padded = np.zeros(max(ranks * size, len(values)), values.dtype)
    padded[: len(values)] = values
    return [(rank * size, (rank + 1) * size, padded[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def joined(pieces: Any) -> Any:
    return np.concatenate([values for _, _, values in sorted(pieces, key=lambda one: one[0])])


def padding_kept(pieces: Any, numel: int, ranks: int) -> Any:
    whole = joined(pieces)
    return even(whole, ranks, -(-len(whole) // ranks))


def padding_kept_in_new_slices(pieces: Any, numel: int, ranks: int) -> Any:
    size = -(-numel // ranks)
    return even(joined(pieces)[: ranks * size], ranks, size)


def remainder_dropped(pieces: Any, numel: int, ranks: int) -> Any:
    return even(joined(pieces)[:numel], ranks, numel // ranks)


def remainder_to_the_last(pieces: Any, numel: int, ranks: int) -> Any:
    size, state = numel // ranks, joined(pieces)[:numel]
    stops = [*((rank + 1) * size for rank in range(ranks - 1)), numel]
    return [(rank * size, stop, state[rank * size : stop]) for rank, stop in enumerate(stops)]


def not_sorted(pieces: Any, numel: int, ranks: int) -> Any:
    return even(np.concatenate([values for _, _, values in pieces])[:numel], ranks, -(-numel // ranks))


def clipped(pieces: Any, numel: int, ranks: int) -> Any:
    found = right("recut", pieces, numel, ranks)
    return [(start, min(stop, numel), values[: max(0, numel - start)]) for start, stop, values in found]


def changed(change: Any) -> Any:
    return lambda *of: change(right("recut", *of))


def each(change: Any) -> Any:
    return changed(lambda found: [(start, stop, change(values)) for start, stop, values in found])


RECUT = [
    (padding_kept, "has numbers 0 to", "old padding is no part"),
    (padding_kept_in_new_slices, "is old padding, expected 0", "drop it before"),
    (remainder_dropped, "rank 0 has numbers 0 to", "round up"),
    (remainder_to_the_last, "has numbers", "round up"),
    (not_sorted, "of the state, expected number", "sort the pieces"),
    (clipped, "has numbers", "padding counts"),
    (changed(lambda found: found[::-1]), "rank 0 has numbers", "rank 0's piece comes first"),
    (changed(lambda found: [(a, b - 1, values) for a, b, values in found]), "has numbers 0 to", "does not have"),
    (changed(lambda found: [(a, b + 1, values) for a, b, values in found]), "has numbers 0 to", "rank r has"),
    (each(lambda values: values + 0.5), "which is in no piece", "join the pieces"),
    (each(lambda values: np.trim_zeros(values, "b")), "values", "fill the last"),
    (each(lambda values: values[:, None]), "values", "one row"),
    (each(lambda values: np.where(values == 0, 7, values)), "expected 0", "new pad"),
    (each(lambda values: 0 * values), "is 0, expected number", "for padding alone"),
    (each(lambda values: values.astype(float)), "float64, expected float32", "keeps its dtype"),
    (changed(lambda found: found[:1]), "numbers", "one for each rank"),
    (changed(lambda found: [values for _, _, values in found]), "rank 0 has", "start, stop and values"),
]  # fmt: skip


def told(change: Any) -> Any:
    """The solution's answer, changed where something is missing."""

    def answer(files: Any, sizes: Any, ranks: int) -> Any:
        found = right("hole", files, sizes, ranks)
        return found and change(found, sizes)

    return answer


def flat_numbers(found: Any, sizes: Any) -> Any:
    names = list(sizes)
    at = sum(sizes[name] for name in names[: names.index(found[1])])
    return found[0], found[1], found[2] + at, found[3] + at


def by_sums(files: Any, sizes: Any, ranks: int) -> Any:
    """Adds up lengths: copies hide a hole."""
    found = right("hole", files, sizes, ranks)
    there = dict.fromkeys(sizes, 0)
    for name, start, stop in (run for runs in files.values() for run in runs):
        there[name] += stop - start
    return found if any(there[name] < sizes[name] for name in sizes) else None


def absent_tensors_alone(files: Any, sizes: Any, ranks: int) -> Any:
    names = {name for runs in files.values() for name, _, _ in runs}
    return next(((0, name, 0, sizes[name]) for name in sizes if name not in names), None)


def between_runs_alone(files: Any, sizes: Any, ranks: int) -> Any:
    """Compares neighbours, and never the last run with the tensor's end."""
    found = right("hole", files, sizes, ranks)
    if found is not None and found[3] == sizes[found[1]] and found[2]:
        return None
    return found


def not_ordered(files: Any, sizes: Any, ranks: int) -> Any:
    """Takes runs in the order of the files."""
    at, size = 0, -(-sum(sizes.values()) // ranks)
    for name, numel in sizes.items():
        reached = 0
        for own in files.values():
            for start, stop in [(start, stop) for tensor, start, stop in own if tensor == name]:
                if start > reached:
                    return (at + reached) // size, name, reached, start
                reached = max(reached, stop)
        if reached < numel:
            return (at + reached) // size, name, reached, numel
        at += numel
    return None


def overlaps_are_holes(files: Any, sizes: Any, ranks: int) -> Any:
    for name in sizes:
        runs = sorted((start, stop) for own in files.values() for tensor, start, stop in own if tensor == name)
        for (_, stop), (start, _) in pairwise(runs):
            if stop != start:
                return right("hole", files, sizes, ranks) or (0, name, min(start, stop), max(start, stop))
    return right("hole", files, sizes, ranks)


HOLE = [
    (told(flat_numbers), "expected rank", "from the tensor's beginning"),
    (told(lambda found, sizes: (*found[:3], found[3] - 1)), "expected rank", "there again"),
    (told(lambda found, sizes: (*found[:2], 0, sizes[found[1]])), "expected rank", "how far they reach"),
    (told(lambda found, sizes: (found[0] + 1, *found[1:])), "expected rank", "follows from the place"),
    (told(lambda found, sizes: (list(sizes).index(found[1]), *found[1:])), "rank", "follows from the place"),
    (told(lambda found, sizes: (found[0], "a", 0, 1)), "of 'a', expected", "copies count once"),
    (told(lambda found, sizes: found[:2]), "2, 'c'", "or None"),
    (by_sums, "copies", "copies count once"),
    (absent_tensors_alone, "rank 0's numbers 0 to 4 of 'c', expected rank 2", "follows from the place"),
    (between_runs_alone, "nothing is missing, expected rank 2", "up to its last number"),
    (not_ordered, "expected rank 2", "copies count once"),
    (overlaps_are_holes, "expected nothing is missing", "is no hole"),
    (lambda *of: None, "nothing is missing, expected", "how far they reach"),
]  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize(("answer", "words", "hint"), RECUT)
def test_a_mistake_with_pieces_is_told_what_it_is(answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, "recut"), words, hint)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("answer", "words", "hint"), HOLE)
def test_a_mistake_with_a_hole_is_told_what_it_is(answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, "hole"), words, hint)


@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
def test_the_cut_of_the_solution_is_zerosims_own(ranks: int) -> None:
    from zerosim.placement.partition import slice_of

    values = np.arange(1.0, 12.0)
    pieces = [(part.start, part.stop, np.pad(values, (0, 9))[part.start : part.stop])
              for rank in range(3) for part in [slice_of(11, rank, 3)]]  # fmt: skip
    for rank, (start, stop, own) in enumerate(right("recut", pieces, 11, ranks)):
        part = slice_of(11, rank, ranks)
        assert (start, stop) == (part.start, part.stop)
        assert own[: max(0, 11 - start)].tolist() == values[start:stop].tolist()
