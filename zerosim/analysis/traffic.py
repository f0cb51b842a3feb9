"""What a run counted of traffic beside what the closed forms say: numbers only, no words and no layout.

Ranks of one pipeline stage are compared at a time (`shares.py`). ZeRO's traffic is here, purpose `states`; what tensor
and pipeline parallelism send: `exchanges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.analysis.shares import (
    Share,
    all_reduce_times,
    exchanged,
    exchanged_sent,
    is_by_pairs,
    is_owned,
    is_sliced,
    itemsizes,
    letters_of,
    passes_of,
    share_of,
    shared_grads,
    volume_of,
)
from zerosim.config import RunConfig
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.mesh import DATA, STATES, what_for
from zerosim.train.result import RunResult


@dataclass(frozen=True, slots=True)
class TrafficCheck:
    """One operation's traffic in one step, sent bytes by rank, beside its formula.

    `payload` is the first rank's, the whole tensors. `modelled`: `sent` was not seen, it is what a ring would send.
    """

    op: str
    axis: str
    dtypes: tuple[str, ...]
    calls: int
    sent: tuple[int, ...]
    formula: Fraction
    text: str
    with_padding: Fraction
    even: bool
    """Every rank must send the same (slices, alike shares across replicas); else the total alone is fixed."""
    payload: int
    modelled: bool

    @property
    def mean(self) -> Fraction:
        return Fraction(sum(self.sent), len(self.sent))

    @property
    def padding(self) -> Fraction:
        """Per rank."""
        return self.with_padding - self.formula

    @property
    def agrees(self) -> bool:
        return self.mean == self.with_padding and (not self.even or len(set(self.sent)) == 1)


def check_traffic(result: RunResult, step: int, stage: int = 0) -> list[TrafficCheck]:
    """What the ranks of a pipeline stage sent for model states: gradients' operation, parameters' operation, an
    optimizer's sums, sums over replicas, over shares and over a tied table's stages, then all; an operation that should
    not be there has a row too.
    """
    config, share, passes = result.config, share_of(result, stage), passes_of(result, step)
    ranks, replicas = config.mesh.shards, config.mesh.dp_replicate
    forms = _forms(result, share, passes)
    sent = sent_rows(result, step, share, "states")
    for _, row in sent:
        forms.setdefault((row.op, what_for(row.axis)), Form(Fraction(0), Fraction(0), "0"))
    even = is_sliced(config)
    # An all_reduce of what R does not divide: replicas add unlike shares of a part.
    shared = even and not any(numel // ranks % replicas for numel in share.whole.values())
    alike = {"states": even, "replicas": shared}
    by_operation = {key: [(rank, row) for rank, row in sent if (row.op, what_for(row.axis)) == key] for key in forms}
    odd = ("all_reduce", "states") if any(numel % ranks for numel in exchanged(result, stage)) else None
    checks = [
        traffic_of(
            result,
            share,
            by_operation[op, use],
            op,
            config.mesh.axes.name(*_AXES.get(use, (use,))),
            form,
            even=alike.get(use, False) and (op, use) != odd,
        )
        for (op, use), form in forms.items()
    ]
    texts = [
        str(volume_of(result, stage, passes=passes)),
        *([f"{all_reduce_times(config, ranks)}F"] if exchanged(result, stage) else []),
        *(form.text for (_, use), form in forms.items() if use != "states" and form.text != "0"),
    ]
    total = Form(
        sum((form.formula for form in forms.values()), Fraction(0)),
        sum((form.with_padding for form in forms.values()), Fraction(0)),
        " + ".join(texts),
    )
    in_order = [pair for pairs in by_operation.values() for pair in pairs]
    is_even = shared and odd is None and all(use in alike for _, use in forms)
    return [*checks, traffic_of(result, share, in_order, "total", "", total, even=is_even)]


_AXES = {"states": STATES, "replicas": tuple(axis for axis in DATA if axis not in STATES)}
"""The axes of groups that are `what_for` something."""


class Form(NamedTuple):
    """Bytes per rank that a closed form gives for an operation, at Psi and at Psi padded; and the form in words."""

    formula: Fraction
    with_padding: Fraction
    text: str


def _forms(result: RunResult, share: Share, passes: int) -> dict[tuple[str, str], Form]:
    """By operation and what its group is for, what a rank of the stage sends for model states."""
    config, volume = result.config, volume_of(result, share.stage, passes=passes)
    ranks, replicas, grad_bytes = config.mesh.shards, config.mesh.dp_replicate, itemsizes(config)[1]
    grads_op, params_op = _operations(config)
    pairs = is_by_pairs(config)
    held, padded = (letters_of(result, share.stage, padded=padded) for padded in (False, True))

    def both(form: formulas.Form) -> Form:
        """A closed form at Psi, and at Psi padded."""
        return Form(form.at(held), form.at(padded), str(form.elements))

    forms = {(grads_op, "states"): both(volume.grads)}
    if params_op:
        forms[params_op, "states"] = both(volume.params)
    if exchanged(result, share.stage):
        # Some recipes all-reduce gradients too.
        there = forms.get(("all_reduce", "states"), Form(Fraction(0), Fraction(0), ""))
        nbytes = exchanged_sent(result, share.stage)
        text = " + ".join(filter(None, (there.text, f"{all_reduce_times(config, ranks)}F")))
        forms["all_reduce", "states"] = Form(there.formula + nbytes, there.with_padding + nbytes, text)
    if replicas > 1:
        num = num_replica_reductions(config, passes)
        forms["all_reduce", "replicas"] = both(formulas.replica_bytes(replicas, reductions=num, pairs=pairs))
    parts = ranks if config.parallel.zero_stage else 1
    of_parts = "/N" if parts > 1 else ""
    if shared := shared_grads((result.layout.flats[name] for name in share.numels), config.mesh.tp):
        nbytes = formulas.shared_sent(shared, parts, pairs=pairs) * grad_bytes
        forms["all_reduce", "tp"] = Form(nbytes, nbytes, f"{'k' if pairs else 2}S{of_parts}")
    if share.ends:
        numel = share.numels[share.ends]
        table = share.whole[share.ends]
        each = passes * grad_bytes
        sent = (formulas.tied_sent(numel, parts) * each, formulas.tied_sent(table, parts) * each)
        forms["all_reduce", "pp"] = Form(*sent, f"{2 * passes}E{of_parts}")
    return forms


def sent_rows(result: RunResult, step: int, share: Share, purpose: str) -> list[tuple[int, TrafficRow]]:
    """The rows of one step and purpose, with their ranks, of those ranks of a stage that were run."""
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
    form: Form,
    *,
    even: bool,
) -> TrafficCheck:
    """What a stage's ranks `sent`, as (rank, row), beside its form."""
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
        formula=form.formula,
        text=form.text,
        with_padding=form.with_padding,
        even=even,
    )


def num_replica_reductions(config: RunConfig, passes: int = 1) -> int:
    """How often in a step a rank averages its part of the gradients over replicas."""
    return passes * (
        config.data.accumulate
        if config.parallel.replica_reduction == "micro_batch" and config.parallel.zero_stage >= 2
        else 1
    )


def _operations(config: RunConfig) -> tuple[str, str]:
    """What reduces gradients and what brings parameters."""
    if config.parallel.zero_stage == 0:
        return "all_reduce", ""
    if is_owned(config):
        return "reduce", "broadcast"
    return config.reduction.grad_reduction if config.parallel.zero_stage < 3 else "reduce_scatter", "all_gather"
