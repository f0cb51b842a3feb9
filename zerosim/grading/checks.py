"""The checks of values and of memory: each holds one run of a solution against a reference or a closed form.

Owns what is compared, and the words of what was expected and counted. Closed forms come from
`analysis/formulas`, never from a run; peaks come from the reference's run. Traffic is `traffic.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis.formulas.states import bytes_per_parameter, model_states, model_states_text, padded_numel
from zerosim.grading.compare import different_weights, first_gap
from zerosim.grading.exercise import Check, Comparison
from zerosim.grading.looking import mark_number, most_gathered, peak, where
from zerosim.grading.trial import Trial
from zerosim.train.result import RunResult

COST = bytes_per_parameter(2, 2, 2)
"""bf16 weights and gradients, an fp32 master and Adam's two moments: 2 + 2 + 12."""

AT_END = ("param", "grad", "optim", "unsharded_param", "unsharded_grad")


def weights(one: Comparison) -> Check:
    """Bit by bit those of DDP; with accumulation in stages 2 and 3, those of the stage's reference."""
    alone = one.exercise.stage >= 2 and one.case.config.data.accumulate > 1
    reference, name = (one.schedule, f"ZeRO-{one.exercise.stage}'s reference") if alone else (one.ddp, "DDP")
    of = len(result_of(reference).weights)
    expected = f"all {of} parameters bit-identical to {name}"
    if not different_weights(one.mine, reference):
        return Check("weights", True, expected, f"{of} of {of} are")
    gap = first_gap(one.mine, reference, one.schedule)
    counted = f"not all are: {gap.words}"
    return Check("weights", False, expected, counted, hint=gap.hint, where=gap.where)


def norm(one: Comparison) -> Check:
    """The gradient's norm of every step is DDP's."""
    ours = [report.grad_norm for report in result_of(one.mine).steps]
    theirs = [report.grad_norm for report in result_of(one.ddp).steps]
    expected = f"norms {_floats(theirs)}, as DDP's"
    hint = "" if ours == theirs else "one all_reduce of the squares, op='sum', purpose='control', before the root"
    return Check("norm", ours == theirs, expected, _floats(ours), hint=hint)


def states(one: Comparison) -> Check:
    """Bytes of model states on every rank when backward ends, to the byte."""
    result, stage, ranks = result_of(one.mine), one.exercise.stage, one.case.config.mesh.ranks
    psi = psi_of(result, stage)
    expected = sum(model_states(stage, psi, ranks, COST).values())
    counted = [sum(memory.marks["end_of_backward"].by_kind.get(kind, 0) for kind in AT_END) for memory in result.memory]
    words = f"{model_states_text(stage, COST)} = {int(expected):,} B on each rank when backward ends"
    wrong = next((rank for rank, nbytes in enumerate(counted) if nbytes != expected), None)
    if wrong is None:
        return Check("bytes", True, words, f"{counted[0]:,} B")
    record, last = one.mine.records[wrong], (one.case.config.optim.steps or 1) - 1
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
    result = result_of(one.mine)
    unit = max(info.numel for info in result.units) * COST.param + one.case.config.mesh.ranks * COST.param
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


def psi_of(result: RunResult, stage: int) -> int:
    """The model's parameters, padded where its buffers are cut."""
    return padded_numel([info.numel for info in result.units], result.config.mesh.ranks if stage else 1)


def result_of(trial: Trial) -> RunResult:
    assert trial.result is not None
    return trial.result


def _floats(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
