"""`grade`: an answer is run on an exercise's cases, each is checked, and what came of it is said.

Owns the order of things and how the checks of several cases become one. Whatever an answer does ends
here in a `Grade`; only an unknown exercise is an error of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.apart import judged_apart
from zerosim.grading.blame import blame
from zerosim.grading.borrowed import changed, noted, state_of_zerosim
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Case, Check, Comparison, Exercise, Unsolved, Verdict, run_to_the_end
from zerosim.grading.report import Grade
from zerosim.grading.trial import Trial, attempt
from zerosim.grading.watch import Watch
from zerosim.grading.words import error_words
from zerosim.stepper import DebugWorld, debug
from zerosim.train.build import build_strategy


def grade(answer: Any, exercise: Exercise | str | int) -> Grade:
    """What an answer (a strategy's class, or a function where the exercise asks for one) is worth.

    Runs it on each of the exercise's cases, beside DDP and the stage's reference: weights bit by bit, bytes per
    rank and volume against the targets. Takes a second or two.

    The answer runs in a process of its own, on a copy of itself (`carrying.py`): what it prints is shown here,
    what it changes in your variables stays there. One that never ends is ended, whatever it does; so is one under
    way at Ctrl-C. `step_into` runs it in this process, to be looked at.

    Raises: InputError for an unknown exercise.
    """
    one = find_exercise(exercise)
    try:
        one.adapt(answer)
    except InputError as error:
        return Grade(one, Verdict((_refused(error),)))
    return Grade(one, judged_apart(answer, one))


def step_into(answer: Any, exercise: Exercise | str | int, case: int = 0) -> DebugWorld:
    """One of the exercise's runs with this answer, to be stepped: `world.next(rank=, count=)` goes where a grade says.

    Raises: InputError for an unknown exercise or case, and for an answer that is not what is asked for.
    """
    one = find_exercise(exercise)
    if not 0 <= case < len(one.cases):
        raise InputError(f"case {case}: exercise {one.name!r} has cases 0 to {len(one.cases) - 1}")
    return debug(one.cases[case].config, make_strategy=one.adapt(answer))


def judged(load: Callable[[], Any], one: Exercise, watch: Watch, begin: Callable[[str], None]) -> Verdict:
    """The verdict on the answer that `load` gives, run in this very process. `begin` is told each case's label.

    All that is the student's runs first, the references after it, when zerosim is known to be as it was.
    """
    with noted(one.yours) as borrowed:
        before, cases = state_of_zerosim(), repr(one.cases)
        own, trials = _ran(load, one, watch, begin)
        names = [*changed(before), *(["the run's configuration"] if repr(one.cases) != cases else [])]
    if names:
        return Verdict((_untouched(names),))
    void = f"{_listed(sorted(borrowed))}, zerosim's own, did the work: write it yourself" if borrowed else ""
    if isinstance(own, Unsolved):
        return Verdict(unsolved=own)
    if any(not check.passed for check in own):
        return Verdict(tuple(own), void=void)
    by_name: dict[str, list[Check]] = {name: [] for name in ("runs", *(name for name, _ in one.judges))}
    for case, mine in trials:
        for check in _checked(one, case, mine, watch):
            by_name[check.name].append(check)
    return Verdict((*own, *(_merged(name, checks, len(one.cases)) for name, checks in by_name.items())), void=void)


def _ran(
    load: Callable[[], Any], one: Exercise, watch: Watch, begin: Callable[[str], None]
) -> tuple[list[Check] | Unsolved, list[tuple[Case, Trial]]]:
    """Checks of the answer by itself, and its runs up to the first that fails."""
    trials: list[tuple[Case, Trial]] = []
    try:
        answer = load()
        make = one.adapt(answer)
    except InputError as error:
        return [_refused(error)], trials
    own = one.examine(answer, watch) if one.examine is not None else []
    if isinstance(own, Unsolved) or any(not check.passed for check in own):
        return own, trials
    for case in one.cases:
        begin(case.label)
        try:
            mine = attempt(case.config, make, watch)
        except InputError as error:  # the answer has changed what this case is
            return [_refused(error)], trials
        if mine.failure is not None and mine.failure.reason == "unsolved":
            return Unsolved(mine.failure.text, mine.failure.line), trials
        trials.append((case, mine))
        if mine.failure is not None:  # the next case would fail alike, and an endless one takes its time
            break
    return own, trials


def _checked(one: Exercise, case: Case, mine: Trial, watch: Watch) -> Iterator[Check]:
    def reference(stage: int) -> Trial:
        return attempt(
            case.config.replace(stage=stage), build_strategy, Watch(watch.beat)
        )  # in no time of the answer's

    expected = run_to_the_end(case.config)
    if mine.failure is not None:
        found = blame(mine, lambda: reference(one.stage))
        yield Check("runs", False, expected, found.words, case.label, mine.failure.line, found.hint, found.where)
        return
    yield Check("runs", True, expected, "ended", case.label)
    schedule = reference(one.stage)
    ddp = schedule if one.stage == 0 else reference(0)
    comparison = Comparison(case, one, mine, schedule, ddp)
    for name, judge in one.judges:
        try:
            check = judge(comparison)
        except Exception as error:  # of a run that leaves out what every run has
            check = Check(name, False, "a run that can be checked", error_words(error))
        yield replace(check, case=case.label)


def _untouched(names: list[str]) -> Check:
    counted = f"{_listed(names)} changed while it ran"
    hint = "a strategy changes its own buffers and itself: what you would change in zerosim, override in your class"
    return Check("answer", False, "zerosim as it was", counted, hint=hint)


def _listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and 3 more'."""
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([part for part in (", ".join(shown[:-1]), shown[-1]) if part])


def _merged(name: str, checks: list[Check], cases: int) -> Check:
    """The first failure of several cases; else, where all were reached, the first."""
    failed = next((check for check in checks if not check.passed), None)
    return failed or (checks[0] if len(checks) == cases else Check(name, None))


def _refused(error: InputError) -> Check:
    return Check("answer", False, "what the exercise asks for", str(error))
