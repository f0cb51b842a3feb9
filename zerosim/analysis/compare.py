"""What a run counted beside what the closed forms say: numbers only, no words and no layout.

Counts come from the run's ledgers, expectations from `analysis/formulas`; an agreement is an
equality of exact numbers, never a tolerance. With slices a formula is compared twice: at Psi with
what was counted less padding (over all ranks), and at Psi padded with every rank's own count.

Ranks of one pipeline stage are compared at a time, for Psi is what each of them holds (`shares.py`). Traffic:
`traffic.py`, `exchanges.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerosim.analysis import forms, formulas
from zerosim.analysis.formulas import Form
from zerosim.analysis.shares import Share, cost_of, kept_bytes, kept_padding, master_bytes, share_of
from zerosim.placement.mesh import STATES
from zerosim.train.result import RunResult

MARK = "end_of_backward"


@dataclass(frozen=True, slots=True)
class StateCheck:
    """One model state, in bytes by rank, beside its formula (per rank, without padding)."""

    kind: str
    counted: tuple[int, ...]
    padding: tuple[int, ...]
    formula: Fraction
    text: str
    expected: tuple[Fraction, ...]
    """What each rank must hold, padding included."""

    @property
    def mean(self) -> Fraction:
        """Per rank, less padding."""
        return Fraction(sum(self.counted) - sum(self.padding), len(self.counted))

    @property
    def agrees(self) -> bool:
        return self.mean == self.formula and self.counted == self.expected


def check_states(result: RunResult, stage: int = 0) -> list[StateCheck]:
    """param, grad, optim, then their total, of the ranks of a pipeline stage."""
    config, cost, share = result.config, cost_of(result, stage), share_of(result, stage)
    snapshots = [result.memory[rank].marks[MARK] for rank in share.ranks]
    has_states = not config.optim.lazy_states or any(not step.skipped for step in result.steps[:-1])
    if not has_states:
        cost = replace(cost, optim=master_bytes(config))
    states = {kind: form for (kind, _), form in forms.of(forms.forms(config, cost), "states").items()}
    formula = {kind: form.at(Ψ=share.num_parameters, N=config.mesh.shards) for kind, form in states.items()}
    expected = {kind: _expected(result, share, kind, form) for kind, form in states.items()}
    if has_states and config.optim.optimizer not in formulas.UNIFORM:
        kept = [_kept(result, rank) for rank in share.ranks]
        formula["optim"] = Fraction(sum(nbytes for nbytes, _ in kept), len(kept))
        expected["optim"] = tuple(Fraction(nbytes + padding) for nbytes, padding in kept)
    checks = [
        StateCheck(
            kind=kind,
            counted=tuple(snapshot.by_kind.get(kind, 0) for snapshot in snapshots),
            padding=tuple(snapshot.padding.get(kind, 0) for snapshot in snapshots),
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


def last_whole_step(result: RunResult) -> int | None:
    """The last step that was not skipped."""
    whole = [step for step, report in enumerate(result.steps) if not report.skipped]
    return whole[-1] if whole else None


def control_bytes(result: RunResult, step: int) -> tuple[int, ...]:
    """What each rank sent for norms and overflow flags."""
    sent = {rank: result.sent_bytes(rank, step, "control") for rank in result.ran}
    return tuple(sent[rank] for rank in result.stands_for)


def peak_rank(result: RunResult) -> int:
    """The rank with the highest peak, the lowest of those with the same."""
    peaks = [memory.peak.total_bytes for memory in result.memory]
    return peaks.index(max(peaks))


def _expected(result: RunResult, share: Share, kind: str, form: Form) -> tuple[Fraction, ...]:
    config = result.config
    if forms.is_owned(config) and config.states_stage >= formulas.first_partitioned(kind):
        owned: Counter[int | None] = Counter()
        for name, numel in share.whole.items():
            owned[result.layout.owner(name)] += numel
        index = config.mesh.axes.index
        return tuple(form.at(Ψ=owned[index(rank, *STATES)], N=1) for rank in share.ranks)
    return (form.at(Ψ=sum(share.whole.values()), N=config.mesh.shards),) * len(share.ranks)


def _kept(result: RunResult, rank: int) -> tuple[int, int]:
    """Bytes of optimizer states that a rank must keep, by the shapes of the weights in its parts; and of padding."""
    config, layout = result.config, result.layout
    kept = padding = 0
    for name in layout.stages[config.mesh.axes.index(rank, "pp")]:
        part = layout.own(rank, name)
        padding += kept_padding(config, layout.flats[name].padding(part))
        kept += sum(kept_bytes(config, mine.weight, mine.numel) for mine in layout.flats[name].within(part))
    return kept, padding


def _total(shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
    """The sum over states, by rank; added once where every rank has the same."""
    if all(len(set(share)) == 1 for share in shares):
        return (sum((share[0] for share in shares), Fraction(0)),) * len(shares[0])
    return tuple(sum(each, Fraction(0)) for each in zip(*shares, strict=True))


def _columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
