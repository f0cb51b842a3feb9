"""A run on shapes alone: any model, any number of ranks, every byte counted and no value computed.

The program is that of a real run (`train/rank.py`), over a backend without data (`backends/meta.py`) and a transport
without other members (`comm/transports/fake.py`). So memory and traffic are those of a real run, record by record.

Few ranks have to run. Ranks differ in few ways: the padding at the end of their slices, the
units they own, their shares of a buffer that N does not divide. Ranks that agree in all of these record the same
bytes, and one represents all. Of ranks that differ only in the units they own, three programs tell the records of all
(`owners.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerosim.comm.runtime import Context, World, launch_alone
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit, is_exact, shares_with_pages
from zerosim.config.parts.parallel import owns_units
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Phase
from zerosim.device.events import Event, Kernel, Launch, Message, Wait
from zerosim.device.recorder import Reader
from zerosim.device.stretches import Repeat, Stretch
from zerosim.dtypes import dtype
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime, Timeline, simulate, step_time
from zerosim.ledger.costs import Costs
from zerosim.ledger.costs_of import costs_of
from zerosim.ledger.entries import Entries, Entry
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.pace import PaceLedger
from zerosim.ledger.ranks import RankLedgers
from zerosim.ledger.requests import Refused, RequestLedger
from zerosim.optim.control import StepControl, StepReport
from zerosim.parallel import context, experts
from zerosim.placement.classes import by_shares, classes, reasons
from zerosim.placement.layout import Layout
from zerosim.placement.memories import DEVICE
from zerosim.state.saver import NONE, Checkpoints
from zerosim.train.build import Whole, declare
from zerosim.train.collection import paused
from zerosim.train.delayed import check_timed, from_first, one_step, planned_steps, timed_step
from zerosim.train.extend import Planned, extrapolated, from_short_plans, shorter_runs
from zerosim.train.next_step import NextStep, steps_are_alike
from zerosim.train.nodes import check_nodes
from zerosim.train.offload import by_loading, node_memories
from zerosim.train.owners import spliced
from zerosim.train.rank import Inputs, train_rank
from zerosim.train.repeated import Rehearsals
from zerosim.train.result import RunResult, collect
from zerosim.train.saving_plan import by_writing, followers, planned_saves, with_save, without_save
from zerosim.train.work import check_plan
from zerosim.train.world import new_allocator, node_ranks, world_of

MOST_STEPS = 10
"""The most steps planned to decide whether a configuration fits."""


@paused()
def plan(
    config: RunConfig,
    *,
    every_rank: bool = False,
    every_block: bool = False,
    skipped: Collection[int] = (),
    keep_events: bool = False,
    cluster: Cluster | None = None,
    clock: bool = True,
) -> RunResult:
    """Count the memory and traffic of `run`, on shapes alone; `config.optim.steps` or, where it is None, one
    step, two where the first one makes states: of an optimizer that estimates curvature one with its estimate, whose
    `time` is the mean over steps. Where updates are delayed it is two, and they are delayed from the first one on: the
    second step is like all later ones.

    The result has no losses, norms and weights. `plan_config` makes a configuration with a plan's defaults.

    `every_rank` runs each rank instead of one of each class, and `every_block` each block instead of repeating what one
    did (`repeated.py`), as checks. `skipped` are the steps that
    overflow (there are no values to tell), as a real run reported them. Settings of `config` about values
    (data, weights, tokens, sample) are ignored. Of many microbatches few run, and the rest
    is extrapolated (`extend.py`), unless events are kept. With a `cluster` the memories of its nodes are limits and,
    unless `clock` is False, the result has the step's `time` on it.

    Raises: InputError, also where it would take far too long (`work.py`); OutOfMemory (where the configuration has a
    capacity, or where its nodes have less than their ranks hold).
    """
    config = from_first(config)
    if cluster is not None and clock:
        check_timed(config)
    check_plan_of(config, every_rank=every_rank, keep_events=keep_events)
    whole = declare(config)
    costs = costs_of(config, cluster) if cluster is not None and clock else None
    repeats: Rehearsals | None = None if every_block else {}
    beside = not shares_with_pages(config.memory)  # another allocator than exact serves requests beside the devices

    def planned(
        asked: RunConfig, by_moment: bool = False, node: Cluster | None = cluster, save: bool = False
    ) -> Planned:
        nonlocal beside
        kept = keep_events and not save
        how = asked, whole, every_rank, repeats, skipped, kept, node, costs, by_moment, save
        if beside and not kept and not is_exact(asked.memory):
            try:
                return _plan(*how, beside=True)
            except (Refused, OutOfMemory):  # the device may refuse before a node's host or its drives do
                beside = False
        return _plan(*how)

    def time_of(found: Planned) -> StepTime | None:
        return None if costs is None else _time(found, costs)

    others, result = node_memories(config, cluster), None
    if not keep_events:
        capacities = {DEVICE: config.memory.capacity, **others}
        try:
            result = from_short_plans(config, partial(planned, by_moment=True), time_of, capacities)
        except Refused:
            beside = False
    if result is None:
        check_plan(config, config.data.accumulate, every_rank=every_rank)
        found = planned(config)
        result = replace(found.result, time=time_of(found))
    check_nodes(result.memory, result.node_ranks, others)
    node = None if cluster is None else cluster.without_limits()
    return with_save(result, partial(planned, by_moment=True, node=node, save=True))


def check_plan_of(config: RunConfig, *, every_rank: bool = False, keep_events: bool = False) -> None:
    """Check a plan before it starts. Raises: InputError if it would take far too long."""
    extends = is_exact(config.memory) and not keep_events  # another allocator serves the requests of all microbatches
    counts = next(shorter_runs(config), ()) if extends else ()
    check_plan(config, sum(counts) or config.data.accumulate, every_rank=every_rank)


def _plan(
    config: RunConfig,
    whole: Whole,
    every_rank: bool,
    repeats: Rehearsals | None,
    skipped: Collection[int],
    keep_events: bool,
    cluster: Cluster | None,
    costs: Costs | None,
    by_moment: bool,
    save: bool = False,
    *,
    beside: bool = False,
) -> Planned:
    """Plan all microbatches; with `save` count the save after them. A record that is kept has the save too. `beside`:
    devices only count bytes, and their allocators serve a copy of their requests. Raises: Refused there."""
    saves = planned_saves(config) if save or keep_events else NONE
    around = (-1, 0, 1) if config.world.algorithm == "ring" else (0,)  # a ring passes on neighbours' shares
    of_owners = around if owns_units(config.parallel) else (0,)  # and what goes to an owner
    by_tensor = OPTIMIZERS[config.optim.optimizer].cut in ("blocks", "sums")
    world = world_of(config, keep_events=keep_events, cluster=cluster)
    if beside:
        world = replace(world, allocator="exact", allocator_conf=None, capacity=None)
    uneven, reports = dict[int, _UnevenReductions](), dict[int, list[StepReport]]()
    ledgers: dict[int, RankLedgers] = {}
    unread = (Message,) if costs is not None else (Message, Kernel, Wait)  # by these readers

    def readers_of(rank: int) -> tuple[Reader, ...]:
        timed = timed_step(config)
        served_by = new_allocator(config) if beside else None
        one = RankLedgers(
            rank, world.allocator, costs, by_moment=by_moment, timed=timed, saving=save, served_by=served_by
        )
        ledgers[rank], uneven[rank] = one, _UnevenReductions()
        return *(reader for reader in one.readers if reader is not one.pool), uneven[rank]  # shapes have no memory pool

    def run_as_owner(asked: RunConfig, layout: Layout, rank: int, reader: Reader) -> None:
        dealt = whole._replace(layout=layout)
        bare = replace(world, capacity=asked.memory.capacity)
        reports[rank], _ = _run_rank(asked, dealt, bare, rank, (reader,), repeats, skipped, saves, takes_turns=True)

    def fits(rank: int, record: Iterable[list[Event]]) -> bool:
        """Read a rank's record. Return whether its device refuses nothing."""
        readers, capacity = readers_of(rank), config.memory.capacity
        for events in record:
            for reader in readers:
                reader.read(events)
        return capacity is None or ledgers[rank].memory.peak.total_bytes <= capacity

    def run_program(rank: int) -> None:
        readers = readers_of(rank)
        try:
            ran = _run_rank(config, whole, world, rank, readers, repeats, skipped, saves)
        except OutOfMemory as error:
            ledgers[rank].explain(error)
            raise
        reports[rank], ledgers[rank].events = ran
        if isinstance(served := ledgers[rank].allocator, RequestLedger) and served.refuses:
            raise Refused

    def run(ranks: Collection[int]) -> None:
        new = sorted(set(ranks) - ledgers.keys())
        if new and config.memory.capacity is not None and not ledgers:
            run_program(new.pop(0))  # a plan that does not fit ends here as a rule
        alike = followers(config, whole.layout, new) if save else new
        records = {} if every_rank or keep_events else spliced(config, whole.layout, alike, run_as_owner, unread)
        for rank in new:
            if rank not in records or not fits(rank, records[rank]):
                run_program(rank)

    stands_for = list(range(config.mesh.ranks))
    if not every_rank:
        why = [*reasons(by_tensor=by_tensor), *context.unlike(config), *experts.unlike(config)]
        stands_for = by_loading(config, classes(whole.layout, why, of_owners))
        stands_for = by_writing(config, whole.layout, stands_for) if save else stands_for
        run(stands_for)  # only a record tells which reductions its group does not divide: then more ranks have to run
        found = {rank: uneven[rank].found for rank in set(stands_for)}
        stands_for = by_shares(stands_for, whole.layout.mesh, found, around)
    run(stands_for)
    size = node_ranks(config, cluster)
    result = collect(config, *whole, ledgers, stands_for, reports[0], keep_events=keep_events, node_ranks=size)
    entries = {rank: one.pace.entries for rank, one in ledgers.items() if one.pace is not None}
    requests = {rank: one.requests for rank, one in ledgers.items() if one.requests is not None}
    saved = {rank: one.save.last for rank, one in ledgers.items() if one.save is not None}
    return Planned(result, entries, requests, saved)


