"""An answer's own run beside the reference's: live bytes and collectives, from the records of both.

The run is that of the first failure, else the first one. The reference runs again when a picture is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerosim.errors import InputError
from zerosim.grading.exercise import Case, Exercise
from zerosim.grading.verdict import Recorded, Verdict
from zerosim.train.result import RunResult
from zerosim.train.run import run

if TYPE_CHECKING:
    from zerosim.report.plots.chart import Chart


def drawn(exercise: Exercise, verdict: Verdict) -> Chart:
    """Return an answer's run beside the reference's. Raises: InputError if the answer did not run."""
    from zerosim.report.plots.beside import beside_figure

    case, recorded = begun(exercise, verdict)
    first, event = next(iter(verdict.failures), None), points_at(verdict, recorded)
    step = recorded.events[-1 if event is None else event].scope.step
    return beside_figure(
        [recorded.events, reference(exercise, case).events[recorded.rank]],
        ["yours", "reference"],
        recorded.rank,
        step,
        title=f"Exercise {exercise.number}: your run beside the reference's",
        subtitle=f"{exercise.title}; {case.label}; {f'first failure: {first.name}' if first else 'solved'}",
        event=event,
    )


def begun(exercise: Exercise, verdict: Verdict) -> tuple[Case, Recorded]:
    """Return the run that a verdict has a record of. Raises: InputError if the answer did not run."""
    recorded = verdict.recorded
    if recorded is None:
        raise InputError(
            f"exercise {exercise.name!r}: no run to draw: the answer failed before its run, or the exercise "
            "only calls it"
        )
    return next(case for case in exercise.cases if case.label == recorded.case), recorded


def points_at(verdict: Verdict, recorded: Recorded) -> int | None:
    """Return the number of the event that the first failure names, in the record of its rank."""
    first = next(iter(verdict.failures), None)
    where = None if first is None else first.where
    if first is None or where is None or (first.case, where.rank) != (recorded.case, recorded.rank):
        return None
    return where.number if where.number < len(recorded.events) else None


def reference(exercise: Exercise, case: Case) -> RunResult:
    """Run the reference again, and return its trial."""
    return run(case.config.replace(stage=exercise.stage), keep_events=True)
