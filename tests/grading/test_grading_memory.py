"""The exercises on a device's memory: what is wrong with an answer is found, and said."""

from __future__ import annotations

from typing import Any

import pytest
from grading_here import grade

from zerosim.device.allocators import arena
from zerosim.errors import InputError, OutOfMemory
from zerosim.grading import find_exercise, step_into
from zerosim.grading.best_fit import Book
from zerosim.grading.trial import attempt
from zerosim.train.plan import peak_of
from zerosim.train.run import run


class Right:
    """Best fit; `chosen` says of holes (size, address) that are large enough which one."""

    def __init__(self, capacity: int) -> None:
        self.holes, self.live = {0: capacity}, dict[int, int]()

    def chosen(self, holes: list[tuple[int, int]]) -> tuple[int, int]:
        return min(holes)

    def reserve(self, nbytes: int) -> int | None:
        enough = [(size, address) for address, size in self.holes.items() if size >= nbytes]
        if not enough:
            return None
        size, address = self.chosen(enough)
        del self.holes[address]
        if size > nbytes:
            self.holes[address + nbytes] = size - nbytes
        self.live[address] = nbytes
        return address

    def release(self, address: int) -> None:
        size = self.live.pop(address)
        size += self.holes.pop(address + size, 0)
        for start in [start for start in self.holes if start + self.holes[start] == address]:
            size, address = size + self.holes.pop(start), start
        self.holes[address] = size


class FirstFit(Right):
    def chosen(self, holes: list[tuple[int, int]]) -> tuple[int, int]:
        return min(holes, key=lambda hole: hole[1])


class HighestOfEqual(Right):
    def chosen(self, holes: list[tuple[int, int]]) -> tuple[int, int]:
        return min(holes, key=lambda hole: (hole[0], -hole[1]))


class NoMerging(Right):
    def release(self, address: int) -> None:
        self.holes[address] = self.live.pop(address)


class MergesBehindOnly(Right):
    def release(self, address: int) -> None:
        size = self.live.pop(address)
        self.holes[address] = size + self.holes.pop(address + size, 0)


class NoSplitting(Right):
    def reserve(self, nbytes: int) -> int | None:
        address = super().reserve(nbytes)
        if address is not None:
            self.live[address] += self.holes.pop(address + nbytes, 0)
        return address


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FirstFit, "reserve(12) is 0, expected 40; holes: 30 B at 0, 15 B at 40"),
        (HighestOfEqual, "reserve(20) is 30, expected 0; holes: 20 B at 0, 20 B at 30"),
        (NoMerging, "release(30), release(0): reserve(60) is None, expected 0; holes: 60 B at 0"),
        (MergesBehindOnly, "release(0), release(30): reserve(60) is None, expected 0; holes: 60 B at 0"),
        (NoSplitting, "a region of 100 B, reserve(10): reserve(20) is None, expected 10; holes: 90 B at 10"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_allocators_first_wrong_answer_is_shown_with_the_holes(answer: Any, words: str) -> None:
    found = grade(answer, "best_fit")
    check = found["requests"]
    assert check.passed is False
    assert check.hint
    assert found.points == 0
    assert check.counted.endswith(words)


class ForgetsLater(Right):
    """Right until a region is larger than those on paper."""

    def release(self, address: int) -> None:
        if sum(self.holes.values()) + sum(self.live.values()) > 10_000:
            raise RuntimeError("lost")
        super().release(address)


def test_an_answer_is_checked_in_training_too() -> None:
    assert grade(Right, "best_fit").passed
    check = grade(ForgetsLater, "best_fit")["runs"]
    assert check.passed is False
    assert "RuntimeError: lost" in check.counted


def by_address(live: dict[int, int]) -> list[tuple[int, int, int]]:
    moves, end = [], 0
    for address in sorted(live):
        if address != end:
            moves.append((address, end, live[address]))
        end += live[address]
    return moves


def highest_first(live: dict[int, int]) -> list[tuple[int, int, int]]:
    return by_address(live)[::-1]


def all_of_it(live: dict[int, int]) -> list[tuple[int, int, int]]:
    ends = [sum(live[before] for before in live if before < address) for address in sorted(live)]
    return [(address, end, live[address]) for address, end in zip(sorted(live), ends, strict=True)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda live: [], "my_compaction({10: 20}): 20 B are live but end at 30: holes are left between them"),
        (lambda live: None, "gave None, expected a list of (source, target, size)"),
        (all_of_it, "my_compaction({0: 10}): 10 B were moved, but 0 B are enough"),
        (highest_first, "bytes of the buffer at"),
        (
            lambda live: [(0, 0, size + 1) for size in live.values()],
            "does not move one live buffer, as a whole and only once",
        ),
        (lambda live: [(one, 10**6, live[one]) for one in live], "leaves the region"),
    ],
)
def test_moves_that_lose_bytes_or_leave_holes_are_found(answer: Any, words: str) -> None:
    found = grade(answer, "compaction")
    assert words in found["moves"].counted
    assert found.points == 0


def test_the_region_of_the_exercise_is_one_that_does_not_do_without() -> None:
    """No larger than the peak, and with what is live where best fit puts it: a run without moves ends early."""
    one = find_exercise("compaction")
    config = one.cases[0].config
    tight = config.replace(allocator="arena", capacity=peak_of(config))
    with pytest.raises(OutOfMemory, match="the largest hole"):
        run(tight.replace(allocator_conf="defragment:False"))
    trial = attempt(config, one.adapt(by_address))
    assert trial.failure is None
    with pytest.raises(InputError, match="a stepped run cannot stop"):
        step_into(by_address, one)


def test_what_is_asked_of_an_answer_is_best_fit_as_zerosims_arena_does_it() -> None:
    theirs, book = arena.Arena(1000), Book(1000)
    for id, nbytes in enumerate((100, 300, 50, 300, 100, 40)):
        assert theirs.reserve(id, nbytes) == nbytes
        assert theirs.address_of(id) == book.best(nbytes)
        book.live[theirs.address_of(id)] = nbytes
        if id % 2:
            del book.live[theirs.address_of(id - 1)]
            theirs.release(id - 1)
