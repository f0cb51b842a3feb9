"""The checks of traffic: the bytes sent, in how many calls, by which, and the collectives in flight while a unit
computed.

Volumes are the exercises' closed forms, never a run's; the number of calls is that of the reference's run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from zerosim.analysis.formulas.states import padded_numel
from zerosim.device.events import Event, Kernel, Launch, Wait
from zerosim.grading.checks import bytes_text, psi_of
from zerosim.grading.compare import different_weights
from zerosim.grading.exercise import Comparison
from zerosim.grading.hooks import NO_COMPUTE, told
from zerosim.grading.record import calls, carries_states, where
from zerosim.grading.trial import result_of
from zerosim.grading.verdict import Check
from zerosim.units import few

_AHEAD = "launch a unit's gather in the hook of the unit BEFORE it, and wait for it in its own hook"
HALVES = ("reduce_scatter", "all_gather")


def volume(run: Comparison) -> Check:
    """Check that the bytes sent per rank and step (the mean over ranks) are at most the closed form's, and not too
    few."""
    result, config, (text, elements) = result_of(run.mine), run.case.config, run.exercise.volume
    tied = result.tied_numel
    table = padded_numel([tied], config.mesh.ranks) if tied and run.exercise.stage else tied
    most = elements(config, psi_of(result, run.exercise.stage), table)
    # Bytes of an element, for the N slices that travel.
    each = 2 * Fraction(config.mesh.ranks - 1, config.mesh.ranks)
    per_step = [Fraction(_sent(run, step), config.mesh.ranks) for step in run.steps]
    expected = f"at most {text} (N-1)/N elements = {bytes_text(most * each)} B sent per rank and step"
    if max(per_step) > most * each:
        return _parted(run, "volume", expected, f"{bytes_text(max(per_step))} B")
    least = _least_elements(run, most, table) * each
    if min(per_step) < least:
        counted = f"{bytes_text(min(per_step))} B, too few: at least {bytes_text(least)} B must be sent"
        return _too_few(run, expected, counted)
    return Check("volume", True, expected, f"{bytes_text(max(per_step))} B")


_ASIDE = "Some traffic or memory did not go through `self.comm` and `self.device`."


def _too_few(run: Comparison, expected: str, counted: str) -> Check:
    """Return what was left out, and why the run came to its end without it: its weights are wrong because of it, or a
    buffer that should be freed stays. Only if neither is so has data gone another way."""
    found = told(run.mine, run.reference)
    if found is None or not found.is_missing:
        return _parted(run, "volume", expected, counted, "" if found else _ASIDE)
    words, hint, at = found.finding
    is_seen = bool(found.kept or different_weights(run.mine, run.ddp))
    counted = f"{counted}; {words}"
    if found.hook.name == "publish_params" and not is_seen:  # after the last step no gradient shows what ranks have
        is_seen = any(ends != run.mine.whole[0] for ends in run.mine.whole)
        counted += ", and the ranks end with different parameters" if is_seen else ""
    hint = hint if is_seen else f"{_ASIDE} Every rank has the values it needs, but no collective sent them."
    return Check("volume", False, expected, counted, hint=hint, where=at)


def _least_elements(run: Comparison, most: Fraction, table: int) -> Fraction:
    """Return the elements that every strategy must send, times N/(N-1): each gradient is reduced and each parameter
    gathered once.

    If parameters are gathered for use, as many units as may be gathered at once can stay where the direction turns, or
    at the next microbatch, and with room for two a tied table all the time.
    """
    info = result_of(run.mine).units
    once = Fraction(2 * sum(unit.numel for unit in info))
    room = run.exercise.gathered
    if room is None:
        return once
    turns = 2 * run.case.config.data.accumulate - 1
    padded = max(unit.numel for unit in info) + run.case.config.mesh.ranks
    return max(once, most - turns * room * padded - 2 * (room - 1) * table)


def number(run: Comparison) -> Check:
    """Check that a rank and step has at most the reference's collectives of model states."""
    # A call of DDP's may be made of two: only exercises that allow it leave this check out.
    allowed, most = (
        max(max(Counter(call.what[0] for call in calls(record)).values(), default=0) for record in trial.records)
        for trial in (run.reference, run.mine)
    )
    expected = f"at most {allowed} collectives per rank and step"
    return Check("calls", True, expected, str(most)) if most <= allowed else _parted(run, "calls", expected, str(most))


