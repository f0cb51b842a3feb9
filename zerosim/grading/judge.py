"""`grade`: an answer runs on an exercise's cases, each run is checked, and the checks of all cases become one grade.

Whatever an answer does becomes a `Grade`; only an unknown exercise is an error of the caller's.

Two processes take part (`process.py`). In one the answer is asked and run (`left_by`). Its replies, records, gradients
and weights go to the other as plain data (`plain.py`). There the references run and everything is compared
(`verdict_on`). So an answer can reach no reference, no comparison and no verdict, whatever it changes in its own
process: its interpreter, NumPy, zerosim, the objects that call it.

Python is no sandbox, so this has limits. In its own process an answer can forge its results, such as records of events
that never happened, and it can read zerosim's files and retype their text. `borrowed.py` notes the easier ways to
zerosim's own solution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.grading.asking import Asked, asked, checked
from zerosim.grading.blame import blame
from zerosim.grading.borrowed import DEAF, Audit, Note, changed, noted, state_of_zerosim
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Case, Comparison, Exercise
from zerosim.grading.hooks import table
from zerosim.grading.limits import Failure, Watch
from zerosim.grading.own_code import OwnLine, error_words
from zerosim.grading.plain import packed, unpacked
from zerosim.grading.process import judged_in_process
from zerosim.grading.report import Grade
from zerosim.grading.trial import Left as RunLeft
from zerosim.grading.trial import Own, Trial, Update, attempt, completed
from zerosim.grading.trial import left_by as run_left_by
from zerosim.grading.variants import variant
from zerosim.grading.verdict import Check, Recorded, Verdict
from zerosim.stepper import DebugWorld, debug

Refer = Callable[[RunConfig, Watch], Trial]
"""Runs a reference."""

Begin = Callable[[str], None]
"""Called with each case's label, before it is run."""


def grade(answer: Any, exercise: Exercise | str | int, *, seed: int = 0) -> Grade:
    """Grade an answer: a strategy's class, or a function where the exercise asks for one.

    Runs it on each of the exercise's cases, beside DDP and the ZeRO stage's reference: weights bit by bit, bytes per
    rank and volume against the targets. Takes a second or two. `seed` is the assigned variant (`variants.py`).

    The answer runs in its own process, on a copy of itself (`pickling.py`): its output is shown here, its changes to
    your variables stay there. An endless answer is ended, and so is a running one at Ctrl-C. `step_into` runs it in
    this process, to be inspected.

    Raises: InputError for an unknown exercise, a seed out of range.
    """
    one = variant(find_exercise(exercise), seed)
    try:
        one.adapt(answer)
    except InputError as error:
        return Grade(one, Verdict((_refused(error),)))
    return Grade(one, judged_in_process(answer, one, seed))


def step_into(answer: Any, exercise: Exercise | str | int, case: int = 0, *, seed: int = 0) -> DebugWorld:
    """Return one of the exercise's runs with this answer, to be stepped: `world.next(rank=, count=)` goes to the event
    that a grade names.

    Raises: InputError for an unknown exercise or case, and for an answer of the wrong kind.
    """
    one = variant(find_exercise(exercise), seed)
    if not one.cases:
        raise InputError(f"exercise {one.name!r}: its answer is only called, and no training runs; use grade")
    if not 0 <= case < len(one.cases):
        raise InputError(f"case {case}: exercise {one.name!r} has cases 0 to {len(one.cases) - 1}")
    own = one.adapt(answer)
    if own.allocator is not Own().allocator:
        raise InputError(
            f"exercise {one.name!r}: its allocations happen between two events, where a stepped run cannot stop"
        )
    return debug(one.cases[case].config, make_strategy=own.strategy, schedule=own.schedule)


# -- in the process of the answer --------------------------------------------------------------------
class Left(NamedTuple):
    """The results of an answer's process.

    refused   why it is no answer, '' if it is one
    changed   the parts of zerosim that it changed
    asked     its replies to questions
    runs      the results of its runs, up to the first that failed
    """

    refused: str
    changed: list[str]
    asked: Asked | None
    runs: list[RunLeft]


RECORDS = (Left, Asked, RunLeft, Update, OwnLine)


def left_by(
    load: Callable[[], Any], one: Exercise, watch: Watch, begin: Begin, note: Note, audit: Audit = lambda hook: None
) -> bytes:
    """Ask and run the answer that `load` returns; return its results as plain data. `note` is told which functions it
    borrows, `audit` installs a hook (`borrowed.py`)."""
    refused, asked, runs = "", None, list[RunLeft]()
    with noted(one.yours, note, audit, one.given) as listen:
        before, cases = state_of_zerosim(), deepcopy(one.cases)
        try:
            asked = _ran(lambda: listen(load()), one, watch, begin, runs)
        except InputError as error:  # of the wrong kind, or it changed a case
            refused = str(error)
        names = [*changed(before), *(["the run's configuration"] if one.cases != cases else [])]
    return packed(Left(refused, names, asked, runs), RECORDS)


