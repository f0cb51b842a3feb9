"""A path is worth 100, whatever is on it; and wrong results of training are worth nothing."""

from __future__ import annotations

import hashlib

import pytest

from zerosim.grading import EXERCISES, Check, Grade
from zerosim.grading.exercise import Exercise
from zerosim.grading.paths import PATHS, Path
from zerosim.grading.results import gradescope
from zerosim.grading.verdict import Verdict

VERSIONS = {"hour": (1, "71d7784982ee"), "day": (1, "a225df70ed58"), "weeks": (9, "bd170954f056")}
"""A path's version, and a digest of what it is scored by: where the digest changes, the version goes up."""

each_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


def names(one: Exercise) -> list[str]:
    first = [one.examine.name] if one.examine else []
    return [*first, *(["runs"] if one.cases else []), *(name for name, _ in one.judges)]


def grade(one: Exercise, *wrong: str) -> Grade:
    return Grade(one, Verdict(tuple(Check(name, name not in wrong) for name in names(one))))


@each_path
def test_a_path_is_worth_100(path: Path) -> None:
    assert path.total([grade(one) for one in path.exercises]) == 100
    assert path.total([grade(one) for one in EXERCISES]) == 100
    assert path.total([]) == 0
    assert sum(map(path.most, path.exercises)) == 100
    tests = gradescope(path.exercises, [grade(path.exercises[0])], path)["tests"]
    assert len(tests) == len(path.exercises)
    assert sum(test["max_score"] for test in tests) == pytest.approx(100)
    assert sum(test["score"] for test in tests) == pytest.approx(float(path.most(path.exercises[0])))


@each_path
def test_a_version_says_what_a_path_is_scored_by(path: Path) -> None:
    rows = [(one.name, one.weight, sorted(names(one)), one.decisive) for one in path.exercises]
    assert VERSIONS[path.name] == (path.version, hashlib.sha256(repr(rows).encode()).hexdigest()[:12])


@pytest.mark.parametrize("one", EXERCISES, ids=lambda one: one.name)
def test_wrong_results_of_training_are_no_points(one: Exercise) -> None:
    assert one.weight in (1, 2, 3)
    assert grade(one).score == one.weight
    results = {"weights", "losses", "gradients", "steps"} & set(names(one))
    assert results or not one.judges
    for name in (*results, *one.decisive):
        assert grade(one, name).score == 0, name