def overlap(run: Comparison) -> Check:
    """Check the gathers in flight while another unit computed, per step."""
    config, units = run.case.config, len(result_of(run.mine).units)
    wanted = 2 * (units - 1) * config.data.accumulate
    counts = [len(_overlapped(record)) / len(run.steps) for record in run.mine.records]
    expected = f"{wanted} gathers per step launched before another unit computes, all except the first of each pass"
    if min(counts) >= wanted:
        return Check("overlap", True, expected, f"{min(counts):g}")
    rank = counts.index(min(counts))
    record = run.mine.records[rank]
    counted = f"{counts[rank]:g} on rank {rank}; late: {_late_words(record)}"
    at = next((where(rank, record, at).only() for at in _late(record)), None)
    return Check("overlap", False, expected, counted, hint=_AHEAD, where=at)


def _overlapped(record: Sequence[Event]) -> list[int]:
    """Return the numbers of gathers that a kernel of the launching unit follows before their wait, in another unit."""
    found, computing = [], dict[int, tuple[int, bool]]()
    for index, event in enumerate(record):
        if isinstance(event, Launch) and event.op == "all_gather" and event.purpose == "states":
            computing[event.work] = index, False
        elif isinstance(event, Kernel) and event.name not in NO_COMPUTE:
            for work, (start, _) in computing.items():
                computing[work] = start, True
        elif isinstance(event, Wait) and event.work in computing:
            start, computed = computing.pop(event.work)
            if computed and record[start].scope.unit != event.scope.unit:
                found.append(start)
    return found


def _late(record: Sequence[Event]) -> list[int]:
    """Return the gathers that their own units had to wait for, except the first of a pass."""
    early, seen, found = set(_overlapped(record)), set[tuple[int, str, int]](), list[int]()
    for index, event in enumerate(record):
        if isinstance(event, Launch) and event.op == "all_gather" and event.scope.phase in ("forward", "backward"):
            key = (event.scope.step, event.scope.phase, event.scope.slot)
            if index not in early and key in seen:
                found.append(index)
            seen.add(key)
    return found


def _late_words(record: Sequence[Event]) -> str:
    """Return the units of late gathers in step 0, by phase."""
    units: dict[str, dict[str, None]] = {}
    for scope in (record[index].scope for index in _late(record)):
        units.setdefault(scope.phase, {})[scope.unit] = None
    return ", ".join(f"in {phase} {few(list(names))}" for phase, names in units.items())


def halves(run: Comparison) -> Check:
    """Check that an all_reduce is made of its halves: backward launches both for each unit that launches any, and no
    other.

    A gradient for which nothing is launched does not change: then the run itself fails.
    """
    expected = "gradients reduced only by reduce_scatter and all_gather, by both of them"
    for rank, record in enumerate(run.mine.records):
        ops: dict[tuple[int, str], list[str]] = {}
        for call in calls(record, control=True):
            step, phase, unit, *_ = call.what
            if phase != "backward":
                continue
            if call.op not in HALVES:
                hint = f"{call.op} is the operation to write: use comm.reduce_scatter, then comm.all_gather"
                at = where(rank, record, call.number)
                return Check("halves", False, expected, f"rank {rank} calls {call}", hint=hint, where=at)
            ops.setdefault((step, unit), []).append(call.op)
        for (step, unit), names in ops.items():
            missing = [op for op in HALVES if op not in names]
            if missing:
                counted = f"rank {rank} calls no {missing[0]} in step {step}, backward of {unit}"
                return Check("halves", False, expected, counted, hint="every gradient needs both")
    return Check("halves", True, expected, "they are")


def _parted(run: Comparison, name: str, expected: str, counted: str, hint: str = "") -> Check:
    """Return a failed check, and the first hook of rank 0 whose collectives differ from the reference's. `hint`
    replaces the words on how."""
    found = told(run.mine, run.reference)
    if found is None:
        return Check(name, False, expected, counted, hint=hint or "look at the order and the sizes of your collectives")
    words, how, at = found.finding
    return Check(name, False, expected, f"{counted}; {words}", hint=hint or how or words, where=at)


def _sent(run: Comparison, step: int) -> int:
    """Return the ranks' bytes of model states in a step."""
    rows = (row for rows in result_of(run.mine).traffic for row in rows if row.step == step)
    return sum(row.wire_bytes for row in rows if carries_states(row))