def _time(found: Planned, costs: Costs) -> StepTime:
    """Return the time of a planned step."""
    result, entries, config = found.result, found.entries, found.result.config

    def of(entries: Mapping[int, Entries]) -> StepTime:
        return step_time(simulate(entries, result.stands_for, config.mesh.axes, costs), result.stands_for)

    time = of(entries)
    if config.optim.steps is None and result.steps[0].estimated:  # one of that many steps has an estimate
        without = {rank: [one for one in entries[rank] if not _is_of_estimate(one)] for rank in entries}
        every = OPTIMIZERS[config.optim.optimizer].estimates_every
        time = extrapolated(of(without), time, 1 / every - 1)
    return time


def _is_of_estimate(entry: Entry) -> bool:
    return entry.scope.phase in (Phase.CURVATURE_FORWARD, Phase.CURVATURE_BACKWARD, Phase.CURVATURE)


def plan_first_step(config: RunConfig) -> RunResult:
    """Plan the first step alone, and keep its events; with delayed updates plan two steps."""
    return plan(config if config.optim.steps is None else one_step(config), keep_events=True)


def timeline_of(result: RunResult, cluster: Cluster, step: int | None = None) -> Timeline:
    """Return the timeline of a plan's step (default: `timed_step`): every kernel and collective on each rank that ran.
    The plan must have kept its events."""
    entries = paces_of(result, cluster, step, detail=True)
    costs = costs_of(result.config, cluster)
    return simulate(entries, result.stands_for, result.config.mesh.axes, costs, keep_spans=True)


