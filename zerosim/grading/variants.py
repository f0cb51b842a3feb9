"""Variants of an exercise by seed, for what is graded for credit: other sizes and another number of ranks.

Seed 0 is the exercise as it is printed. Only plain runs over data vary: an exercise on a pipeline, on cut layers or on
runs whose sizes are the point (a table's own `hidden`) keeps its sizes.
"""

from __future__ import annotations

import dataclasses
import random

from zerosim.errors import InputError
from zerosim.grading.exercise import Case, Exercise

MOST = 2**31 - 1


def variant(one: Exercise, seed: int) -> Exercise:
    """The exercise as that seed has it. Raises: InputError for a seed out of range."""
    if not 0 <= seed <= MOST:
        raise InputError(f"--seed {seed}: expected 0 to {MOST}")
    if seed == 0:
        return one
    draw = random.Random(f"{one.name} {seed}")
    return dataclasses.replace(one, cases=tuple(_other(case, draw) for case in one.cases))


def _other(case: Case, draw: random.Random) -> Case:
    config, sizes = case.config, {"seq": draw.randint(4, 8), "vocab": draw.choice((240, 256, 272))}
    plain = config.mesh.pp == config.mesh.tp == 1 and config.model.hidden == 24
    return Case(f"{case.label}, variant", config.replace(**sizes)) if plain else case
