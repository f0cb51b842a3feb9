"""Compare counted traffic with the closed forms: numbers only, no words and no layout.

The ranks of each pipeline stage are compared together (`shares.py`). ZeRO's traffic has the purpose `states`. That of
tensor, sequence and pipeline parallelism has the purpose `activations`: it crosses the boundaries of cut weights (axis
tp) and of pipeline stages (axis pp).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import forms, formulas
from zerosim.analysis.capabilities.experts import assumes_routing
from zerosim.analysis.capability import Key
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.formulas import Form
from zerosim.analysis.shares import ranks_of
from zerosim.analysis.weights import exchanged
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.parts.tuning import are_whole
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.axes import what_for
from zerosim.placement.mesh import CUTS, DATA, EXPERT_CUTS, STATES


def check_traffic(of: Compared) -> list[Check]:
    """Check the traffic of model states: the gradients' operation, the parameters' operation, an optimizer's sums, sums
    over replicas, over shares and over a tied table's stages, then all. An unexpected operation has a row too.
    """
    result, config, share = of.result, of.result.config, of.share
    ranks, replicas = config.mesh.shards, config.mesh.dp_replicate
    expected, sent = expect(of, "sent"), of.rows("states")
    for _, row in sent:
        expected.setdefault((row.op, what_for(row.axis)), NOTHING)
    even = is_sliced(config.parallel)
    # The replicas do not divide this buffer, so they add unequal shares in the all_reduce.
    shared = even and not any(numel // ranks_of(result.layout, n) % replicas for n, numel in share.whole.items())
    alike = {"states": even, "replicas": shared}
    by_operation = {key: [(rank, row) for rank, row in sent if (row.op, what_for(row.axis)) == key] for key in expected}
    sums = [*exchanged(result, share.stage)]
    if are_whole(config.tuning):
        sums += [share.whole[name] for name in share.whole if result.layout.is_trained(name)]
    odd = ("all_reduce", "states") if any(numel % ranks for numel in sums) else None
    checks = [
        _of_rows(
            of,
            Key("sent", op, config.mesh.axes.name(*AXES.get(use, (use,)))),
            by_operation[op, use],
            one,
            even=alike.get(use, False) and (op, use) != odd,
        )
        for (op, use), one in expected.items()
    ]
    in_order = [pair for pairs in by_operation.values() for pair in pairs]
    is_even = shared and odd is None and all(use in alike for _, use in expected)
    return [*checks, _of_rows(of, Key("sent", "total"), in_order, _sum(list(expected.values())), even=is_even)]


def check_exchanges(of: Compared) -> list[Check]:
    """Check the activations and their gradients that ranks sent, by operation and axis. A receive sends nothing and has
    no row. An unexpected operation has a row."""
    expected = expect(of, "exchanged")
    sent = [(rank, row) for rank, row in of.rows("activations") if row.op != "recv"]
    for _, row in sent:
        expected.setdefault((row.op, row.axis), NOTHING)
    mesh = of.result.layout.mesh
    experts = (
        {mesh.name(*axes) for axes in (EXPERT_CUTS, *((one,) for one in EXPERT_CUTS))} if mesh.is_folded else set()
    )
    return [
        _of_rows(
            of,
            Key("exchanged", op, axis),
            [(rank, row) for rank, row in sent if (row.op, row.axis) == (op, axis)],
            one,
            even=(axis not in CUTS or _divides(of.result.config)) and axis not in experts,
            is_due=axis not in experts or assumes_routing(of.result),
        )
        for (op, axis), one in expected.items()
    ]


def _divides(config: RunConfig) -> bool:
    """Return whether tensor-parallel ranks add equal shares of everything they reduce."""
    numel = config.data.micro_batch * config.model.seq if config.model.has_blocks else config.model.vocab
    return numel % config.mesh.tp == 0


def all_sent(states: Sequence[Check], exchanges: Sequence[Check]) -> list[Check]:
    """Return both, by operation and axis, then all. There is no row if nothing is sent or due."""
    *parts, total = states
    rows = [*exchanges, *parts]
    if exchanges:
        each = [*exchanges, total]
        total = Check(
            total.key,
            counted=tuple(map(sum, zip(*(check.counted for check in each), strict=True))),
            form=Form(),  # factors of several axes have no common one
            formula=Fraction(sum(check.formula or 0 for check in each)),
            expected=(Fraction(sum(check.with_padding for check in each)),),
            even=all(check.even for check in each),
            calls=sum(check.calls or 0 for check in each),
            dtypes=tuple(dict.fromkeys(dtype for check in each for dtype in check.dtypes)),
            payload=sum(check.payload for check in each),
            modelled=total.modelled,
        )
    return [*([check for check in rows if any(check.counted) or check.with_padding] or rows), total]


AXES = {"states": STATES, "replicas": tuple(axis for axis in DATA if axis not in STATES)}
"""Return the axes of the groups that serve `what_for`."""


class Expected(NamedTuple):
    """Bytes per rank of an operation by its closed form, at Psi and at Psi padded; and its elements as shown."""

    formula: Fraction
    with_padding: Fraction
    form: Form


NOTHING = Expected(Fraction(0), Fraction(0), Form())


def expect(of: Compared, subject: str) -> dict[tuple[str, str], Expected]:
    """Return the values of a subject's forms for a rank of the pipeline stage, by operation and the group's purpose,
    without zeros."""
    found = {}
    for key, form in forms.of(of.forms, subject).items():
        text = of.shown(form)
        if text.terms:
            found[key] = Expected(form.at(of.held), form.at(of.padded), text)
    return found


def _sum(expected: Sequence[Expected]) -> Expected:
    formula = Fraction(sum(one.formula for one in expected))
    with_padding = Fraction(sum(one.with_padding for one in expected))
    return Expected(formula, with_padding, formulas.total(one.form for one in expected))


def _of_rows(
    of: Compared,
    key: Key,
    sent: Sequence[tuple[int, TrafficRow]],
    expected: Expected,
    *,
    even: bool,
    is_due: bool = True,
) -> Check:
    """Compare the rows (rank, row) that a pipeline stage's ranks `sent` with the closed form, if they must agree."""
    stands_for = [of.result.stands_for[rank] for rank in of.share.ranks]
    sent_bytes = dict.fromkeys(stands_for, 0)
    for rank, row in sent:
        sent_bytes[rank] += row.wire_bytes
    first = stands_for[0]
    return Check(
        key,
        counted=tuple(sent_bytes[rank] for rank in stands_for),
        form=expected.form,
        formula=expected.formula,
        expected=(expected.with_padding,) if is_due else (),
        even=even,
        calls=sum(row.calls for rank, row in sent if rank == first),
        dtypes=tuple(dict.fromkeys(row.dtype for _, row in sent)),
        payload=sum(row.payload_bytes for rank, row in sent if rank == first),
        modelled=of.result.is_modelled,
    )
