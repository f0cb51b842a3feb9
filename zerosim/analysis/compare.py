"""What a run counted beside what the closed forms say: numbers only, no words and no layout.

Counts come from the run's ledgers, expectations from `analysis/formulas`; an agreement is an
equality of exact numbers, never a tolerance. With slices a formula is compared twice: at Psi with
what was counted less padding (over all ranks), and at Psi padded with every rank's own count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter, Volume
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.partition import slice_size
from zerosim.train.build import is_block
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


@dataclass(frozen=True, slots=True)
class TrafficCheck:
    """One operation's traffic of model states in one step, sent bytes by rank, beside its formula.

    `payload` is rank 0's, the whole tensors. `modelled`: `sent` was not seen, it is what a ring would send.
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


def cost_of(config: RunConfig) -> BytesPerParameter:
    """Bytes per parameter of each model state in this run."""
    moments = formulas.num_moments(config.optim.optimizer, config.optim.momentum)
    cast = config.parallel.zero_stage == 3 and config.recipe_choices.cast_shards
    return formulas.bytes_per_parameter(*itemsizes(config), moments, cast_shards=cast)


def itemsizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter, and of a gradient."""
    return dtype(config.precision.param_dtype).itemsize, dtype(config.recipe_choices.grad_dtype).itemsize


def volume_of(result: RunResult) -> Volume:
    """The elements that this run's stage moves per step."""
    config, choices = result.config, result.config.recipe_choices
    gathers = gathers_of(result)
    return formulas.volume(
        config.parallel.zero_stage,
        micro_batches=config.data.accumulate,
        tied=gathers.tied > 0,
        reshard_after_forward=config.parallel.reshard_after_forward,
        keep_last_unit=config.parallel.keep_last_unit and gathers.last > 0,
        grad_reduction="reduce_scatter" if is_owned(config) else choices.grad_reduction,
        keep_root_units=choices.keep_root_units,
        persistent=gathers.persistent > 0,
        last_is_root=not is_block(result.units[-1].name) or result.tied_numel > 0,
    )


class Gathers(NamedTuple):
    """Elements of the units that stage 3 gathers more or less often than the others, in `Volume`'s order."""

    tied: int
    last: int
    root: int
    persistent: int


def gathers_of(result: RunResult, ranks: int = 1) -> Gathers:
    """The tied table, the last unit, the units outside the blocks, those that are never freed; padded for `ranks`."""
    limit = result.config.recipe_choices.persistent_numel
    tied_name = result.units[0].name if result.tied_numel else ""
    last = tied_name or result.units[-1].name
    freed = {unit.name: unit.numel for unit in result.units if unit.numel >= limit}

    def padded(names: Iterable[str]) -> int:
        return formulas.padded_numel((freed[name] for name in names if name in freed), ranks)

    return Gathers(
        tied=padded([tied_name]),
        last=padded([last]),
        root=padded(name for name in freed if not is_block(name)),
        persistent=formulas.padded_numel((unit.numel for unit in result.units if unit.numel < limit), ranks),
    )


def is_owned(config: RunConfig) -> bool:
    """Whole units belong to ranks. Stage 0 divides nothing."""
    return config.parallel.partition == "owner" and config.parallel.zero_stage > 0


def is_sliced(config: RunConfig) -> bool:
    return config.parallel.partition == "slices" and config.parallel.zero_stage > 0


def check_states(result: RunResult) -> list[StateCheck]:
    """param, grad, optim, then their total."""
    config, cost = result.config, cost_of(result.config)
    snapshots = [memory.marks[MARK] for memory in result.memory]
    formula = formulas.model_states(config.parallel.zero_stage, result.num_parameters, config.mesh.dp_shard, cost)
    checks = [
        StateCheck(
            kind=kind,
            counted=tuple(snapshot.by_kind.get(kind, 0) for snapshot in snapshots),
            padding=tuple(snapshot.padding.get(kind, 0) for snapshot in snapshots),
            formula=formula[kind],
            text=formulas.state_text(config.parallel.zero_stage, kind, cost),
            expected=_expected(result, kind, cost),
        )
        for kind in formulas.STATES
    ]
    total = StateCheck(
        kind="total",
        counted=_columns([check.counted for check in checks]),
        padding=_columns([check.padding for check in checks]),
        formula=sum((check.formula for check in checks), Fraction(0)),
        text=formulas.model_states_text(config.parallel.zero_stage, cost),
        expected=_total([check.expected for check in checks]),
    )
    return [*checks, total]


def last_whole_step(result: RunResult) -> int | None:
    """The last step that was not skipped."""
    whole = [step for step, report in enumerate(result.steps) if not report.skipped]
    return whole[-1] if whole else None


