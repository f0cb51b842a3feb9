"""The checks of values and of memory: each compares one run of a solution with a reference or a closed form.

Closed forms come from `analysis/formulas`, never from a run; peaks come from the reference's run. Traffic is checked in
`traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from zerosim.analysis.formulas.form import total
from zerosim.analysis.formulas.states import bytes_per_parameter, model_states, padded_numel
from zerosim.grading.compare import different_weights, first_gap
from zerosim.grading.exercise import Comparison
from zerosim.grading.hooks import told
from zerosim.grading.record import Peak, Where, mark_number, peak, where
from zerosim.grading.trial import result_of
from zerosim.grading.verdict import Check
from zerosim.train.result import RunResult
from zerosim.units import few

COST = bytes_per_parameter(2, 2, 2)
"""bf16 weights and gradients, an fp32 master and Adam's two moments: 2 + 2 + 12."""

_SECOND = (
    "publish_params makes a second copy of the whole parameters: gather over the old ones, out=flat.whole_param(), and "
    "keep no other"
)
_ANY = (
    "reshard() forgets the flat's own reference, and a buffer lives as long as ANY name holds it: do post_forward and "
    "post_backward reshard each unit, and does an attribute of yours hold one?"
)
_LETS_GO = "flat.reshard() in post_backward frees a unit's parameters, if none of your names holds them"
_WINDOW = "a window of a whole gradient keeps all of it alive: reduce_scatter returns a separate slice"
_HELD = "a name of yours holds the whole gradient beside the slice: keep only what reduce_scatter returns"

_KEEPS = (
    ("param", "every rank keeps whole parameters between uses: set keeps_params = False in your class"),
    ("grad", "every rank keeps whole gradients until the step: set keeps_grads = "
        "False in your class, and keep only the slice (add_grad_shard)"),
)  # fmt: skip
"""Kinds of model states that a ZeRO stage cuts, and the strategy's words for them."""

_SQUARES = "whose squares are in this rank's sum? Squares add up over ranks, norms do not"

AT_END = ("param", "grad", "optim", "unsharded_param", "unsharded_grad")


def weights(run: Comparison) -> Check:
    """Check that weights equal DDP's bit by bit; with accumulation at ZeRO stages 2 and 3, those of the stage's
    reference."""
    alone = run.exercise.stage >= 2 and run.case.config.data.accumulate > 1
    reference, name = (run.reference, f"ZeRO-{run.exercise.stage}'s reference") if alone else (run.ddp, "DDP")
    of = len(result_of(reference).weights)
    expected = f"all {of} parameters bit-identical to {name}"
    if not different_weights(run.mine, reference):
        return Check("weights", True, expected, f"{of} of {of} are")
    gap = first_gap(run.mine, reference, run.reference)
    return Check("weights", False, expected, f"not all are: {gap.words}", hint=gap.hint, where=gap.where)


def norm(run: Comparison) -> Check:
    """Check that the gradient's norm of every step is DDP's."""
    ours, theirs = (
        [report.grad_norm for report in result_of(trial).steps if report.grad_norm is not None]
        for trial in (run.mine, run.ddp)
    )
    expected, counted = f"norms {_floats(theirs)}, as DDP's", _floats(ours)
    if ours == theirs:
        return Check("norm", True, expected, counted)
    hint, root, cause = _SQUARES, run.case.config.mesh.ranks**0.5, told(run.mine, run.reference)
    if cause is not None and cause.hook.name == "reduce_grad_norm":
        counted += f"; {cause.finding.words}"
    elif np.allclose([root * norm for norm in ours], theirs, rtol=1e-3):
        hint = "this is the norm over the root of N: squares were averaged over ranks. Sum them, op='sum'"
    return Check("norm", False, expected, counted, hint=hint)


def states(run: Comparison) -> Check:
    """Check the bytes of model states on every rank when backward ends, to the byte."""
    result, stage, ranks = result_of(run.mine), run.exercise.stage, run.case.config.mesh.ranks
    parts, letters = model_states(stage, COST), dict(Ψ=psi_of(result, stage), N=ranks)
    held = total(parts.values())
    expected = held.at(**letters)
    counted = [sum(memory.marks["end_of_backward"].by_kind.get(kind, 0) for kind in AT_END) for memory in result.memory]
    words = f"{held} = {int(expected):,} B on each rank when backward ends"
    wrong = next((rank for rank, nbytes in enumerate(counted) if nbytes != expected), None)
    if wrong is None:
        return Check("bytes", True, words, f"{counted[0]:,} B")
    number = mark_number(run.mine.records[wrong], "end_of_backward", (run.case.config.optim.steps or 1) - 1)
    hint = "a buffer that must live until the step was freed too early"
    if counted[wrong] > expected:
        by_kind = result.memory[wrong].marks["end_of_backward"].by_kind
        over = [kind for kind, form in parts.items() if by_kind.get(kind, 0) > form.at(**letters)]
        hint = _whole_words(where(wrong, run.mine.records[wrong], number), over)
    found = f"{counted[wrong]:,} B, {_excess(run, counted[wrong] - expected)},"
    return _failed_on(run, wrong, number, "bytes", words, found, hint)


