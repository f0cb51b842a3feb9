"""Grades as data: for programs, and for Gradescope."""

from __future__ import annotations

from typing import Any

from zerosim.grading.handin import HandIn
from zerosim.grading.report import Grade


def values(hand_in: HandIn, grades: list[Grade], seed: int) -> dict[str, Any]:
    """What `zerosim grade --json` writes."""
    return {
        "schema": 1,
        "file": hand_in.path,
        "seed": seed,
        "skipped": list(hand_in.magics),
        "grades": [
            {
                "exercise": grade.exercise.name,
                "state": grade.state,
                "points": grade.points,
                "possible": grade.possible,
                "why": grade.verdict.void,
                "checks": [
                    {key: getattr(check, key) for key in ("name", "passed", "expected", "counted", "case", "hint")}
                    for check in grade.checks
                ],
            }
            for grade in grades
        ],
    }


def gradescope(grades: list[Grade]) -> dict[str, Any]:
    """The results.json of an autograder."""
    tests = [{"name": one.title, "score": one.points, "max_score": one.possible, "output": str(one)} for one in grades]
    return {"tests": tests}
