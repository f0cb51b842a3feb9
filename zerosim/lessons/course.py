"""The course: its notebooks, their order and minutes, and the place of their files.

`course.toml` holds the rows. The files are in the repository, and in a wheel below `lessons/material`.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path as Folder
from typing import Any

import zerosim
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.paths import PATHS

KINDS = {
    "lesson": "lesson",
    "when needed": "when you need it",
    "reading": "reading",
    "quizzes": "quizzes",
    "exercises": "exercises",
}


@dataclass(frozen=True, slots=True)
class Lesson:
    """A notebook. `minutes` are for reading and running it, without its exercises."""

    file: str
    kind: str
    minutes: int
    needs: tuple[str, ...]
    question: str
    exercises: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.file[:2]


@dataclass(frozen=True, slots=True)
class Part:
    """A lesson on a path, or a part of it, with the minutes that the path gives it."""

    lesson: Lesson
    minutes: int
    part: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """A path through the course: parts of lessons in their order, and exercises by name."""

    name: str
    parts: tuple[Part, ...]
    exercises: tuple[str, ...]
    note: str = ""

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts) + sum(map(exercise_minutes, self.exercises))


@dataclass(frozen=True, slots=True)
class Course:
    lessons: tuple[Lesson, ...]
    ways: tuple[Way, ...]

    def lesson(self, file: str) -> Lesson:
        """Find a lesson by its file's name or its number. Raises: KeyError."""
        found = [lesson for lesson in self.lessons if file in (lesson.file, lesson.number)]
        if not found:
            raise KeyError(file)
        return found[0]


@cache
def course() -> Course:
    """Read `course.toml`."""
    rows = _rows()
    lessons = tuple(
        Lesson(**row | {"needs": tuple(row["needs"]), "exercises": tuple(row.get("exercises", ()))})
        for row in rows["lessons"]
    )
    by_number = {lesson.number: lesson for lesson in lessons}
    exercises = {path.name: tuple(one.name for one in path.exercises) for path in PATHS}

    def part(number: str, minutes: int | None = None, part: str = "") -> Part:
        lesson = by_number[number]
        return Part(lesson, lesson.minutes if minutes is None else minutes, part)

    ways = tuple(
        Way(name, tuple(part(**row) for row in way["lessons"]), exercises[name], way.get("note", ""))
        for name, way in rows["paths"].items()
    )
    return Course(lessons, ways)


def exercise_minutes(name: str) -> int:
    """Return the planned minutes of an exercise, by its weight. Raises: InputError for an unknown one."""
    return int(_rows()["exercise_minutes"][str(find_exercise(name).weight)])


def _rows() -> dict[str, Any]:
    return tomllib.loads(resources.files("zerosim.lessons").joinpath("course.toml").read_text("utf-8"))


def project_url() -> str | None:
    """Look up the project's address: `Repository` of pyproject.toml's `[project.urls]`, None if it is not set.

    Badges and links to source files follow from this one setting. Install again after changing it.
    """
    try:
        urls = importlib.metadata.metadata("zerosim").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Repository", "").rstrip("/") or None


def material(name: str) -> Folder:
    """Find the folder of `notebooks` or `scenarios`: a wheel's own, else the repository's."""
    package = Folder(zerosim.__file__).parent
    packed = package / "lessons" / "material" / name
    return packed if packed.is_dir() else package.parent / name
