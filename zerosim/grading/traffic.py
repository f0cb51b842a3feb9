"""The checks of traffic: how much was sent, in how many calls, and whether it was under way while a unit computed.

Owns what is compared, and the words. Volumes are closed forms' (`targets.py`), never a run's; the number of calls
is that of the reference's run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from zerosim.analysis.formulas.states import padded_numel
from zerosim.config import RunConfig
from zerosim.device.events import Event, Kernel, Launch, Wait
from zerosim.grading.checks import psi_of, result_of
from zerosim.grading.exercise import Check, Comparison
from zerosim.grading.looking import Difference, Where, calls, carries_states, first_difference, where
from zerosim.grading.trial import Trial

_NO_COMPUTE = ("reduce", "fill", "copy")


def volume(one: Comparison) -> Check:
    """Bytes sent per rank and step (the mean over ranks) are at most the closed form's, and not too few to be all."""
    result, config, text = result_of(one.mine), one.case.config, one.exercise.volume[0]
    tied = result.tied_numel
    padded = psi_of(result, one.exercise.stage)
    table = padded_numel([tied], config.mesh.ranks) if tied and one.exercise.stage else tied
    elements = one.exercise.volume[1](config, padded, table)
    expected = elements * 2 * Fraction(config.mesh.ranks - 1, config.mesh.ranks)
    per_step = [Fraction(sum(step), config.mesh.ranks) for step in _sent(one.mine, config)]
    worst = max(per_step)
    words = f"at most {text} (N-1)/N elements = {_bytes(expected)} B sent per rank and step"
    if worst > expected:
        return Check("volume", False, words, f"{_bytes(worst)} B", hint=_extra(one), where=_parting(one))
    least = _least_elements(one, elements, table) * 2 * Fraction(config.mesh.ranks - 1, config.mesh.ranks)
    if min(per_step) < least:
        counted = f"{_bytes(min(per_step))} B, too few: at least {_bytes(least)} B have to travel"
        return Check("volume", False, words, counted, hint=_ASIDE, where=_parting(one))
    return Check("volume", True, words, f"{_bytes(worst)} B")


_ASIDE = (
    "something went past self.comm, or was kept outside of the device's memory: between ranks only collectives carry, "
    "and a rank keeps what it keeps in buffers"
)


def _least_elements(one: Comparison, most: Fraction, table: int) -> Fraction:
    """What no strategy can do without, times N/(N-1): each gradient is reduced and each parameter gathered once.

    Where parameters are gathered for use, as many units as may be there at once can stay where the direction turns, or
    at the next micro-batch, and with room for two a tied table all the time.
    """
    info = result_of(one.mine).units
    once = Fraction(2 * sum(unit.numel for unit in info))
    room = one.exercise.gathered
    if room is None:
        return once
    turns = 2 * one.case.config.data.accumulate - 1
    padded = max(unit.numel for unit in info) + one.case.config.mesh.ranks
    return max(once, most - turns * room * padded - 2 * (room - 1) * table)


def number(one: Comparison) -> Check:
    """Collectives of model states per rank and step: not more than the reference's."""
    # A call of DDP's may be made of two: only exercises that allow it leave this check out.
    allowed, most = (max(_calls_of_a_step(record) for record in trial.records) for trial in (one.schedule, one.mine))
    expected = f"at most {allowed} collectives per rank and step"
    if most <= allowed:
        return Check("calls", True, expected, str(most))
    return Check("calls", False, expected, str(most), hint=_extra(one), where=_parting(one))


def _calls_of_a_step(record: Sequence[Event]) -> int:
    """Of the step with the most."""
    return max(Counter(call.what[0] for call in calls(record)).values(), default=0)


def overlap(one: Comparison) -> Check:
    """Gathers that were under way while another unit computed, per step."""
    config, units = one.case.config, len(result_of(one.mine).units)
    wanted, steps = 2 * (units - 1) * config.data.accumulate, config.optim.steps or 1
    counts = [len(_overlapped(record)) / steps for record in one.mine.records]
    expected = f"{wanted} gathers per step launched before another unit computes: all but the first of each pass"
    if min(counts) >= wanted:
        return Check("overlap", True, expected, f"{min(counts):g}")
    rank = counts.index(min(counts))
    return Check(
        "overlap",
        False,
        expected,
        f"{counts[rank]:g} on rank {rank}",
        hint="launch with wait=False in the point BEFORE this unit computes; wait in the next unit's point",
        where=_late_gather(one.mine.records[rank], rank),
    )


def _overlapped(record: Sequence[Event]) -> list[int]:
    """The numbers of gathers that a kernel of the launching unit follows before their wait, in another unit."""
    found, computing = [], dict[int, tuple[int, bool]]()
    for index, event in enumerate(record):
        if isinstance(event, Launch) and event.op == "all_gather" and event.purpose == "states":
            computing[event.work] = index, False
        elif isinstance(event, Kernel) and event.name not in _NO_COMPUTE:
            for work, (start, _) in computing.items():
                computing[work] = start, True
        elif isinstance(event, Wait) and event.work in computing:
            start, computed = computing.pop(event.work)
            if computed and record[start].scope.unit != event.scope.unit:
                found.append(start)
    return found


def _late_gather(record: Sequence[Event], rank: int) -> Where | None:
    """The first gather that its own unit had to wait for, the first of a pass apart."""
    early = set(_overlapped(record))
    seen: set[tuple[str, int]] = set()
    for index, event in enumerate(record):
        if isinstance(event, Launch) and event.op == "all_gather" and event.scope.phase in ("forward", "backward"):
            key = (event.scope.phase, event.scope.slot)
            if index not in early and key in seen:
                return where(rank, record, index)
            seen.add(key)
    return None


def _extra(one: Comparison) -> str:
    difference = _difference(one)
    return f"rank 0 {difference}" if difference is not None else "see the calls"


def _parting(one: Comparison) -> Where | None:
    """Rank 0 where its collectives leave the reference's."""
    record = one.mine.records[0]
    difference = _difference(one)
    if difference is None:
        return None
    return where(0, record, difference.mine.number if difference.mine is not None else len(record) - 1)


def _difference(one: Comparison) -> Difference | None:
    return first_difference(one.mine.records[0], one.schedule.records[0], by_unit=one.exercise.stage >= 2)


def _sent(trial: Trial, config: RunConfig) -> list[list[int]]:
    """Bytes of model states by step, then by rank."""
    result, steps = result_of(trial), range(config.optim.steps or 1)
    return [
        [sum(row.wire_bytes for row in rows if row.step == step and carries_states(row)) for rows in result.traffic]
        for step in steps
    ]


def _bytes(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.1f}"
