"""The checks: each holds one run of a solution against a reference or a closed form.

Owns what is compared, and the words of what was expected and counted. Closed forms come from
`planner/formulas`, never from a run; schedules and peaks come from the reference's run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from zerosim.grading.compare import different_weights, first_gap
from zerosim.grading.exercise import Check, Comparison
from zerosim.grading.looking import Difference, Where, calls, first_difference, mark_number, most_gathered, peak, where
from zerosim.grading.trial import Trial
from zerosim.planner.formulas.states import bytes_per_parameter, model_states, model_states_text, padded_numel
from zerosim.record import Event, Kernel, Launch, Wait
from zerosim.result import RunResult
from zerosim.scenario import RunConfig

COST = bytes_per_parameter(2, 2, 2)
"""bf16 weights and gradients, an fp32 master and Adam's two moments: 2 + 2 + 12."""

_NO_COMPUTE = ("reduce", "fill", "copy")
AT_END = ("param", "grad", "optim", "unsharded_param", "unsharded_grad")


def weights(one: Comparison) -> Check:
    """Bit by bit those of DDP; with accumulation in stages 2 and 3, those of the stage's reference."""
    alone = one.exercise.stage >= 2 and one.case.config.accumulate > 1
    reference, name = (one.schedule, f"ZeRO-{one.exercise.stage}'s reference") if alone else (one.ddp, "DDP")
    of = len(_result(reference).weights)
    expected = f"all {of} parameters bit-identical to {name}"
    if not different_weights(one.mine, reference):
        return Check("weights", True, expected, f"{of} of {of} are")
    gap = first_gap(one.mine, reference, one.schedule)
    counted = f"not all are: {gap.words}"
    return Check("weights", False, expected, counted, hint=gap.hint, where=gap.where)


def norm(one: Comparison) -> Check:
    """The gradient's norm of every step is DDP's."""
    ours = [report.grad_norm for report in _result(one.mine).steps]
    theirs = [report.grad_norm for report in _result(one.ddp).steps]
    expected = f"norms {_floats(theirs)}, as DDP's"
    hint = "" if ours == theirs else "one all_reduce of the squares, op='sum', purpose='control', before the root"
    return Check("norm", ours == theirs, expected, _floats(ours), hint=hint)


def states(one: Comparison) -> Check:
    """Bytes of model states on every rank when backward ends, to the byte."""
    result, stage, ranks = _result(one.mine), one.exercise.stage, one.case.config.ranks
    psi = _psi(result, stage)
    expected = sum(model_states(stage, psi, ranks, COST).values())
    counted = [sum(memory.marks["end_of_backward"].by_kind.get(kind, 0) for kind in AT_END) for memory in result.memory]
    words = f"{model_states_text(stage, COST)} = {int(expected):,} B on each rank when backward ends"
    wrong = next((rank for rank, nbytes in enumerate(counted) if nbytes != expected), None)
    if wrong is None:
        return Check("bytes", True, words, f"{counted[0]:,} B")
    record, last = one.mine.records[wrong], (one.case.config.steps or 1) - 1
    more = counted[wrong] > expected
    return Check(
        "bytes",
        False,
        words,
        f"{counted[wrong]:,} B on rank {wrong}",
        hint="something whole is still live: see the list of what was" if more else "something that must stay is gone",
        where=where(wrong, record, mark_number(record, "end_of_backward", last)),
    )


def highest(one: Comparison) -> Check:
    """The peak of every rank is not above the reference's (and the units that the exercise allows)."""
    result = _result(one.mine)
    unit = max(info.numel for info in result.units) * COST.param + one.case.config.ranks * COST.param
    slack = one.exercise.slack * unit
    allowed = [peak(record).amount + slack for record in one.schedule.records]
    found = [peak(record) for record in one.mine.records]
    wrong = next((rank for rank in range(len(found)) if found[rank].amount > allowed[rank]), None)
    rank = wrong if wrong is not None else 0
    expected = f"at most {allowed[rank]:,} B, " + (
        f"the reference's peak and {one.exercise.slack} unit" if slack else "the reference's peak"
    )
    if wrong is None:
        return Check("peak", True, expected, f"{found[0].amount:,} B")
    return Check(
        "peak",
        False,
        expected,
        f"{found[wrong].amount:,} B on rank {wrong}",
        hint="free before you allocate: reshard before the gradient is reduced, keep no name on what was freed, "
        "work in place (out=)",
        where=where(wrong, one.mine.records[wrong], found[wrong].number),
    )


