"""The result of an answer to an exercise: checks, a verdict."""

from __future__ import annotations

from typing import NamedTuple

from zerosim.device.events import Event
from zerosim.grading.limits import Failure
from zerosim.grading.own_code import OwnLine
from zerosim.grading.record import LiveBytes, Where


class Check(NamedTuple):
    """One requirement of a solution. `passed` None: the run did not get so far.

    For a failure, `line` is the student's own line, `hint` what to look at and `where` the rank and event.
    """

    name: str
    passed: bool | None
    expected: str = ""
    counted: str = ""
    case: str = ""
    line: str = ""
    hint: str = ""
    where: Where | None = None


class Recorded(NamedTuple):
    """The ranks' records of one of an answer's runs: the run of the first failure, else the first one. `rank` is the
    failure's. `lines` and `sources`: see `Left` in `trial.py`."""

    case: str
    rank: int
    records: list[list[Event]]
    lines: list[list[int]]
    sources: list[list[OwnLine]]

    @property
    def events(self) -> list[Event]:
        """The record of the rank."""
        return self.records[self.rank]


class Verdict(NamedTuple):
    """The result of an answer.

    unsolved   the part still to write, and the line that reaches it
    void       why nothing of the answer counts, '' if it counts
    hooks      lines on which collectives each hook called, beside the reference's (`hooks.py`), of the run of the
               first failure; none without a failure
    recorded   the records to draw; None if nothing was run
    """

    checks: tuple[Check, ...] = ()
    unsolved: Failure | None = None
    void: str = ""
    hooks: tuple[str, ...] = ()
    recorded: Recorded | None = None

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if check.passed is False)


VERDICTS = (Verdict, Check, Where, LiveBytes, Recorded, OwnLine)
"""The records of a verdict (`plain.py`)."""
