"""A run on shapes alone: any model, any number of ranks, every byte counted and no value computed.

The program is that of a real run (`train/rank.py`), over a backend without data (`backends/meta.py`) and a transport
on which nobody meets (`comm/transports/fake.py`). So memory and traffic are those of a real run, record by record.

Few ranks have to be run. What a rank does depends on its number in few ways: the padding at the end of its slices, the
units it owns, the share it adds of a buffer that N does not divide. Ranks that are alike in all of them leave the same
bytes, and one stands for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from zerosim.comm.runtime import Context, launch_alone, make_backend
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device, Phase
from zerosim.device.events import Event, Launch
from zerosim.dtypes import dtype, int64
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime, Timeline, simulate, step_time
from zerosim.ledger.costs_of import costs_of
from zerosim.ledger.entries import Entry
from zerosim.ledger.pace import PaceLedger
from zerosim.ledger.ranks import RankLedgers
from zerosim.optim.control import StepControl, StepReport
from zerosim.placement.classes import classes, reasons
from zerosim.train.build import build_model, world_of
from zerosim.train.build_strategy import IsTrained, all_trained, layout_of
from zerosim.train.extend import extrapolated, from_short_plans, shorter_runs
from zerosim.train.rank import Inputs, train_rank
from zerosim.train.repeated import Rehearsals
from zerosim.train.result import RunResult, collect
from zerosim.train.work import check_plan

MOST_STEPS = 10
"""At most so many steps are planned to decide whether a configuration fits."""


def plan(
    config: RunConfig,
    *,
    every_rank: bool = False,
    every_block: bool = False,
    skipped: Collection[int] = (),
    keep_events: bool = False,
    cluster: Cluster | None = None,
    is_trained: IsTrained = all_trained,
) -> RunResult:
    """What `run` would count of memory and traffic, on shapes alone; `config.optim.steps` or, where it is None, one
    step, two where the first one makes states: of an optimizer that estimates curvature one with its estimate, whose
    `time` is the mean over steps.

    The result has no losses, norms and weights. `plan_config` makes a configuration with a plan's defaults.

    `every_rank` runs each rank instead of one of each class, and `every_block` each block instead of repeating what one
    did (`repeated.py`), as checks. `skipped` are the steps that
    overflow (there are no values to tell), as a real run reported them. What is about values in
    `config` (data, weights, tokens, sample) is not read. Of many micro-batches few are run, and the rest
    follows (`extend.py`), unless events are kept. With a `cluster` the result has the step's `time` on it.

    Of the flat buffers those are trained for which `is_trained` is true; the others have parameters alone.

    Raises: InputError, also where it would take far too long (`work.py`); OutOfMemory (where the configuration has a
    capacity).
    """
    check_plan_of(config, every_rank=every_rank, keep_events=keep_events)

    repeats: Rehearsals | None = None if every_block else {}

    def planned(asked: RunConfig, by_moment: bool = False) -> RunResult:
        return _plan(asked, every_rank, repeats, skipped, keep_events, cluster, by_moment, is_trained)

    # Under GPipe, where reductions hold up the last backward, another stage may be the slowest one of a long step: a
    # search within a capacity ranks by exact times.
    # Pending weight gradients are slack, which unequal stages use up over many micro-batches: no short step tells.
    kind, is_search = config.parallel.pipeline_schedule, config.memory.capacity is not None
    timed = cluster is not None and (kind in ("zb-h1", "zb-v") or (kind == "gpipe" and is_search))
    short = None if keep_events or timed else from_short_plans(config, partial(planned, by_moment=True))
    if short is not None:
        return short
    check_plan(config, config.data.accumulate, every_rank=every_rank)
    return planned(config)


def check_plan_of(config: RunConfig, *, every_rank: bool = False, keep_events: bool = False) -> None:
    """Raises: InputError where the plan would take far too long; before any of it."""
    counts = () if keep_events else next(shorter_runs(config), ())
    check_plan(config, sum(counts) or config.data.accumulate, every_rank=every_rank)


def _plan(
    config: RunConfig,
    every_rank: bool,
    repeats: Rehearsals | None,
    skipped: Collection[int],
    keep_events: bool,
    cluster: Cluster | None,
    by_moment: bool,
    is_trained: IsTrained,
) -> RunResult:
    """`plan` with all of its micro-batches."""
    model = build_model(config, Device(0, make_backend("meta")))
    layout = layout_of(config, model, is_trained=is_trained)
    around = (-1, 0, 1) if config.world.algorithm == "ring" else (0,)  # a ring passes on its neighbours' shares
    by_tensor = OPTIMIZERS[config.optim.optimizer].cut in ("blocks", "sums")
    stands_for = list(range(config.mesh.ranks)) if every_rank else [0] * config.mesh.ranks
    uneven, reports = _UnevenReductions(), dict[int, list[StepReport]]()
    costs = None if cluster is None else costs_of(config, cluster)
    ledgers: dict[int, RankLedgers] = {}
    while missing := sorted(set(stands_for) - ledgers.keys()):
        for rank in missing:
            ledgers[rank] = RankLedgers(rank, config.memory.allocator, costs, by_moment=by_moment)
            reports[rank] = _run_rank(config, ledgers[rank], uneven, repeats, skipped, keep_events, is_trained)
        if not every_rank:  # owners of other units may reduce what their group does not divide: then more have to run
            stands_for = classes(layout, reasons(uneven.found, by_tensor=by_tensor), around)
    result = collect(config, model, layout, ledgers, stands_for, reports[0], keep_events=keep_events)
    if costs is None:
        return result
    paces = {rank: one.pace.entries for rank, one in ledgers.items() if one.pace is not None}

    def time_of(entries: Mapping[int, Sequence[Entry]]) -> StepTime:
        return step_time(simulate(entries, stands_for, config.mesh.axes, costs), stands_for)

    time = time_of(paces)
    if config.optim.steps is None and result.steps[0].estimated:  # of so many steps one has an estimate
        without = {rank: [entry for entry in paces[rank] if not _is_of_estimate(entry)] for rank in paces}
        every = OPTIMIZERS[config.optim.optimizer].estimates_every
        time = extrapolated(time_of(without), time, 1 / every - 1)
    return replace(result, time=time)


def _is_of_estimate(entry: Entry) -> bool:
    return entry.scope.phase in (Phase.CURVATURE_FORWARD, Phase.CURVATURE_BACKWARD, Phase.CURVATURE)


def plan_first_step(config: RunConfig) -> RunResult:
    """A plan that has kept its events, of the first step alone, however many the configuration has."""
    return plan(config if config.optim.steps is None else config.replace(steps=1), keep_events=True)


def timeline_of(result: RunResult, cluster: Cluster, step: int = 0) -> Timeline:
    """Every kernel and collective of a plan's step in time, on each rank that ran. The plan has kept its events."""
    entries = paces_of(result, cluster, step, detail=True)
    costs = costs_of(result.config, cluster)
    return simulate(entries, result.stands_for, result.config.mesh.axes, costs, keep_spans=True)


