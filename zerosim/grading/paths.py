"""Paths through the exercises, and the worth of an answer to several of them: weights scaled to 100 points."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources

from zerosim.errors import InputError
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Exercise
from zerosim.grading.report import Grade

_ROWS = tomllib.loads(resources.files("zerosim.grading.given").joinpath("paths.toml").read_text("utf-8"))
FULL = 100


@dataclass(frozen=True, slots=True)
class Path:
    """A path: its exercises in their order. The version changes with them and with their weights."""

    name: str
    version: int
    exercises: tuple[Exercise, ...]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.exercises]

    @property
    def title(self) -> str:
        return f"path {self.name}, version {self.version}"

    def points(self, grade: Grade) -> Fraction:
        """Return a grade's points of the path's 100; 0 if its exercise is not on the path."""
        whole = sum(one.weight for one in self.exercises)
        return FULL * grade.score / whole if grade.exercise.name in self.names else Fraction(0)

    def most(self, one: Exercise) -> Fraction:
        """Return the most points of an exercise of the path."""
        return Fraction(FULL * one.weight, sum(other.weight for other in self.exercises))

    def total(self, grades: Sequence[Grade]) -> Fraction:
        """Return the points of 100. An exercise without an answer counts 0."""
        return sum((self.points(grade) for grade in grades), Fraction(0))


PATHS = tuple(Path(name, row["version"], tuple(map(find_exercise, row["exercises"]))) for name, row in _ROWS.items())


def find_path(name: str) -> Path:
    """Return a path by name. Raises: InputError for an unknown one, with the nearest."""
    names = [path.name for path in PATHS]
    if name in names:
        return PATHS[names.index(name)]
    near = difflib.get_close_matches(name, names, 1)
    raise InputError(f"--path {name}: expected {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else ""))


def number(points: Fraction) -> float:
    """Return a score with one decimal."""
    return round(float(points), 1)
