"""Grades as data: for programs, and for Gradescope."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from zerosim.errors import printable
from zerosim.grading.exercise import Exercise
from zerosim.grading.paths import Path, number
from zerosim.grading.report import Grade, brief


def values(
    file: str, seed: int, of: Sequence[Exercise], grades: Sequence[Grade], *,
    skipped: Sequence[str] = (), path: Path | None = None, why: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the values that `zerosim grade --json` writes. `of` are the exercises that count, answered or not; `why`
    says why nothing could be graded."""
    scored = [_scored(one, grades, None) for one in of]
    return {
        "schema": 1,
        "file": printable(file),
        "seed": seed,
        **(
            {"path": {"name": path.name, "version": path.version, "score": number(path.total([*grades]))}}
            if path
            else {}
        ),
        "score": float(sum(score for score, _ in scored)),
        "most": float(sum(most for _, most in scored)),
        "error": printable(why),
        "skipped": list(skipped),
        "grades": [
            {
                "exercise": grade.exercise.name,
                "state": grade.state,
                "points": grade.points,
                "possible": grade.possible,
                "weight": grade.exercise.weight,
                "why": grade.verdict.void,
                "collectives": list(grade.verdict.hooks),
                "checks": [
                    {key: getattr(check, key) for key in ("name", "passed", "expected", "counted", "case", "hint")}
                    for check in grade.checks
                ],
            }
            for grade in grades
        ],
    }


def gradescope(
    of: Sequence[Exercise], grades: Sequence[Grade], path: Path | None = None, why: str = ""
) -> dict[str, Any]:
    """Return the results.json of an autograder: weights, or a path's share of 100. An exercise without an answer counts
    0, so the most that a hand-in can reach does not depend on what it holds."""
    outputs = {grade.exercise.name: brief(grade) for grade in grades}
    tests = []
    for one in of:
        score, most = _scored(one, grades, path)
        name, text = f"Exercise {one.number}, {one.title}", outputs.get(one.name, why or "no answer")
        tests.append(
            {
                "name": name,
                "score": float(score),
                "max_score": float(most),
                "output": text if one.name in outputs else printable(text),
            }
        )
    return {**({"output": printable(why)} if why else {}), "tests": tests}


def _scored(one: Exercise, grades: Sequence[Grade], path: Path | None) -> tuple[Fraction, Fraction]:
    """Return what an exercise's answer reaches, and the most."""
    grade = next((grade for grade in grades if grade.exercise.name == one.name), None)
    if path is not None:
        return path.points(grade) if grade else Fraction(0), path.most(one)
    return grade.score if grade else Fraction(0), Fraction(one.weight)
