"""`grade`: an answer is run on an exercise's cases, each run is checked, and the checks of all cases become one grade.

Whatever an answer does ends here in a `Grade`; only an unknown exercise is an error of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.blame import blame
from zerosim.grading.borrowed import changed, noted, state_of_zerosim
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Case, Check, Comparison, Exercise, Verdict
from zerosim.grading.limits import Failure, Watch
from zerosim.grading.own_code import error_words
from zerosim.grading.process import judged_in_process
from zerosim.grading.report import Grade
from zerosim.grading.trial import Own, Trial, attempt
from zerosim.stepper import DebugWorld, debug

Begin = Callable[[str], None]
"""Called with each case's label, before it is run."""


def grade(answer: Any, exercise: Exercise | str | int) -> Grade:
    """What an answer (a strategy's class, or a function where the exercise asks for one) is worth.

    Runs it on each of the exercise's cases, beside DDP and the stage's reference: weights bit by bit, bytes per
    rank and volume against the targets. Takes a second or two.

    The answer runs in a process of its own, on a copy of itself (`pickling.py`): what it prints is shown here,
    what it changes in your variables stays there. One that never ends is ended, whatever it does; so is one under
    way at Ctrl-C. `step_into` runs it in this process, to be looked at.

    Raises: InputError for an unknown exercise.
    """
    one = find_exercise(exercise)
    try:
        one.adapt(answer)
    except InputError as error:
        return Grade(one, Verdict((_refused(error),)))
    return Grade(one, judged_in_process(answer, one))


def step_into(answer: Any, exercise: Exercise | str | int, case: int = 0) -> DebugWorld:
    """One of the exercise's runs with this answer, to be stepped: `world.next(rank=, count=)` goes where a grade says.

    Raises: InputError for an unknown exercise or case, and for an answer that is not what is asked for.
    """
    one = find_exercise(exercise)
    if not one.cases:
        raise InputError(f"exercise {one.name!r}: its answer is asked by itself, and nothing is run; see grade")
    if not 0 <= case < len(one.cases):
        raise InputError(f"case {case}: exercise {one.name!r} has cases 0 to {len(one.cases) - 1}")
    own = one.adapt(answer)
    if own.allocator is not Own().allocator:
        raise InputError(f"exercise {one.name!r}: memory is handed out between two events, where no world is stopped")
    return debug(one.cases[case].config, make_strategy=own.strategy, schedule=own.schedule)


def judged(load: Callable[[], Any], one: Exercise, watch: Watch, begin: Begin) -> Verdict:
    """The verdict on the answer that `load` gives, run in this very process.

    All that is the student's runs first, the references after it, when zerosim is known to be as it was.
    """
    trials: list[tuple[Case, Trial]] = []
    with noted(one.yours) as borrowed:
        before, cases = state_of_zerosim(), repr(one.cases)
        try:
            own = _ran(load, one, watch, begin, trials)
        except InputError as error:  # it is not what is asked for, or has changed what a case is
            own = (_refused(error),)
        names = [*changed(before), *(["the run's configuration"] if repr(one.cases) != cases else [])]
    if names:
        counted = f"{_listed(names)} changed while it ran"
        hint = "a strategy changes its own buffers and itself: what you would change in zerosim, override in your class"
        return Verdict((Check("answer", False, "zerosim as it was", counted, hint=hint),))
    if isinstance(own, Failure):
        return Verdict(unsolved=own)
    void = f"{_listed(sorted(borrowed))}, zerosim's own, did the work: write it yourself" if borrowed else ""
    if any(not check.passed for check in own) or not one.cases:
        return Verdict(own, void=void)
    by_name: dict[str, list[Check]] = {name: [] for name in ("runs", *(name for name, _ in one.judges))}
    for case, mine in trials:
        for check in _checked(one, case, mine, watch):
            by_name[check.name].append(check._replace(case=case.label))
    merged = (_merged(name, checks, len(one.cases)) for name, checks in by_name.items())
    return Verdict((*own, *merged), void=void)


def _ran(
    load: Callable[[], Any], one: Exercise, watch: Watch, begin: Begin, trials: list[tuple[Case, Trial]]
) -> tuple[Check, ...] | Failure:
    """Put an answer's runs into `trials`, up to the first that fails; the check of it by itself, where there is one."""
    answer = load()
    adapted = one.adapt(answer)
    own = one.examine(answer, watch) if one.examine is not None else ()
    if isinstance(own, Failure) or any(not check.passed for check in own):
        return own
    for case in one.cases:
        begin(case.label)
        mine = attempt(case.config, adapted, watch)
        failure = mine.failure
        if failure is not None and failure.reason == "unsolved":
            return failure
        trials.append((case, mine))
        if failure is not None:  # the next case would fail alike, and an endless one takes its time
            break
    return own


def _checked(one: Exercise, case: Case, mine: Trial, watch: Watch) -> Iterator[Check]:
    def reference(stage: int) -> Trial:  # in no time of the answer's
        return attempt(case.config.replace(stage=stage), watch=Watch(watch.beat))

    if mine.failure is not None:
        found = blame(mine, lambda: reference(one.stage))
        line, hint, at = mine.failure.line, found.hint, found.where
        yield Check("runs", False, case.expected, found.words, line=line, hint=hint, where=at)
        return
    yield Check("runs", True, case.expected, "ended")
    theirs = reference(one.stage)
    comparison = Comparison(case, one, mine, theirs, theirs if one.stage == 0 else reference(0))
    for name, judge in one.judges:
        try:
            yield judge(comparison)
        except Exception as error:  # of a run that leaves out what every run has
            yield Check(name, False, "a run that can be checked", error_words(error))


def _merged(name: str, checks: list[Check], cases: int) -> Check:
    """The first failure of several cases; else, where all were reached, the first."""
    failed = next((check for check in checks if not check.passed), None)
    return failed or (checks[0] if len(checks) == cases else Check(name, None))


def _refused(error: InputError) -> Check:
    return Check("answer", False, "what the exercise asks for", str(error))


def _listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and 3 more'."""
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([part for part in (", ".join(shown[:-1]), shown[-1]) if part])
