"""The solutions of the exercises, in notebooks/solutions: each is graded full. And none is kept in the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from grading_here import grade

from zerosim.grading import EXERCISES, Exercise
from zerosim.grading.variants import variant

FOLDER = Path(__file__).parents[2] / "notebooks" / "solutions"


def solution(exercise: Exercise) -> Any:
    """What the exercise's file defines under the name of what is given."""
    spec = importlib.util.spec_from_file_location(f"solution_{exercise.name}", FOLDER / f"{exercise.name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, exercise.given.__name__)


def test_every_exercise_has_a_solution_and_no_file_is_left_over() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(exercise.name for exercise in EXERCISES)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_is_graded_full(exercise: Exercise) -> None:
    grade_ = grade(solution(exercise), exercise, carried=True)
    assert grade_.state == "solved", str(grade_)
    assert grade_.points == grade_.possible == len(grade_.checks)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_is_graded_full_in_a_variant(exercise: Exercise) -> None:
    grade_ = grade(solution(exercise), variant(exercise, seed=1 + EXERCISES.index(exercise) % 3))
    assert grade_.state == "solved", str(grade_)


def test_solutions_are_short() -> None:
    """A student fills few lines: what a solution adds to what is given."""
    for exercise in EXERCISES:
        given = {line.strip() for line in exercise.skeleton.splitlines()}
        own = (FOLDER / f"{exercise.name}.py").read_text("utf-8").splitlines()
        added = [line for line in own if line.startswith("    ") and line.strip() not in given]
        assert len(added) <= 16, (exercise.name, len(added))


if __name__ == "__main__":
    for one in EXERCISES:
        sys.stdout.write(f"{grade(solution(one), one)}\n")