def gathered(one: Comparison) -> Check:
    """How many units' whole parameters are there at once."""
    most = one.exercise.gathered or 0
    found = [most_gathered(record) for record in one.mine.records]
    wrong = next((rank for rank in range(len(found)) if found[rank].amount > most), None)
    expected = f"at most {most} unit{'s' * (most != 1)} gathered at a time"
    if wrong is None:
        return Check("gathered", True, expected, str(max(one.amount for one in found)))
    return Check(
        "gathered",
        False,
        expected,
        f"{found[wrong].amount} on rank {wrong}",
        hint="reshard() forgets the flat's own reference; bytes live as long as ANY name holds the buffer",
        where=where(wrong, one.mine.records[wrong], found[wrong].number),
    )


def volume(one: Comparison) -> Check:
    """Bytes sent per rank and step (the mean over ranks) are at most the closed form's, and not too few to be all."""
    result, config, text = _result(one.mine), one.case.config, one.exercise.volume[0]
    tied = result.tied_numel
    padded = _psi(result, one.exercise.stage)
    table = padded_numel([tied], config.ranks) if tied and one.exercise.stage else tied
    elements = one.exercise.volume[1](config, padded, table)
    expected = elements * 2 * Fraction(config.ranks - 1, config.ranks)
    per_step = [Fraction(sum(step), config.ranks) for step in _sent(one.mine, config)]
    worst = max(per_step)
    words = f"at most {text} (N-1)/N elements = {_bytes(expected)} B sent per rank and step"
    if worst > expected:
        return Check("volume", False, words, f"{_bytes(worst)} B", hint=_extra(one), where=_parting(one))
    least = _least_elements(one, elements, table) * 2 * Fraction(config.ranks - 1, config.ranks)
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
    info = _result(one.mine).units
    once = Fraction(2 * sum(unit.numel for unit in info))
    room = one.exercise.gathered
    if room is None:
        return once
    turns = 2 * one.case.config.accumulate - 1
    padded = max(unit.numel for unit in info) + one.case.config.ranks
    return max(once, most - turns * room * padded - 2 * (room - 1) * table)


def number(one: Comparison) -> Check:
    """Collectives of model states per rank and step: not more than the reference's."""
    steps = one.case.config.steps or 1
    allowed = len(calls(one.schedule.records[0])) // steps
    # A call of DDP's may be made of two: only exercises that allow it leave this check out.
    counts = [len(calls(record)) / steps for record in one.mine.records]
    most = max(counts)
    expected = f"at most {allowed} collectives per rank and step"
    if most <= allowed:
        return Check("calls", True, expected, f"{most:g}")
    return Check("calls", False, expected, f"{most:g}", hint=_extra(one), where=_parting(one))


def overlap(one: Comparison) -> Check:
    """Gathers that were under way while another unit computed, per step."""
    config, units = one.case.config, len(_result(one.mine).units)
    wanted, steps = 2 * (units - 1) * config.accumulate, config.steps or 1
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
    result, steps = _result(trial), range(config.steps or 1)
    return [
        [sum(row.wire_bytes for row in rows if row.step == step and row.purpose == "states") for rows in result.traffic]
        for step in steps
    ]


def _psi(result: RunResult, stage: int) -> int:
    """The model's parameters, padded where its buffers are cut."""
    return padded_numel([info.numel for info in result.units], result.config.ranks if stage else 1)


def _result(trial: Trial) -> RunResult:
    assert trial.result is not None
    return trial.result


def _bytes(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,.1f}"


def _floats(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