def paces_of(result: RunResult, cluster: Cluster, step: int = 0, *, detail: bool = False) -> dict[int, list[Entry]]:
    """What the clock needs of a plan's step, on each rank that ran. The plan has kept its events."""
    costs = costs_of(result.config, cluster)
    paces = {rank: PaceLedger(costs, step=step, detail=detail) for rank in result.ran}
    for rank, pace in paces.items():
        pace.read(result.events[rank])
    return {rank: pace.entries for rank, pace in paces.items()}


def judged(config: RunConfig, capacity: int | None) -> RunConfig:
    """The plan that decides whether a configuration fits devices of that capacity: the same allocator, with no more.

    Exact bytes are the same in every step, so one is planned. Other allocators carry free blocks from step to step, and
    what they reserve depends on the capacity. So the configuration's own steps are planned, at most `MOST_STEPS`.
    """
    own = None if config.memory.allocator == "exact" else config.optim.steps
    steps = None if own is None else min(own, MOST_STEPS)
    return config.replace(capacity=None if capacity is None else max(1, capacity), steps=steps)


def peak_of(config: RunConfig, capacity: int | None = None) -> int:
    """The most that a rank takes from its device, in bytes. It fits where that is at most the capacity.

    An exact allocator takes the peak of live bytes on every device. Another one is judged on devices of that capacity;
    where it refuses, these are the bytes with which it would have granted that request.
    """
    return sum(peak_within(config, None if config.memory.allocator == "exact" else capacity).values())


