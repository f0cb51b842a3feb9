"""What an exercise is: a question, what is given, the runs it must pass and their targets.

Owns the data types. The exercises themselves are in `catalogue.py`, the checks in `checks.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from zerosim.errors import InputError
from zerosim.grading.looking import Where
from zerosim.grading.trial import Make, Trial
from zerosim.scenario import RunConfig


class Case(NamedTuple):
    """One run that a solution must pass."""

    label: str
    config: RunConfig


class Comparison(NamedTuple):
    """One case, run with the student's strategy, the stage's reference and, where bits are equal, DDP."""

    case: Case
    exercise: Exercise
    mine: Trial
    schedule: Trial
    ddp: Trial


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is asked of a solution. `passed` None: the run did not get so far.

    `line` is the student's own line, `hint` what to look at and `where` the rank and event, of failures.
    """

    name: str
    passed: bool | None
    expected: str = ""
    counted: str = ""
    case: str = ""
    line: str = ""
    hint: str = ""
    where: Where | None = None


Judge = Callable[[Comparison], Check]


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise.

    given      the skeleton or the strategy with a bug: what a solution begins with
    stage      the ZeRO stage whose reference run it is held against
    judges     the checks, in order
    volume     elements that may be sent per rank and step, times N/(N-1), in words and as
               volume(config, Psi, tied elements)
    gathered   how many whole parameter buffers may be there at once; None: not asked
    slack      how many units the peak may lie above the reference's
    adapt      makes strategies of what the student hands in
    examine    checks of what is handed in by itself, before any run
    """

    number: int
    name: str
    title: str
    question: str
    given: Any
    stage: int
    cases: tuple[Case, ...]
    judges: tuple[tuple[str, Judge], ...]
    volume: tuple[str, Callable[[RunConfig, int, int], Fraction]]
    hints: tuple[str, ...]
    adapt: Callable[[Any], Make]
    gathered: int | None = None
    slack: int = 0
    examine: Callable[[Any], list[Check]] | None = None

    @property
    def skeleton(self) -> str:
        """The source of what is given."""
        return inspect.getsource(self.given)

    def hint(self, number: int = 1) -> str:
        """The hints one by one, the first says least. Raises: InputError where there are not so many."""
        if not 1 <= number <= len(self.hints):
            raise InputError(f"hint {number}: exercise {self.name!r} has hints 1 to {len(self.hints)}")
        return self.hints[number - 1]

    def __repr__(self) -> str:
        return f"Exercise {self.number}, {self.name}: {self.title}"
