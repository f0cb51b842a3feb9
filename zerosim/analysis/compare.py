"""Compare a run's counts with the closed forms: numbers only, no words and no layout.

Counts come from the run's ledgers, expectations from `analysis/formulas`; agreement means
equality of exact numbers, never a tolerance. With slices a formula is compared twice: at Psi with
the count minus padding (over all ranks), and at Psi padded with every rank's own count.

The ranks of each pipeline stage are compared together, because Psi is the stage's number of parameters (`shares.py`).
Traffic: `traffic.py`, `exchanges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerosim.analysis import forms, formulas
from zerosim.analysis.capability import Key, Step
from zerosim.analysis.facts import is_owned
from zerosim.analysis.formulas import BytesPerParameter, Form
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import Share, cost_of, kept_bytes, kept_padding, master_bytes, share_of
from zerosim.placement.mesh import STATES
from zerosim.train.result import RunResult

MARK = "end_of_backward"


@dataclass(frozen=True, slots=True)
class StateCheck:
    """One model state in bytes by rank, beside its formula (per rank, without padding)."""

    kind: str
    counted: tuple[int, ...]
    padding: tuple[int, ...]
    formula: Fraction
    text: str
    expected: tuple[Fraction, ...]
    """The bytes that each rank must hold, padding included."""

    @property
    def mean(self) -> Fraction:
        """The mean bytes per rank, without padding."""
        return Fraction(sum(self.counted) - sum(self.padding), len(self.counted))

    @property
    def agrees(self) -> bool:
        return self.mean == self.formula and self.counted == self.expected


def check_states(result: RunResult, stage: int = 0) -> list[StateCheck]:
    """Check param, grad, optim, then their total, for the ranks of a pipeline stage, over all memories of a rank."""
    config, cost, share = result.config, held_cost(result, stage), share_of(result, stage)
    memories = [result.memory[rank] for rank in share.ranks]
    has_states = _has_states(result)
    step = Step(late=has_late(result))
    states = {kind: form for (kind, _), form in forms.of(forms.forms(config, cost, step), "states").items()}
    held, beside = letters_of(result, stage), forms.local_states(config, cost, step)
    formula = {kind: form.at(held) for kind, form in states.items()}
    expected = {kind: _expected(result, share, kind, form, beside.get(kind, Form())) for kind, form in states.items()}
    if has_states and config.optim.optimizer not in formulas.UNIFORM:
        kept = [_kept(result, rank) for rank in share.ranks]
        more = held.get("Y", 0)
        formula["optim"] = Fraction(sum(nbytes for nbytes, _ in kept), len(kept)) + more
        expected["optim"] = tuple(Fraction(nbytes + padding + more) for nbytes, padding in kept)
    checks = [
        StateCheck(
            kind=kind,
            counted=tuple(memory.everywhere(MARK, kind)[0] for memory in memories),
            padding=tuple(memory.everywhere(MARK, kind)[1] for memory in memories),
            formula=formula[kind],
            text=str(states[kind]),
            expected=expected[kind],
        )
        for kind in formulas.STATES
    ]
    total = StateCheck(
        kind="total",
        counted=_columns([check.counted for check in checks]),
        padding=_columns([check.padding for check in checks]),
        formula=sum((check.formula for check in checks), Fraction(0)),
        text=str(formulas.total(states.values())),
        expected=_total([check.expected for check in checks]),
    )
    return [*checks, total]


def held_cost(result: RunResult, stage: int) -> BytesPerParameter:
    """Return the bytes per parameter on a pipeline stage when backward ends: without optimizer states where they are
    made in the step after it."""
    cost = cost_of(result, stage)
    return cost if _has_states(result) else replace(cost, optim=master_bytes(result.config))


def _has_states(result: RunResult) -> bool:
    return not result.config.optim.lazy_states or any(not step.skipped for step in result.steps[:-1])


def check_buffers(result: RunResult, stage: int = 0) -> StateCheck:
    """Check the buffers from which gradients are reduced, if they live from start to end. Without such buffers the
    count must be 0."""
    config, share = result.config, share_of(result, stage)
    is_trained = any(map(result.layout.is_trained, share.numels))
    form = forms.forms(config).get(Key("buffers", "comm"), Form()) if is_trained else Form()
    marks = [result.memory[rank].marks["after_init"] for rank in share.ranks]
    held = letters_of(result, stage) if form.terms else {}
    padded = held | _held(result, share, list(share.whole)) if form.terms else {}
    return StateCheck(
        kind="comm",
        counted=tuple(mark.by_kind.get("comm", 0) for mark in marks),
        padding=tuple(mark.padding.get("comm", 0) for mark in marks),
        formula=form.at(held),
        text=str(form),
        expected=(form.at(padded),) * len(marks),
    )


def updated_by(result: RunResult, step: int) -> int | None:
    """Return the step whose gradients update the parameters in a step: its own or, once the update is
    delayed, the previous one. None: no step's, because the gradients wait or overflowed."""
    late = result.config.grads.late
    own = step if not late or step < late - 1 else step - 1
    waits = bool(late) and step == late - 1
    return None if waits or result.steps[own].skipped else own


