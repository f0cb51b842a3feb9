"""Compare counted traffic with the closed forms: numbers only, no words and no layout.

The ranks of each pipeline stage are compared together (`shares.py`). This module covers ZeRO's traffic, purpose
`states`. For tensor and pipeline parallelism see `exchanges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import forms, formulas
from zerosim.analysis.capability import Step
from zerosim.analysis.facts import is_sliced
from zerosim.analysis.formulas import Form
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import Share, share_of
from zerosim.analysis.weights import exchanged, passes_of, shown
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.mesh import DATA, STATES, what_for
from zerosim.train.result import RunResult


@dataclass(frozen=True, slots=True)
class TrafficCheck:
    """One operation's traffic in one step, sent bytes by rank, beside its formula.

    `payload` is the first rank's, in whole tensors. `modelled`: `sent` was not observed; it is a ring's traffic.
    """

    op: str
    axis: str
    dtypes: tuple[str, ...]
    calls: int
    sent: tuple[int, ...]
    formula: Fraction
    form: Form
    """The elements in `formula`, in the letters that are not 0."""
    with_padding: Fraction
    even: bool
    """Every rank must send the same (slices, equal shares across replicas); otherwise only the total is fixed."""
    payload: int
    modelled: bool

    @property
    def text(self) -> str:
        return str(self.form)

    @property
    def mean(self) -> Fraction:
        return Fraction(sum(self.sent), len(self.sent))

    @property
    def padding(self) -> Fraction:
        """Padding in bytes per rank."""
        return self.with_padding - self.formula

    @property
    def agrees(self) -> bool:
        return self.mean == self.with_padding and (not self.even or len(set(self.sent)) == 1)


def check_traffic(result: RunResult, step: int, stage: int = 0) -> list[TrafficCheck]:
    """Check the traffic of model states of a pipeline stage's ranks: the gradients' operation, the parameters'
    operation, an optimizer's sums, sums over replicas, over shares and over a tied table's stages, then all. An
    unexpected operation has a row too.
    """
    config, share = result.config, share_of(result, stage)
    ranks, replicas = config.mesh.shards, config.mesh.dp_replicate
    expected = expect(result, share, "sent", passes_of(result, step), step)
    sent = sent_rows(result, step, share, "states")
    for _, row in sent:
        expected.setdefault((row.op, what_for(row.axis)), NOTHING)
    even = is_sliced(config)
    # The replicas do not divide this buffer, so they add unequal shares in the all_reduce.
    shared = even and not any(numel // ranks % replicas for numel in share.whole.values())
    alike = {"states": even, "replicas": shared}
    by_operation = {key: [(rank, row) for rank, row in sent if (row.op, what_for(row.axis)) == key] for key in expected}
    odd = ("all_reduce", "states") if any(numel % ranks for numel in exchanged(result, stage)) else None
    checks = [
        traffic_of(
            result,
            share,
            by_operation[op, use],
            op,
            config.mesh.axes.name(*AXES.get(use, (use,))),
            one,
            even=alike.get(use, False) and (op, use) != odd,
        )
        for (op, use), one in expected.items()
    ]
    whole = Expected(
        sum((one.formula for one in expected.values()), Fraction(0)),
        sum((one.with_padding for one in expected.values()), Fraction(0)),
        formulas.total(one.form for one in expected.values()),
    )
    in_order = [pair for pairs in by_operation.values() for pair in pairs]
    is_even = shared and odd is None and all(use in alike for _, use in expected)
    return [*checks, traffic_of(result, share, in_order, "total", "", whole, even=is_even)]


AXES = {"states": STATES, "replicas": tuple(axis for axis in DATA if axis not in STATES)}
"""Return the axes of the groups that serve `what_for`."""


class Expected(NamedTuple):
    """Bytes per rank of an operation by its closed form, at Psi and at Psi padded; and its elements as shown."""

    formula: Fraction
    with_padding: Fraction
    form: Form


NOTHING = Expected(Fraction(0), Fraction(0), Form())


def expect(
    result: RunResult, share: Share, subject: str, passes: int, step: int = 0
) -> dict[tuple[str, str], Expected]:
    """Return the values of a subject's forms for a rank of the pipeline stage, by operation and the group's purpose,
    without zeros."""
    held, padded = (letters_of(result, share.stage, padded=padded, step=step) for padded in (False, True))
    found = {}
    for key, form in forms.of(forms.forms(result.config, step=Step(passes, step)), subject).items():
        text = shown(form, held)
        if text.terms:
            found[key] = Expected(form.at(held), form.at(padded), text)
    return found


def sent_rows(result: RunResult, step: int, share: Share, purpose: str) -> list[tuple[int, TrafficRow]]:
    """Return the rows of one step and purpose, with their ranks, for the pipeline stage's ranks that ran."""
    return [
        (rank, row)
        for rank in dict.fromkeys(result.stands_for[rank] for rank in share.ranks)
        for row in result.traffic[rank]
        if row.step == step and row.purpose == purpose
    ]


def traffic_of(
    result: RunResult,
    share: Share,
    sent: Sequence[tuple[int, TrafficRow]],
    op: str,
    axis: str,
    expected: Expected,
    *,
    even: bool,
) -> TrafficCheck:
    """Compare the rows (rank, row) that a pipeline stage's ranks `sent` with the closed form."""
    stands_for = [result.stands_for[rank] for rank in share.ranks]
    sent_bytes = dict.fromkeys(stands_for, 0)
    for rank, row in sent:
        sent_bytes[rank] += row.wire_bytes
    first = stands_for[0]
    return TrafficCheck(
        op=op,
        axis=axis,
        dtypes=tuple(dict.fromkeys(row.dtype for _, row in sent)),
        calls=sum(row.calls for rank, row in sent if rank == first),
        sent=tuple(sent_bytes[rank] for rank in stands_for),
        payload=sum(row.payload_bytes for rank, row in sent if rank == first),
        modelled=result.is_modelled,
        formula=expected.formula,
        form=expected.form,
        with_padding=expected.with_padding,
        even=even,
    )
