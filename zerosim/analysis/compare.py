"""Compare a run's counts with the closed forms: numbers only, no words and no layout.

Counts come from the run's ledgers, expectations from `analysis/formulas`; agreement means
equality of exact numbers, never a tolerance. With slices a formula is compared twice: at Psi with
the count minus padding (over all ranks), and at Psi padded with every rank's own count.

The ranks of each pipeline stage are compared together, because Psi is the stage's number of parameters (`shares.py`).
Traffic: `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import cast

from zerosim.analysis import forms, formulas
from zerosim.analysis.capabilities.delayed import has_late, updated_by
from zerosim.analysis.capability import Key, Step
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.cost import kept_bytes, kept_padding, master_bytes
from zerosim.analysis.facts import is_owned
from zerosim.analysis.formulas import Form
from zerosim.analysis.lazy_states import has_states
from zerosim.analysis.shares import has_rows, is_apart, itemsizes
from zerosim.config.parts.tuning import row_of, stored_fp32
from zerosim.train.result import RunResult

MARK = "end_of_backward"


def check_states(of: Compared) -> list[Check]:
    """Check param, grad, optim, then their total, over all memories of a rank."""
    result, config, share = of.result, of.result.config, of.share
    memories = [result.memory[rank] for rank in share.ranks]
    states = {kind: form for (kind, _), form in forms.of(of.forms, "states").items()}
    beside = forms.local_states(config, of.cost, Step(late=has_late(result)))
    formula = {kind: form.at(of.held) for kind, form in states.items()}
    expected = {kind: _expected(of, kind, form, beside.get(kind, Form())) for kind, form in states.items()}
    if has_states(result) and config.optim.optimizer not in formulas.UNIFORM:
        kept = [_kept(result, rank) for rank in share.ranks]
        more = of.held.get("Y", 0)
        formula["optim"] = Fraction(sum(nbytes for nbytes, _ in kept), len(kept)) + more
        expected["optim"] = tuple(Fraction(nbytes + padding + more) for nbytes, padding in kept)
    elif has_states(result) and has_rows(result):
        expected["optim"] = tuple(_of_rows(of, rank) + of.held.get("Y", 0) for rank in share.ranks)
    counted = {kind: [memory.everywhere(MARK, kind) for memory in memories] for kind in formulas.STATES}
    checks = [
        Check(
            Key("states", kind),
            counted=tuple(nbytes for nbytes, _ in counted[kind]),
            form=states[kind],
            formula=formula[kind],
            expected=expected[kind],
            padding=tuple(padding for _, padding in counted[kind]),
        )
        for kind in formulas.STATES
    ]
    total = Check(
        Key("states", "total"),
        counted=_columns([nbytes for nbytes, _ in of_kind] for of_kind in counted.values()),
        form=formulas.total(states.values()),
        formula=sum(formula.values(), Fraction(0)),
        expected=_total([check.expected for check in checks]),
        padding=_columns(check.padding for check in checks),
    )
    return [*checks, total]


def check_buffers(of: Compared) -> Check:
    """Check the buffers from which gradients are reduced, if they live from start to end. Without such buffers the
    count must be 0."""
    result, key = of.result, Key("buffers", "comm")
    is_trained = any(map(result.layout.is_trained, of.share.numels))
    form = of.forms.get(key, Form()) if is_trained else Form()
    marks = [result.memory[rank].marks["after_init"] for rank in of.share.ranks]
    formula = due = Fraction(0)
    if form.terms:
        formula, due = form.at(of.held), form.at({**of.padded, **_held(of, list(of.share.whole))})
    return Check(
        key,
        counted=tuple(mark.by_kind.get("comm", 0) for mark in marks),
        form=form,
        formula=formula,
        expected=(due,),
        padding=tuple(mark.padding.get("comm", 0) for mark in marks),
    )


def last_whole_step(result: RunResult) -> int | None:
    """Return the last step in which parameters were updated."""
    whole = [step for step in range(result.first_step, result.last_step + 1) if updated_by(result, step) is not None]
    return whole[-1] if whole else None


def control_bytes(result: RunResult, step: int) -> tuple[int, ...]:
    """Return the bytes that each rank sent for norms and overflow flags."""
    sent = {rank: result.sent_bytes(rank, step, "control") for rank in result.ran}
    return tuple(sent[rank] for rank in result.stands_for)


def peak_rank(result: RunResult) -> int:
    """Return the rank with the highest peak, the lowest such rank."""
    peaks = [memory.peak.total_bytes for memory in result.memory]
    return peaks.index(max(peaks))


def _expected(of: Compared, kind: str, form: Form, beside: Form) -> tuple[Fraction, ...]:
    """`beside`: the part of the form that is the local shard's at any stage."""
    result, share, config, whole = of.result, of.share, of.result.config, Form()
    if not is_owned(config):
        return (form.at(_held(of, list(share.whole))),) * len(share.ranks)
    if config.states_stage < formulas.first_partitioned(kind):
        form, whole = beside, form - beside
    layout, mesh = result.layout, config.mesh.axes
    by_owner: dict[tuple[tuple[str, ...], int | None], list[str]] = {}
    for name in share.whole:
        by_owner.setdefault((layout.flats[name].axes, layout.owner(name)), []).append(name)
    kinds = {axes for axes, _ in by_owner}
    owned = ([n for axes in kinds for n in by_owner.get((axes, mesh.index(r, *axes)), [])] for r in share.ranks)
    of_all = _held(of, list(share.whole))
    always, alone = whole.at(of_all), {"Q_s": of_all["Q_s"], "N": 1, "N_e": 1}  # scales are whole on every rank
    return tuple(always + form.at(_held(of, names) | alone) for names in owned)