def has_late(result: RunResult) -> bool:
    """Return whether a delayed update ran beside the last step's forward and backward."""
    late, last = result.config.grads.late, len(result.steps) - 1
    return 0 < late <= last and updated_by(result, last) is not None


def last_whole_step(result: RunResult) -> int | None:
    """Return the last step in which parameters were updated."""
    whole = [step for step in range(len(result.steps)) if updated_by(result, step) is not None]
    return whole[-1] if whole else None


def control_bytes(result: RunResult, step: int) -> tuple[int, ...]:
    """Return the bytes that each rank sent for norms and overflow flags."""
    sent = {rank: result.sent_bytes(rank, step, "control") for rank in result.ran}
    return tuple(sent[rank] for rank in result.stands_for)


def peak_rank(result: RunResult) -> int:
    """Return the rank with the highest peak, the lowest such rank."""
    peaks = [memory.peak.total_bytes for memory in result.memory]
    return peaks.index(max(peaks))


def _expected(result: RunResult, share: Share, kind: str, form: Form, beside: Form) -> tuple[Fraction, ...]:
    """`beside`: the part of the form that is the local shard's at any stage."""
    config, whole = result.config, Form()
    if not is_owned(config):
        return (form.at(_held(result, share, list(share.whole)), N=config.mesh.shards),) * len(share.ranks)
    if config.states_stage < formulas.first_partitioned(kind):
        form, whole = beside, form - beside
    by_owner: dict[int | None, list[str]] = {}
    for name in share.whole:
        by_owner.setdefault(result.layout.owner(name), []).append(name)
    owned = (by_owner.get(config.mesh.axes.index(rank, *STATES), []) for rank in share.ranks)
    always = whole.at(_held(result, share, list(share.whole)), N=config.mesh.shards)
    return tuple(always + form.at(_held(result, share, names), N=1) for names in owned)


def _held(result: RunResult, share: Share, names: Sequence[str]) -> dict[str, int]:
    """Return the letters of model states for these flat buffers, padding included."""
    layout = result.layout
    trained = [name for name in names if layout.is_trained(name)]
    codes = [name for name in names if layout.flats[name].weights[0].stored]
    held = {name: share.numels[name] if name in codes else share.whole[name] for name in names}
    letters = letters_of(result, share.stage, padded=True)
    return {
        "Ψ": sum(held.values()),
        "Ψ_t": sum(held[name] for name in trained),
        "Ψ_q": sum(held[name] for name in codes),
        "Q": sum(share.whole[name] for name in codes),
        **{letter: letters[letter] for letter in ("R", "P", "Y", "d") if letter in letters},
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


def _total(shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
    """Return the sum over states, by rank; a sum that all ranks share is added once."""
    if all(len(set(share)) == 1 for share in shares):
        return (sum((share[0] for share in shares), Fraction(0)),) * len(shares[0])
    return tuple(sum(each, Fraction(0)) for each in zip(*shares, strict=True))


def _columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
