"""An exercise. The result of an answer to it: `verdict.py`.

The exercises themselves are in `catalogue.py`, their checks in `checks.py` and `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.grading.asking import Examination
from zerosim.grading.given.bugs import source_of
from zerosim.grading.trial import Own, Trial
from zerosim.grading.verdict import Check


class Case(NamedTuple):
    """One run that a solution must pass."""

    label: str
    config: RunConfig

    @property
    def expected(self) -> str:
        """The expected run, in words."""
        return f"{self.config.optim.steps} steps on {self.config.mesh.ranks} ranks, to the end"


class Comparison(NamedTuple):
    """One case, run with the student's strategy, the ZeRO stage's reference, and DDP."""

    case: Case
    exercise: Exercise
    mine: Trial
    reference: Trial
    ddp: Trial

    @property
    def steps(self) -> range:
        return range(self.case.config.optim.steps or 1)


Judge = Callable[[Comparison], Check]


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise.

    weight     its worth beside the others, by difficulty
    given      the start of a solution: the skeleton, or the strategy with a bug
    stage      the ZeRO stage of the reference run
    cases      its runs; none if an answer is only asked questions
    judges     the checks, in order
    volume     elements that may be sent per rank and step, times N/(N-1), in words and as
               volume(config, Psi, tied elements)
    gathered   how many whole parameter buffers may be gathered at once; None: not checked
    slack      by how many units the peak may exceed the reference's
    adapt      turns the student's answer into a part of a run
    decisive   the checks without which no other counts: right weights and, for a bug, the check that it fails
    yours      methods of a strategy, or functions, that must not be zerosim's own (`borrowed.py`)
    examine    the questions to the answer before any run (`asking.py`)
    more       what the notebook says of the task beside the question
    notebook   the notebook that asks for it
    words      groups of `given/words.toml` that an answer needs
    refer      makes the collectives of the stage's reference those that the exercise asks for (`hooks.py`)
    """

    number: int
    name: str
    title: str
    weight: int
    question: str
    given: Any
    stage: int
    cases: tuple[Case, ...]
    judges: tuple[tuple[str, Judge], ...]
    volume: tuple[str, Callable[[RunConfig, int, int], Fraction]]
    hints: tuple[str, ...]
    adapt: Callable[[Any], Own]
    yours: tuple[str, ...] = ()
    decisive: tuple[str, ...] = ("weights",)
    gathered: int | None = None
    slack: int = 0
    examine: Examination | None = None
    more: str = ""
    notebook: str = ""
    words: tuple[str, ...] = ()
    refer: Callable[[Trial], Trial] = lambda trial: trial

    @property
    def skeleton(self) -> str:
        """The source of what is given, whole."""
        return source_of(self.given)

    def hint(self, number: int = 1) -> str:
        """Return the hints one by one; the first says least. Raises: InputError if there are fewer."""
        if not 1 <= number <= len(self.hints):
            raise InputError(f"hint {number}: exercise {self.name!r} has hints 1 to {len(self.hints)}")
        return self.hints[number - 1]

    def __repr__(self) -> str:
        return f"Exercise {self.number}, {self.name}: {self.title}"
