"""All exercises in order, and one of them by its name or number."""

from __future__ import annotations

import difflib

from zerosim.errors import InputError
from zerosim.grading.exercise import Exercise
from zerosim.grading.seeded import SEEDED
from zerosim.grading.written import WRITTEN

EXERCISES: tuple[Exercise, ...] = (*WRITTEN, *SEEDED)


def find_exercise(wanted: Exercise | str | int) -> Exercise:
    """By name or number. Raises: InputError for an unknown one, with the nearest."""
    if isinstance(wanted, Exercise):
        return wanted
    for one in EXERCISES:
        if wanted in (one.name, one.number):
            return one
    names = [one.name for one in EXERCISES]
    near = difflib.get_close_matches(str(wanted), names, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected 1 to {len(names)} or one of {', '.join(names)}"
    raise InputError(f"no exercise {wanted!r}: {hint}")