def _excess(run: Comparison, nbytes: Fraction) -> str:
    """Return a number of excess or missing bytes in Ψ/N; without ZeRO in Ψ."""
    stage = run.exercise.stage
    shares = nbytes / psi_of(result_of(run.mine), stage) * (run.case.config.mesh.ranks if stage else 1)
    return f"{float(abs(shares)):.3g}{'Ψ/N' if stage else 'Ψ'} too {'many' if shares > 0 else 'few'}"


def _whole_words(at: Where, over: Sequence[str]) -> str:
    """Return which whole buffers are still live, and which call frees them; `over`: the model states that are too
    large."""
    wholes = [held for held in at.live if held.kind in ("unsharded_param", "unsharded_grad")]
    if wholes:
        kind = wholes[0].kind
        names = few(list(dict.fromkeys(held.unit for held in wholes if held.kind == kind and held.unit)))
        sliced = {held.unit for held in at.live if held.kind == "grad"}
        why = _LETS_GO if names else _SECOND
        if kind == "unsharded_grad":
            why = _HELD if all(held.unit in sliced for held in wholes if held.kind == kind) else _WINDOW
        return f"still live: {kind}{f' of {names}' if names else ''}; {why}"
    words = (words for kind, words in _KEEPS if kind in over)
    return next(words, "a whole buffer is still live: see the list of live buffers")


def highest(run: Comparison) -> Check:
    """Check that the peak of every rank is at most the reference's (and the units that the exercise allows)."""
    unit = max(info.numel for info in result_of(run.mine).units) * COST.param + run.case.config.mesh.ranks * COST.param
    slack = run.exercise.slack * unit
    allowed = [peak(record).amount + slack for record in run.reference.records]
    found = [peak(record) for record in run.mine.records]
    wrong = _first_above(found, allowed)
    than = f"the reference's peak and {run.exercise.slack} unit" if slack else "the reference's peak"
    expected = f"at most {allowed[wrong or 0]:,} B, {than}"
    if wrong is None:
        return Check("peak", True, expected, f"{found[0].amount:,} B")
    first = "reshard before the gradient is reduced, keep" if run.exercise.stage == 3 else "keep"
    hint = f"free before you allocate: {first} no name on freed buffers, and work in place (out=)"
    units = _gathered_at(run, wrong, found[wrong].number)
    if run.exercise.gathered is not None and len(units) > run.exercise.gathered:
        hint = f"still gathered: {few(units)}; call flat.reshard() in post_forward and in post_backward"
    excess = _excess(run, Fraction(found[wrong].amount - allowed[wrong]))
    return _failed_on(run, wrong, found[wrong].number, "peak", expected, f"{found[wrong].amount:,} B, {excess},", hint)


def _gathered_at(run: Comparison, rank: int, number: int) -> list[str]:
    """Return the units whose whole parameters a rank holds at an event."""
    live = where(rank, run.mine.records[rank], number).live
    return list(dict.fromkeys(held.unit for held in live if held.kind == "unsharded_param"))


def gathered(run: Comparison) -> Check:
    """Check how many units' whole parameters a rank holds at once."""
    most = run.exercise.gathered or 0
    found = [peak(record, lambda alloc: alloc.kind == "unsharded_param") for record in run.mine.records]
    wrong = _first_above(found, [most] * len(found))
    expected = f"at most {most} unit{'s' * (most != 1)} gathered at a time"
    if wrong is None:
        return Check("gathered", True, expected, str(max(one.amount for one in found)))
    names = few(_gathered_at(run, wrong, found[wrong].number))
    hint = f"still gathered: {names}; {_ANY}"
    return _failed_on(run, wrong, found[wrong].number, "gathered", expected, f"{found[wrong].amount}", hint)


def _first_above(found: Sequence[Peak], allowed: Sequence[int]) -> int | None:
    """Return the first rank with a peak above the allowed one."""
    return next((rank for rank in range(len(found)) if found[rank].amount > allowed[rank]), None)


def _failed_on(run: Comparison, rank: int, number: int, name: str, expected: str, counted: str, hint: str) -> Check:
    at = where(rank, run.mine.records[rank], number)
    return Check(name, False, expected, f"{counted} on rank {rank}", hint=hint, where=at)


def psi_of(result: RunResult, stage: int) -> int:
    """Return the model's parameters, padded where its buffers are cut."""
    return padded_numel([info.numel for info in result.units], result.config.mesh.ranks if stage else 1)


def bytes_text(nbytes: Fraction) -> str:
    """Format a number of bytes; a mean that is not whole gets one decimal."""
    return f"{int(nbytes):,}" if nbytes.denominator == 1 else f"{float(nbytes):,.1f}"


def _floats(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