def _ran(load: Callable[[], Any], one: Exercise, watch: Watch, begin: Begin, runs: list[RunLeft]) -> Asked | None:
    """Put the results of an answer's runs into `runs`, up to the first that fails. Return its replies."""
    answer = load()
    adapted, examine, came = one.adapt(answer), one.examine, None
    if examine is not None:
        came = asked(answer, examine, watch)
        check = checked(examine, came)
        if not isinstance(check, Check) or not check.passed:
            return came
    for case in one.cases:
        begin(case.label)
        runs.append(run_left_by(case.config, adapted, watch))
        if runs[-1].failure is not None:  # the next case would fail alike, and an endless one takes its time
            break
    return came


# -- in the process that judges ----------------------------------------------------------------------
def run_reference(config: RunConfig, watch: Watch) -> Trial:
    """Run zerosim's own strategy. It takes none of the answer's time."""
    return attempt(config, watch=Watch(watch.beat))


def verdict_on(
    data: bytes, one: Exercise, borrowed: Collection[str], watch: Watch, refer: Refer = run_reference
) -> Verdict:
    """Return the verdict on an answer's results and borrowed functions. No object of the answer's is here, and nothing
    that it could change."""
    try:
        left = unpacked(data, RECORDS)
        if not isinstance(left, Left):
            raise InputError(f"what came from the answer's process is a {type(left).__name__}")
    except InputError as error:
        return Verdict((_refused(error),))
    if left.refused:
        return Verdict((_refused(left.refused),))
    if left.changed:
        counted = f"{_listed(left.changed)} changed while it ran"
        hint = (
            "a strategy may change only itself and its own buffers: to change zerosim, override methods in your class"
        )
        return Verdict((Check("answer", False, "zerosim as it was", counted, hint=hint),))
    own: tuple[Check, ...] = ()
    if one.examine is not None:
        check = checked(one.examine, left.asked or Asked([], None))
        if isinstance(check, Failure):
            return Verdict(unsolved=check)
        own = (check,)
    taken = sorted(set(borrowed) - {DEAF})
    void = "it calls sys.setprofile, which the grader itself uses; leave it out" if borrowed else ""
    void = f"{_listed(taken)}, zerosim's own, did the work: write it yourself" if taken else void
    if any(not check.passed for check in own) or not one.cases:
        return Verdict(own, void=void)
    by_name: dict[str, list[Check]] = {name: [] for name in ("runs", *(name for name, _ in one.judges))}
    tables = dict[str, tuple[str, ...]]()
    for case, run in zip(one.cases, left.runs, strict=False):
        mine = completed(case.config, run)
        if mine.failure is not None and mine.failure.reason == "unsolved":
            return Verdict(unsolved=mine.failure)

        def reference(stage: int, config: RunConfig = case.config) -> Trial:
            trial = refer(config.at_stage(stage), watch)
            return one.refer(trial) if stage == one.stage else trial

        checks = list(_checked(one, case, mine, reference))
        for check in checks:
            by_name[check.name].append(check._replace(case=case.label))
        if not all(check.passed for check in checks):
            tables[case.label] = table(mine, reference(one.stage))
        if mine.failure is not None:
            break
    merged = tuple(_merged(name, checks, len(one.cases)) for name, checks in by_name.items())
    first = next((check.case for check in merged if check.passed is False), "")
    return Verdict((*own, *merged), void=void, hooks=tables.get(first, ()), recorded=_recorded(one, merged, left.runs))


def _recorded(one: Exercise, checks: Collection[Check], runs: list[RunLeft]) -> Recorded | None:
    """Return the run of the first failure, and its rank; without a failure the first run, and rank 0."""
    first = next((check for check in checks if check.passed is False), None)
    label = first.case if first else one.cases[0].label
    rank = first.where.rank if first and first.where else 0
    run = next((run for case, run in zip(one.cases, runs, strict=False) if case.label == label), None)
    return Recorded(label, rank, run.records, run.lines, run.sources) if run and run.records[rank] else None


def _checked(one: Exercise, case: Case, mine: Trial, reference: Callable[[int], Trial]) -> Iterator[Check]:
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
        except Exception as error:  # of a run that lacks what every run has
            yield Check(name, False, "a run that can be checked", error_words(error))


def _merged(name: str, checks: list[Check], cases: int) -> Check:
    """Return the first failure of several cases; else, if all were reached, the first check."""
    failed = next((check for check in checks if not check.passed), None)
    return failed or (checks[0] if len(checks) == cases else Check(name, None))


def _refused(why: InputError | str) -> Check:
    return Check("answer", False, "what the exercise asks for", str(why))


def _listed(names: list[str]) -> str:
    """Return 'a', 'a and b', 'a, b and 3 more'."""
    shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([part for part in (", ".join(shown[:-1]), shown[-1]) if part])
