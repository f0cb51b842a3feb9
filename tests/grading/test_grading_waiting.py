"""The exercises on time: what is wrong with an answer is found, and nothing is run."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from grading_here import grade

from zerosim.errors import InputError
from zerosim.grading import step_into
from zerosim.grading.waiting import bubble_of, waited


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda compute, gather: 0, "my_depth([2, 2, 2, 2], [1, 1, 1, 1]) is 0, expected 1; waits with"),
        (lambda compute, gather: len(compute) - 1, "is 3, expected 1"),
        (lambda compute, gather: min(1, len(compute) - 1), "is 1, expected 3"),
        (lambda compute, gather: 0.0, "is 0.0, expected a number of other units, 0 to 0"),
    ],
)
def test_a_depth_that_is_too_small_or_too_large(answer: Any, words: str) -> None:
    found = grade(answer, "depth")
    assert (found.state, found.points, found.possible) == ("failed", 0, 1)
    assert words in found["depth"].counted


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, v, share: max(1, int((p - 1) / (v * share))), "my_micro_batches(2, 2, 1/10) is 5, expected a mul"),
        (lambda p, v, share: p * max(1, -(-(p - 1) // (v * share * p))), "is 32; 31 have a bubble of 3/31"),
        (lambda p, v, share: p, "is 2, with a bubble of 1/2"),
        (lambda p, v, share: 80 * p, "80; 79 have a bubble of 0"),
    ],
)
def test_too_few_micro_batches_or_too_many(answer: Any, words: str) -> None:
    found = grade(answer, "micro_batches")
    assert found.points == 0
    assert words in found["bubble"].counted


def test_what_answers_are_held_against() -> None:
    """Three units, each 2 s, gathers of 1 s: the first is waited for; without any ahead, all are."""
    assert [waited((2, 2, 2), (1, 1, 1), ahead) for ahead in range(3)] == [3, 1, 1]
    assert bubble_of(4, 2, 8) == Fraction(3, 16)
    with pytest.raises(InputError, match="no training runs"):
        step_into(lambda compute, gather: 0, "depth")