def check_traffic(result: RunResult, step: int) -> list[TrafficCheck]:
    """Gradients' operation, parameters' operation, then all; an operation that should not be there has a row too."""
    config, volume = result.config, volume_of(result)
    psi, ranks, replicas = result.num_parameters, config.mesh.dp_shard, config.mesh.dp_replicate
    padded, cuts = psi, 1
    if is_sliced(config):
        padded, cuts = formulas.padded_numel((unit.numel for unit in result.units), ranks), ranks
    param_bytes, grad_bytes = itemsizes(config)
    grads_op, params_op = _operations(config)
    inside = config.mesh.axes.name("dp_shard")

    def both(of: Callable[[int, Gathers], Fraction]) -> tuple[Fraction, Fraction]:
        """A formula at Psi, and at Psi padded."""
        return of(psi, gathers_of(result)), of(padded, gathers_of(result, cuts))

    forms: dict[tuple[str, str], _Form] = {
        (grads_op, inside): _Form(
            *both(lambda numel, _: volume.sent_grad_bytes(numel, ranks, grad_bytes)), volume.grads_text()
        )
    }
    if params_op:
        forms[params_op, inside] = _Form(
            *both(lambda numel, gathers: volume.sent_param_bytes(numel, ranks, param_bytes, *gathers)),
            volume.params_text(),
        )
    if replicas > 1:
        num = num_replica_reductions(config)
        forms["all_reduce", "dp_replicate"] = _Form(
            *both(lambda numel, _: formulas.replica_bytes(numel, ranks, replicas, grad_bytes, reductions=num)),
            formulas.replica_text(num),
        )
    sent = [
        (rank, row)
        for rank in result.ran
        for row in result.traffic[rank]
        if row.step == step and row.purpose == "states"
    ]
    for _, row in sent:
        forms.setdefault((row.op, row.axis), _Form(Fraction(0), Fraction(0), "0"))
    even = is_sliced(config)
    # An all_reduce of what R does not divide: replicas add unlike shares of a part.
    shared = even and not any(slice_size(unit.numel, ranks) % replicas for unit in result.units)
    by_operation = {key: [(rank, row) for rank, row in sent if (row.op, row.axis) == key] for key in forms}
    checks = [
        _traffic_of(result, by_operation[op, axis], op, axis, form, even if axis == inside else shared)
        for (op, axis), form in forms.items()
    ]
    texts = [volume.text(), *(form.text for (_, axis), form in forms.items() if axis == "dp_replicate")]
    total = _Form(
        sum((form.formula for form in forms.values()), Fraction(0)),
        sum((form.with_padding for form in forms.values()), Fraction(0)),
        " + ".join(texts),
    )
    in_order = [pair for pairs in by_operation.values() for pair in pairs]
    return [*checks, _traffic_of(result, in_order, "total", "", total, shared)]


class _Form(NamedTuple):
    """Bytes per rank that a closed form gives for an operation, at Psi and at Psi padded; and the form in words."""

    formula: Fraction
    with_padding: Fraction
    text: str


def _traffic_of(
    result: RunResult, sent: Sequence[tuple[int, TrafficRow]], op: str, axis: str, form: _Form, even: bool
) -> TrafficCheck:
    """What ranks `sent`, as (rank, row), beside its form."""
    sent_bytes = dict.fromkeys(result.ran, 0)
    for rank, row in sent:
        sent_bytes[rank] += row.wire_bytes
    return TrafficCheck(
        op=op,
        axis=axis,
        dtypes=tuple(dict.fromkeys(row.dtype for _, row in sent)),
        calls=sum(row.calls for rank, row in sent if rank == 0),
        sent=tuple(sent_bytes[rank] for rank in result.stands_for),
        payload=sum(row.payload_bytes for rank, row in sent if rank == 0),
        modelled=result.is_modelled,
        formula=form.formula,
        text=form.text,
        with_padding=form.with_padding,
        even=even,
    )


def control_bytes(result: RunResult, step: int) -> tuple[int, ...]:
    """What each rank sent for norms and overflow flags."""
    sent = {rank: result.sent_bytes(rank, step, "control") for rank in result.ran}
    return tuple(sent[rank] for rank in result.stands_for)


def peak_rank(result: RunResult) -> int:
    """The rank with the highest peak, the lowest of those with the same."""
    peaks = [memory.peak.total_bytes for memory in result.memory]
    return peaks.index(max(peaks))


def _expected(result: RunResult, kind: str, cost: BytesPerParameter) -> tuple[Fraction, ...]:
    config = result.config
    each = {"param": cost.param, "grad": cost.grad, "optim": cost.optim}[kind]
    if is_owned(config) and config.parallel.zero_stage >= formulas.first_partitioned(kind):
        owned: Counter[int | None] = Counter()
        for unit in result.units:
            owned[unit.owner] += unit.numel
        index = config.mesh.axes.index
        return tuple(Fraction(each * owned[index(rank, "dp_shard")]) for rank in range(config.mesh.ranks))
    psi = result.num_parameters
    if is_sliced(config):
        psi = formulas.padded_numel((unit.numel for unit in result.units), config.mesh.dp_shard)
    share = formulas.model_states(config.parallel.zero_stage, psi, config.mesh.dp_shard, cost)[kind]
    return (share,) * config.mesh.ranks


def num_replica_reductions(config: RunConfig) -> int:
    """How often in a step a rank averages its part of the gradients over replicas."""
    return (
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
    return config.recipe_choices.grad_reduction if config.parallel.zero_stage < 3 else "reduce_scatter", "all_gather"


def _total(shares: Sequence[tuple[Fraction, ...]]) -> tuple[Fraction, ...]:
    """The sum over states, by rank; added once where every rank has the same."""
    if all(len(set(share)) == 1 for share in shares):
        return (sum((share[0] for share in shares), Fraction(0)),) * len(shares[0])
    return tuple(sum(each, Fraction(0)) for each in zip(*shares, strict=True))


def _columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