def paces_of(
    result: RunResult, cluster: Cluster, step: int | None = None, *, detail: bool = False
) -> dict[int, list[Entry]]:
    """Return the clock's input for a plan's step, on each rank that ran. The plan must have kept its events."""
    costs = costs_of(result.config, cluster)
    step = timed_step(result.config) if step is None else step
    paces = {rank: PaceLedger(costs, step=step, detail=detail) for rank in result.ran}
    for rank, pace in paces.items():
        pace.read(result.events[rank])
    return {rank: pace.entries for rank, pace in paces.items()}


def judged(config: RunConfig, capacity: int | None) -> RunConfig:
    """Return the plan that decides whether a configuration fits devices of that capacity, with the same allocator.

    Exact bytes are the same in every step, so one step is planned. Other allocators carry free blocks from step to
    step, and their reserved bytes depend on the capacity. So the configuration's own steps are planned, at most
    `MOST_STEPS`.
    """
    config = without_save(config)
    own = None if is_exact(config.memory) else config.optim.steps
    steps = None if own is None else min(own, MOST_STEPS)
    return config.replace(capacity=None if capacity is None else max(1, capacity), steps=steps)


def peak_of(config: RunConfig, capacity: int | None = None, cluster: Cluster | None = None) -> int:
    """Return the peak bytes of a rank's device. The run fits if they are at most the capacity.

    An exact allocator needs the peak of live bytes on every device. Another one, and one whose pages move out, is
    judged on devices of that capacity; if it refuses a request, return the bytes with which it would have granted the
    request.

    Raises: OutOfMemory if the memory of a node's host or its drives are too small.
    """
    capacity = capacity if feels_limit(config.memory) else None
    return sum(peak_within(config, capacity, cluster).values())


