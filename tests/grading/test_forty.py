"""Forty and more answers, and what the grader says of each: `python tests/grading/test_forty.py` prints the table."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest
from forty import ANSWERS, Row
from grading_here import grade_source

from zerosim.grading import Grade, find_exercise
from zerosim.grading.process import judged_source
from zerosim.grading.report import brief
from zerosim.grading.similar import hand_in_parts, likenesses, published_parts


def graded(row: Row) -> Grade:
    one = find_exercise(row.exercise)
    if row.apart:
        return Grade(one, judged_source("hw.py", row.source, one))
    return grade_source(row.source, one)


QUICK = ("a name with a slip in it", "zerosim's method, called", "a pair that equals every pair")
PARAMETERS = [pytest.param(row, id=row.what, marks=() if row.what in QUICK else pytest.mark.slow) for row in ANSWERS]


def test_there_are_forty_of_all_kinds() -> None:
    kinds = Counter(row.kind for row in ANSWERS)
    assert len(ANSWERS) >= 40
    assert min(kinds[kind] for kind in ("right", "copy", "cheat")) >= 4
    assert kinds["mistake"] >= 25
    assert len({row.what for row in ANSWERS}) == len(ANSWERS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("row", PARAMETERS)
def test_what_the_grader_says(row: Row) -> None:
    found = graded(row)
    text = re.sub(" +", " ", brief(found))
    assert f"{found.points}/{found.possible}" == row.points, text
    at = 0
    for words in row.says:
        at = text.find(words, at)
        assert at >= 0, f"{words!r} is not in, or not in this place of:\n{text}"
    assert not any(words in text for words in row.never), text
    assert text.count("found:") <= 1  # the root cause alone is shown in full
    is_accused = "did not go through" in text
    assert is_accused == (row.what == "passes parameters on where nothing counts")
    assert "Traceback" not in text


def test_a_copy_of_a_solution_is_named_to_instructors() -> None:
    row = next(row for row in ANSWERS if row.what == "a published solution under other names")
    mine = hand_in_parts(row.source, [find_exercise(row.exercise)], "hw.py")
    assert "MyZero3 is 100% like solutions/zero3.py, MyZero3" in likenesses(mine, [published_parts(None)])


if __name__ == "__main__":
    for one in ANSWERS:
        sys.stdout.write(f"{one.kind}: {one.what}\n{brief(graded(one))}\n\n")
