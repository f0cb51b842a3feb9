"""`grade`: run an answer on an exercise's cases, check each, and say what came of it.

Owns the order of things and how the checks of several cases become one. Whatever an answer does ends
here in a `Grade`; only an unknown exercise is an error of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerosim.build import build_strategy
from zerosim.errors import InputError
from zerosim.grading.blame import blame
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Case, Check, Comparison, Exercise
from zerosim.grading.report import Grade
from zerosim.grading.source import line_of_trace
from zerosim.grading.trial import Trial, attempt
from zerosim.stepper import DebugWorld, debug


def grade(answer: Any, exercise: Exercise | str | int) -> Grade:
    """What an answer (a strategy's class, or a function where the exercise asks for one) is worth.

    Runs it on each of the exercise's cases, beside DDP and the stage's reference: weights bit by bit, bytes per
    rank and volume against the targets. Takes about a second; an answer that never ends is ended.

    Raises: InputError for an unknown exercise.
    """
    one = find_exercise(exercise)
    try:
        make = one.adapt(answer)
        own = one.examine(answer) if one.examine is not None else []
    except InputError as error:
        return _grade(one, [Check("answer", False, "what the exercise asks for", str(error))])
    except NotImplementedError as error:
        return _grade(one, [], unsolved=str(error), line=line_of_trace(error.__traceback__))
    if any(not check.passed for check in own):
        return _grade(one, own)
    runs: list[Check] = []
    by_name: dict[str, list[Check]] = {name: [] for name, _ in one.judges}
    for case in one.cases:
        mine = attempt(case.config, make)
        if mine.failure is not None and mine.failure.reason == "unsolved":
            return _grade(one, own, unsolved=mine.failure.text, line=mine.failure.line)
        run = _ran(case, mine)
        runs.append(run)
        if not run.passed:  # the next case would fail alike, and an endless one takes its time
            break
        for name, check in _judged(one, case, mine):
            by_name[name].append(check)
    merged = [_merged(name, checks, len(one.cases)) for name, checks in by_name.items()]
    return _grade(one, [*own, _merged("runs", runs, len(one.cases)), *merged])


def step_into(answer: Any, exercise: Exercise | str | int, case: int = 0) -> DebugWorld:
    """One of the exercise's runs with this answer, to be stepped: `world.next(rank=, count=)` goes where a grade says.

    Raises: InputError for an unknown exercise or case, and for an answer that is not what is asked for.
    """
    one = find_exercise(exercise)
    if not 0 <= case < len(one.cases):
        raise InputError(f"case {case}: exercise {one.name!r} has cases 0 to {len(one.cases) - 1}")
    return debug(one.cases[case].config, make_strategy=one.adapt(answer))


def _judged(one: Exercise, case: Case, mine: Trial) -> Iterator[tuple[str, Check]]:
    schedule = attempt(case.config, build_strategy)
    ddp = schedule if one.stage == 0 else attempt(case.config.replace(stage=0), build_strategy)
    comparison = Comparison(case, one, mine, schedule, ddp)
    for name, judge in one.judges:
        yield name, _in_case(judge(comparison), case)


def _ran(case: Case, trial: Trial) -> Check:
    expected = f"{case.config.steps} steps on {case.config.ranks} ranks, to the end"
    if trial.failure is None:
        return Check("runs", True, expected, "ended", case.label)
    found = blame(trial)
    return Check("runs", False, expected, found.words, case.label, trial.failure.line, found.hint, found.where)


def _in_case(check: Check, case: Case) -> Check:
    return Check(
        check.name, check.passed, check.expected, check.counted, case.label, check.line, check.hint, check.where
    )


def _merged(name: str, checks: list[Check], cases: int) -> Check:
    """The first failure of several cases; else, where all were reached, the first."""
    failed = next((check for check in checks if not check.passed), None)
    return failed or (checks[0] if len(checks) == cases else Check(name, None))


def _grade(one: Exercise, checks: list[Check], *, unsolved: str = "", line: str = "") -> Grade:
    return Grade(one, tuple(checks), unsolved, line)