def peak_within(config: RunConfig, capacity: int | None, cluster: Cluster | None = None) -> Mapping[str, int]:
    """Return the bytes by kind at the fullest rank's peak. The first rank that needs more than `capacity` ends the
    plan, and the bytes include the refused request. They exceed `capacity` exactly if the plan ended this way.

    Raises: OutOfMemory, as `peak_of`.
    """
    try:
        memory = plan(judged(config, capacity), cluster=cluster, clock=False).memory
    except OutOfMemory as error:
        if error.memory != DEVICE:
            raise
        asked = {**error.live, error.kind: error.live.get(error.kind, 0) + error.requested}
        return asked if error.room is None else _with_unused(asked, error.room.needed_bytes)
    most = max(memory, key=lambda rank: rank.reserved_bytes)
    return _with_unused(most.peak.by_kind, most.reserved_bytes)


def _with_unused(by_kind: Mapping[str, int], reserved_bytes: int) -> Mapping[str, int]:
    """Count an allocator's bytes beyond the live ones as a separate kind."""
    unused = reserved_bytes - sum(by_kind.values())
    return {**by_kind, "unused": unused} if unused else by_kind


class Figures(NamedTuple):
    """One step's figures: the peak bytes of a rank's device, the bytes that all ranks send of model states and
    activations, and its time."""

    peak_bytes: int
    sent_bytes: int
    time: StepTime | None


def figures_within(config: RunConfig, capacity: int, cluster: Cluster | None = None) -> Figures | None:
    """Return a step's figures; None if a rank needs more than `capacity`. The time is that on a `cluster`."""
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
    whole: Whole,
    world: World,
    rank: int,
    readers: tuple[Reader, ...],
    repeats: Rehearsals | None,
    skipped: Collection[int],
    saves: Checkpoints,
    *,
    takes_turns: bool = False,
) -> tuple[list[StepReport], list[Event]]:
    """Run one rank's program, which feeds these readers. Return the steps' reports, and the stored record."""

    def program(ctx: Context) -> tuple[list[StepReport], list[Event]]:
        ctx.device.takes_turns = takes_turns
        rows = np.broadcast_to(np.int64(-1), (config.data.micro_batch, config.model.columns))  # no token, and no memory
        steps, micro_batches = planned_steps(config), [rows] * config.data.accumulate
        inputs = Inputs(steps, lambda ctx, model, step: micro_batches, lambda flat, group: None, saves)
        control = partial(_KnownSkips, skipped=skipped, estimates=config.optim.steps is None)
        ledger, alike = next((one for one in readers if isinstance(one, MemoryLedger)), None), None
        is_record = world.keep_events or saves is not NONE  # every event is wanted, ids and all
        may_repeat = steps > 1 and repeats is not None and not is_record and steps_are_alike(config, skipped)
        if ledger is not None and may_repeat:
            alike = NextStep(ctx.device, ledger)
        trained = train_rank(ctx, config, inputs, make_control=control, whole=whole, repeats=repeats, alike=alike)
        return trained.reports, ctx.device.recorder.history

    alone = replace(world, backend="meta", transport="threads", per_process=1, max_running=1)
    return launch_alone(program, alone, rank, readers)


class _KnownSkips(StepControl):
    """The control of a run without values: the overflowing steps are known beforehand. `estimates`: each step is
    followed by an estimate of curvature, if the optimizer has one."""

    def __init__(self, *args: Any, skipped: Collection[int], estimates: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._skipped = skipped
        self._estimates = estimates

    def is_due(self, every: int) -> bool:
        return every > 0 if self._estimates else super().is_due(every)

    def decide(self, scaled_norm: float) -> float | None:
        return super().decide(math.inf if len(self.reports) in self._skipped else scaled_norm)


class _UnevenReductions:
    """A reader of all_reduce calls that their group does not divide, as (axes, elements): members add unequal
    shares, unless each adds all of it."""

    def __init__(self) -> None:
        self.found: set[tuple[tuple[str, ...], int]] = set()

    folds = True

    def read(self, events: Sequence[Event | Repeat]) -> None:
        for event in events:
            if type(event) is Repeat:
                if event.calls:
                    self.found |= event.stretch.once(_uneven_of, tuple(len(group) for group, _ in event.calls))
            elif type(event) is Launch:
                self._look(event, len(event.group))

    def _look(self, call: Launch, size: int) -> None:
        if call.op == "all_reduce" and call.algorithm != "pairs":
            numel = call.payload_bytes // dtype(call.dtype).itemsize
            if numel % size:
                self.found.add((tuple(call.axis.split("+")), numel))


def _uneven_of(stretch: Stretch, sizes: Sequence[int]) -> set[tuple[tuple[str, ...], int]]:
    """Return a stretch's, in groups of these sizes."""
    reader = _UnevenReductions()
    for event in stretch.events:
        if isinstance(event, Launch):
            reader._look(event, sizes[event.group[0]])
    return reader.found