def _held(of: Compared, names: Sequence[str]) -> dict[str, int]:
    """Return the letters with those of model states for these flat buffers, padding included."""
    if "N_e" not in of.padded:
        return {**of.padded, **_states_of(of, names)}
    apart = [name for name in names if is_apart(of.result.layout, name)]
    dense, experts = _states_of(of, [name for name in names if name not in apart]), _states_of(of, apart)
    return {**of.padded, **dense, **{formulas.OF_EXPERTS[one]: numel for one, numel in experts.items()}}


def _states_of(of: Compared, names: Sequence[str]) -> dict[str, int]:
    layout, share = of.result.layout, of.share
    trained = [name for name in names if layout.is_trained(name)]
    codes = [name for name in names if layout.flats[name].weights[0].format]
    held = {name: share.numels[name] if name in codes else share.whole[name] for name in names}
    for name in (name for name in names if stored_fp32(of.result.config.tuning, layout.flats[name].weights)):
        held[name] = cast(int, Fraction(4 * held[name], itemsizes(of.result.config)[0]))
    return {
        "Ψ": sum(held.values()),
        "Ψ_t": sum(held[name] for name in trained),
        "Ψ_q": sum(held[name] for name in codes),
        "Q": sum(share.whole[name] for name in codes),
        "Q_s": sum(layout.flats[name].scale_bytes for name in codes),
    }


def _kept(result: RunResult, rank: int) -> tuple[int, int]:
    """Return the bytes of optimizer states for the weights in a rank's slices, and for padding."""
    config, layout = result.config, result.layout
    kept = padding = 0
    for name in layout.stages[config.mesh.axes.index(rank, "pp")]:
        if not layout.is_trained(name):
            continue
        part = layout.own(rank, name)
        padding += kept_padding(config, layout.flats[name].padding(part))
        kept += sum(kept_bytes(config, mine.weight, mine.numel) for mine in layout.flats[name].within(part))
    return kept, padding


def _of_rows(of: Compared, rank: int) -> Fraction:
    """Return the bytes of optimizer states where some slices of adapters are nothing but padding: they have masters."""
    config, layout, masters = of.result.config, of.result.layout, master_bytes(of.result.config)
    nbytes = Fraction(0)
    for name in filter(layout.is_trained, layout.stages[config.mesh.axes.index(rank, "pp")]):
        part, row = layout.own(rank, name), row_of(config.tuning, layout.flats[name])
        nbytes += (masters if row and part.padding == part.size else of.cost.optim) * part.size
    return nbytes


def _total(shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
    """Return the sum over states, by rank; a sum that all ranks share is added once."""
    if all(len(set(share)) == 1 for share in shares):
        return (sum((share[0] for share in shares), Fraction(0)),) * len(shares[0])
    return tuple(sum(each, Fraction(0)) for each in zip(*shares, strict=True))


def _columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
