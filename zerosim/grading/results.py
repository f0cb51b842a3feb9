"""Grades as data: for programs, and for Gradescope."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from zerosim.errors import printable
from zerosim.grading.handin import HandIn
from zerosim.grading.paths import Path, number
from zerosim.grading.report import Grade, brief


def values(hand_in: HandIn, grades: list[Grade], path: Path | None = None) -> dict[str, Any]:
    """Return the values that `zerosim grade --json` writes."""
    return {
        "schema": 1,
        "file": printable(hand_in.path),
        "seed": hand_in.seed,
        **({"path": {"name": path.name, "version": path.version, "score": number(path.total(grades))}} if path else {}),
        "skipped": list(hand_in.skipped),
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


def gradescope(grades: list[Grade], path: Path | None = None) -> dict[str, Any]:
    """Return the results.json of an autograder: weights, or a path's share of 100. An exercise without an answer counts
    0."""
    rows = [(one, one.score, Fraction(one.exercise.weight)) for one in grades]
    if path is not None:
        rows = [(one, path.points(one), path.most(one.exercise)) for one in grades if one.exercise.name in path.names]
    tests = [
        {"name": one.title, "score": float(score), "max_score": float(most), "output": brief(one)}
        for one, score, most in rows
    ]
    there = [one.exercise.name for one in grades]
    missing = [one for one in path.exercises if one.name not in there] if path else []
    tests += [
        {"name": f"Exercise {one.number}, {one.title}", "score": 0.0, "max_score": float(path.most(one)),
         "output": "no answer"}
        for one in missing if path
    ]  # fmt: skip
    return {"tests": tests}