def peak_within(config: RunConfig, capacity: int | None) -> Mapping[str, int]:
    """Bytes by kind at the peak of the rank that takes most; the first rank that asks for more than `capacity` ends the
    plan, and the bytes are those that it would have had then. They are more than `capacity` exactly where it ended."""
    try:
        memory = plan(judged(config, capacity)).memory
    except OutOfMemory as error:
        asked = {**error.live, error.kind: error.live.get(error.kind, 0) + error.requested}
        return asked if error.room is None else _with_unused(asked, error.room.needed_bytes)
    most = max(memory, key=lambda rank: rank.reserved_bytes)
    return _with_unused(most.peak.by_kind, most.reserved_bytes)


def _with_unused(by_kind: Mapping[str, int], reserved_bytes: int) -> Mapping[str, int]:
    """What an allocator takes beyond the bytes that are live counts as a kind of its own."""
    unused = reserved_bytes - sum(by_kind.values())
    return {**by_kind, "unused": unused} if unused else by_kind


class Figures(NamedTuple):
    """Of one step: the most that a rank takes from its device, what all ranks send of model states and activations, and
    its time."""

    peak_bytes: int
    sent_bytes: int
    time: StepTime | None


def figures_within(config: RunConfig, capacity: int, cluster: Cluster | None = None) -> Figures | None:
    """What a step takes; None where a rank asks for more than `capacity`. The time is of a `cluster`."""
    try:
        result = plan(judged(config, capacity), cluster=cluster)
    except OutOfMemory:
        return None
    alike = Counter(result.stands_for)
    sent = sum(
        alike[rank] * (result.sent_bytes(rank, 0) + result.sent_bytes(rank, 0, "activations")) for rank in result.ran
    )
    return Figures(max(memory.reserved_bytes for memory in result.memory), sent, result.time)


def _run_rank(
    config: RunConfig,
    ledgers: RankLedgers,
    uneven: _UnevenReductions,
    repeats: Rehearsals | None,
    skipped: Collection[int],
    keep_events: bool,
    is_trained: IsTrained,
) -> list[StepReport]:
    """One rank's program, which feeds these readers; the steps' reports."""

    def program(ctx: Context) -> list[StepReport]:
        rows = ctx.device.backend.empty((config.data.micro_batch, config.model.seq + 1), int64)  # takes no memory
        steps, micro_batches = config.optim.steps or 1 + config.optim.lazy_states, [rows] * config.data.accumulate
        inputs = Inputs(steps, lambda ctx, step: micro_batches, lambda flat, group: None)
        try:
            control = partial(_KnownSkips, skipped=skipped, estimates=config.optim.steps is None)
            return train_rank(ctx, config, inputs, is_trained=is_trained, make_control=control, repeats=repeats).reports
        finally:
            ledgers.events = ctx.device.recorder.history

    asked = world_of(config, keep_events=keep_events)
    world = replace(asked, backend="meta", transport="threads", per_process=1, max_running=1)
    readers = [reader for reader in ledgers.readers if reader is not ledgers.pool]  # shapes have no memory pool
    try:
        return launch_alone(program, world, ledgers.rank, (*readers, uneven))
    except OutOfMemory as error:
        ledgers.explain(error)
        raise


class _KnownSkips(StepControl):
    """The control of a run without values: which steps overflow is known beforehand. `estimates`: each is followed by
    an estimate of curvature, if ever one is."""

    def __init__(self, *args: Any, skipped: Collection[int], estimates: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._skipped = skipped
        self._estimates = estimates

    def is_due(self, every: int) -> bool:
        return every > 0 if self._estimates else super().is_due(every)

    def decide(self, scaled_norm: float) -> float | None:
        return super().decide(math.inf if len(self.reports) in self._skipped else scaled_norm)


class _UnevenReductions:
    """Reads all_reduce calls that their group does not divide, as (axes, elements): members add unlike shares."""

    def __init__(self) -> None:
        self.found: set[tuple[tuple[str, ...], int]] = set()

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Launch) and event.op == "all_reduce":
                numel = event.payload_bytes // dtype(event.dtype).itemsize
                if numel % len(event.group):
                    self.found.add((tuple(event.axis.split("+")), numel))
