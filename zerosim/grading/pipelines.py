"""Exercises on pipelines: the checks of a schedule, and what a stuck schedule was waiting for.

Everything is read from the run's records: the order of the ranks' actions, and the buffers of each. Closed forms:
`analysis/formulas`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from zerosim.analysis.formulas import Form
from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.device.events import Event, Free, Kernel, Launch, Save, Wait
from zerosim.grading.exercise import Comparison, Judge
from zerosim.grading.limits import Failure
from zerosim.grading.record import Finding, where
from zerosim.grading.trial import Trial, result_of
from zerosim.grading.verdict import Check
from zerosim.parallel.schedule import Action, Backward, Forward, InputGrad, WeightGrad
from zerosim.train.run import run as train
from zerosim.verbs import MESSAGES

GPIPE = (
    "running all forwards first is GPipe, which keeps every microbatch until the last forward: run the "
    "first backward as soon as the stage holds as many as it may"
)
PENDING = "a waiting weight gradient keeps its microbatch live: how many may wait on this stage before one must run?"
_SAME = "gradients of microbatches are added in the order of the backwards: run backwards in the order of the forwards"
ORDER = "neighbours must exchange the same microbatches in the same order, forward and backward"


# -- checks -----------------------------------------------------------------------------------------
def losses(run: Comparison) -> Check:
    """Check that losses and weights are those of one stage with as many microbatches, to the bit; for untied units."""
    mine = result_of(run.mine)
    alone = train(run.case.config.replace(ranks=1, pp=1))
    same = sum(np.array_equal(mine.weights[name], values) for name, values in alone.weights.items())
    ours, theirs = (", ".join(f"{loss:.6f}" for loss in result.mean_losses) for result in (mine, alone))
    expected = f"losses {theirs}, and all {len(alone.weights)} parameters, bit-identical to those of one stage"
    if mine.losses == alone.losses and same == len(alone.weights):
        return Check("losses", True, expected, "they are")
    return Check("losses", False, expected, f"losses {ours}, {same} parameters bit-identical", hint=_SAME)


def live(most: Form, hint: str = GPIPE) -> Judge:
    """Check that on every stage i at most so many microbatches are live, a form in m, p and i."""

    def check(run: Comparison) -> Check:
        stages, batches = _sizes(run)
        allowed = [int(most.at(p=stages, i=stage, m=batches)) for stage in range(stages)]
        expected = f"at most {most} microbatches live: {_listed(allowed)} on stages 0 to {stages - 1}"
        counts = [_live_counts(record) for record in run.mine.records]
        found = [max(count) for count in counts]
        wrong = next((stage for stage in range(stages) if found[stage] > allowed[stage]), None)
        if wrong is None:
            return Check("live", True, expected, _listed(found))
        number = next(number for number, count in enumerate(counts[wrong]) if count > allowed[wrong])
        at, too_many = where(wrong, run.mine.records[wrong], number), found[wrong]
        is_off = hint == GPIPE and too_many < batches
        begins = f"stage {wrong} begins {too_many} forwards before its first backward ends, and may {allowed[wrong]}"
        told = f"{begins}: count p - i again" if is_off else hint
        return Check("live", False, expected, _listed(found), hint=told, where=at)

    return check


def bubble(most: Form) -> Judge:
    """Check that the bubble, in slots, is at most this form in m, p and the number r of rounds of p microbatches."""

    def check(run: Comparison) -> Check:
        stages, batches = _sizes(run)
        rounds = -(-batches // stages)
        allowed = most.at(p=stages, m=batches, r=rounds)
        found = counted_bubble(slots_of([_ran(record) for record in run.mine.records]))
        expected = f"a bubble of at most {most} = {allowed} of a stage's work, in slots"
        expected += f", in r = {rounds} rounds" if "r" in most.symbols else ""
        hint = "" if found <= allowed else "a stage waits although its next microbatch could already be there: draw it"
        if hint and any(isinstance(action, WeightGrad) for record in run.mine.records for action in _ran(record)):
            hint = "no stage waits for a WeightGrad: run it where this stage would idle, after what others wait for"
        return Check("bubble", found <= allowed, expected, str(found), hint=hint)

    return check


def _sizes(run: Comparison) -> tuple[int, int]:
    return run.case.config.mesh.pp, run.case.config.data.accumulate


def _live_counts(record: Sequence[Event]) -> list[int]:
    """Return after each event the number of microbatches with something saved for backward."""
    kept: dict[int, int] = {}
    counts = []
    for event in record:
        if isinstance(event, Save):
            kept[event.id] = event.scope.slot
        elif isinstance(event, Free):
            kept.pop(event.id, None)
        counts.append(len(set(kept.values())))
    return counts


def _ran(record: Sequence[Event]) -> list[Action]:
    """Return the actions of step 0 in the order in which they computed. A backward that reaches a unit a second time
    computes the weights' gradients separately."""
    turns: dict[tuple[str, int, int], set[str]] = {}  # the units of a phase and microbatch, the first and second time
    last = None
    for event in record:
        step, phase, unit, slot = event.scope
        if not isinstance(event, Kernel) or not unit or step or phase not in ("forward", "backward"):
            continue
        units = turns.setdefault((phase, slot, 0), set())
        if (unit in units and unit != last) or (phase, slot, 1) in turns:
            units = turns.setdefault((phase, slot, 1), set())
        units.add(unit)
        last = unit
    return [_kind(turns, *turn)(turn[1]) for turn in turns]


def _kind(turns: Collection[tuple[str, int, int]], phase: str, slot: int, again: int) -> type[Action]:
    if phase == "forward":
        return Forward
    return WeightGrad if again else InputGrad if (phase, slot, 1) in turns else Backward


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# -- a run that failed ------------------------------------------------------------------------------
def parted(trial: Trial, failure: Failure) -> Finding:
    """Find stages that wait for each other, or that meet with different microbatches."""
    if failure.reason == "mismatch":
        at = where(failure.rank, trial.records[failure.rank], len(trial.records[failure.rank]) - 1).only()
        return Finding(failure.text.split(": they meet in")[0], ORDER, at)
    waits = {rank: wait for rank, record in enumerate(trial.records) if (wait := _waits(record, rank)) is not None}
    ring = _ring({rank: other for rank, (other, _) in waits.items()})
    words = "; ".join(f"stage {rank} waits for stage {waits[rank][0]} {waits[rank][1]}" for rank in ring)
    hint = "each waits for an action that the other runs only later: write both lists down, and find the two actions"
    rank = ring[0] if ring else failure.rank
    at = where(rank, trial.records[rank], len(trial.records[rank]) - 1).only()
    return Finding(f"deadlock: {words}", hint, at)


def _waits(record: Sequence[Event], rank: int) -> tuple[int, str] | None:
    """Return the neighbour that a rank waits for at the end of its record, and for what in words; None: for no
    message."""
    done = {event.work for event in record if isinstance(event, Wait)}
    pending = [event for event in record if isinstance(event, Launch) and event.work not in done]
    phase = record[-1].scope.phase
    messages = [event for event in pending if event.op in MESSAGES and event.scope.phase == phase]
    if not messages:
        return None
    here, way = messages[-1], "forward" if phase == "forward" else "back"
    (other,) = (member for member in here.group if member != rank)
    slot = here.scope.slot
    return other, f"to {'go' if here.op == 'recv' else 'take what it has sent'} {way} with microbatch {slot}"


def _ring(waits_for: dict[int, int]) -> list[int]:
    """Return ranks that wait for one another in a ring, or the chain from the first to its end."""
    seen: list[int] = []
    rank = min(waits_for, default=0)
    while rank in waits_for and rank not in seen:
        seen.append(rank)
        rank = waits_for[rank]
    return seen[seen.index(rank) :] if rank in seen else seen
